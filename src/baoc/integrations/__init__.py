"""What frameworks need beyond the ``torch.optim.Optimizer`` contract. None of them is imported until it is used."""

from baoc.integrations.groups import spare_vectors
from baoc.integrations.release import release_gradients
from baoc.integrations.unwrap import see_through, unwrap

__all__ = ["release_gradients", "see_through", "spare_vectors", "unwrap"]

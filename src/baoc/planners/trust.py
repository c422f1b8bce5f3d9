"""Where rules that work on whole matrices are not trusted, although the regime has them.

In the zoo (`docs/results/zoo.md`), networks with normalization layers win or tie with Muon. One did not: attention over
a set of points that regresses a single number. Muon ended 40 to 50% above AdamW there, at any precision and with the
fused projection split, and 30% below it with AdamW for that projection alone. Attention over tokens or patches, with a
head over classes, lost nothing.
"""

from __future__ import annotations

import re

from baoc.core.roles import HIDDEN, Role
from baoc.planners.model_facts import SCRATCH, ModelFacts

_PROJECTION = re.compile(
    r"(^|[._])(in_proj|qkv|c_attn|query_key_value|query|key|value|[qkv]_proj|to_(q|k|v|kv|qkv)|w[qkv])(?=[._]|$)",
    re.IGNORECASE,
)
WHY = "queries, keys and values of a network with one output: Muon is not trusted there"


def untrusted(model: ModelFacts, regime: str) -> frozenset[str]:
    """Return the parameters that must not have Muon or Spectral.

    These are the projections to queries, keys and values, if all heads of the model have a single output.

    Args:
        model: facts about the model.
        regime: the regime that is planned for.

    Returns:
        Names of parameters.

    Example:
        >>> from torch import nn
        >>> def facts(outputs):
        ...     layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        ...     return ModelFacts.of(nn.Sequential(nn.Linear(3, 16), layer, nn.Linear(16, outputs)))
        >>> untrusted(facts(1), "scratch"), untrusted(facts(10), "scratch")
        (frozenset({'1.self_attn.in_proj_weight'}), frozenset())
    """
    outputs = [shape[0] for name, shape in model.shapes.items() if model.role(name) is Role.HEAD]
    if regime != SCRATCH or not outputs or max(outputs) > 1:
        return frozenset()
    hidden = (name for name in model.shapes if model.role(name) in HIDDEN)
    return frozenset(name for name in hidden if _PROJECTION.search(name.replace("in_proj_weight", "in_proj.weight")))

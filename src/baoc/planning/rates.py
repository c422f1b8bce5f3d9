"""How fast each role learns beside the hidden weights, for whose sake the one learning rate is what it is.

A rate that is best for AdamW on a whole model is as large as hidden matrices bear. Tables of embeddings and vectors do
better with more while they are learned from scratch; what was trained before should stay near where it is. Measured in
`docs/results/rates.md`. The factors are part of a plan, as the ``lr_scale`` of its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

from baoc.core.roles import HIDDEN, Role
from baoc.core.spec import Shape
from baoc.profiling.facts import SCRATCH

BY_ROLE, BY_LENGTH, AS_GIVEN = "role", "rms", "none"
MATCHES = {
    BY_ROLE: "as long as AdamW's, times what suits a block's role",
    BY_LENGTH: "as long as AdamW's",
    AS_GIVEN: "the paper's",
}
"""What updates of a block may be, by the value of ``lr_match``."""
TABLE, VECTOR = 4.0, 2.0
"""Of the learning rate: for embeddings that are looked up, and for vectors."""
_TALL = 2  # rows of a table to its columns: position embeddings of images and maps of patches are not looked up


def lr_factors(params: Mapping[str, tuple[Role, Shape]], regime: str) -> dict[str, float]:
    """Of all parameters of a model; without hidden weights, the learning rate is meant for what there is.

    >>> table = {"words": (Role.EMBEDDING, (50257, 768))}
    >>> lr_factors(table, "scratch"), lr_factors(table | {"up": (Role.MATRIX, (768, 768))}, "scratch")
    ({'words': 1.0}, {'words': 4.0, 'up': 1.0})
    """
    if not any(role in HIDDEN for role, _ in params.values()):
        return dict.fromkeys(params, 1.0)
    return {name: lr_factor(role, shape, regime) for name, (role, shape) in params.items()}


def lr_factor(role: Role, shape: Shape, regime: str) -> float:
    """What a parameter's learning rate is multiplied by.

    >>> lr_factor(Role.EMBEDDING, (50257, 768), "scratch"), lr_factor(Role.EMBEDDING, (50257, 768), "finetune")
    (4.0, 1.0)
    >>> lr_factor(Role.VECTOR, (768,), "scratch"), lr_factor(Role.HEAD, (50257, 768), "scratch")
    (2.0, 1.0)
    """
    if regime != SCRATCH:
        return 1.0
    if role is Role.EMBEDDING and len(shape) == 2 and shape[0] >= _TALL * shape[1]:
        return TABLE
    return VECTOR if role is Role.VECTOR else 1.0

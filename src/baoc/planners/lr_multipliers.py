"""Learning-rate multipliers by role.

A learning rate that is best for AdamW on a whole model is as large as hidden matrices tolerate. From scratch, tables of
embeddings, heads over a vocabulary and vectors do better with more; pretrained ones should stay near where they are.
Measured in `docs/results/rates.md` and, for heads, `docs/results/rules.md`. The multipliers are part of a plan, as the
``lr_scale`` of its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping

from baoc.core.roles import HIDDEN, Role
from baoc.core.spec import Shape
from baoc.planners.model_facts import SCRATCH

TABLE, HEAD, VECTOR = 4.0, 2.0, 2.0
"""For embeddings that are looked up, for heads over a vocabulary, and for vectors."""
_TALL = 2
"""Rows of a vocabulary to its columns: position embeddings, maps of patches and heads over few classes have less."""
_WORDS = 128
"""Rows of a vocabulary: smaller tables are of categories, where a higher rate loses (`docs/results/zoo.md`)."""

_OF_VOCABULARY = {Role.EMBEDDING: TABLE, Role.HEAD: HEAD}


def multipliers(params: Mapping[str, tuple[Role, Shape]], regime: str) -> dict[str, float]:
    """Return the learning-rate multiplier of every parameter of a model.

    Without hidden weights, the learning rate is meant for what there is: all multipliers are 1.

    Args:
        params: role and shape of every parameter, by name.
        regime: only "scratch" has multipliers other than 1.

    Example:
        >>> table = {"words": (Role.EMBEDDING, (50257, 768))}
        >>> multipliers(table, "scratch"), multipliers(table | {"up": (Role.MATRIX, (768, 768))}, "scratch")
        ({'words': 1.0}, {'words': 4.0, 'up': 1.0})
    """
    if not any(role in HIDDEN for role, _ in params.values()):
        return dict.fromkeys(params, 1.0)
    return {name: multiplier(role, shape, regime) for name, (role, shape) in params.items()}


def multiplier(role: Role, shape: Shape, regime: str) -> float:
    """Return the learning-rate multiplier of one parameter of a model with hidden weights.

    Example:
        >>> multiplier(Role.EMBEDDING, (50257, 768), "scratch"), multiplier(Role.EMBEDDING, (50257, 768), "finetune")
        (4.0, 1.0)
        >>> multiplier(Role.VECTOR, (768,), "scratch"), multiplier(Role.HEAD, (50257, 768), "scratch")
        (2.0, 2.0)
        >>> multiplier(Role.EMBEDDING, (50, 8), "scratch")  # categories
        1.0
    """
    if regime != SCRATCH:
        return 1.0
    if role is Role.VECTOR:
        return VECTOR
    is_vocabulary = len(shape) == 2 and shape[0] >= max(_WORDS, _TALL * shape[1])
    return _OF_VOCABULARY.get(role, 1.0) if is_vocabulary else 1.0

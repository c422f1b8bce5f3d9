"""Blocks whose codes do not suffice get wider ones, if the budget has room for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping

from baoc.core.configuration import Configuration
from baoc.core.plan import Plan

EARLY = (1, 10)  # steps
CHECK_EVERY = 100  # steps
MANY = 0.5  # of a block's groups
_WIDER = {"int4": "int8", "int8": "bf16"}


def is_due(steps: int) -> bool:
    """Whether to look after so many steps of a plan: strain shows in the first, and weights that it has spoilt stay so.

    >>> [steps for steps in range(301) if is_due(steps)]
    [1, 10, 100, 200, 300]
    """
    return steps in EARLY or (steps > 0 and steps % CHECK_EVERY == 0)


def wider(configuration: Configuration) -> Configuration | None:
    """The same mechanism with the next wider codes where it has groups of them; ``None`` if it has none.

    >>> from baoc.core.configuration import parse
    >>> str(wider(parse("adamw[m=int4,v=factored]"))), str(wider(parse("adamw-8"))), wider(parse("adamw-16"))
    ('adamw[m=int8,v=factored]', 'adamw[m=bf16,v=bf16]', None)
    """
    codecs = tuple((slot, _WIDER.get(codec, codec)) for slot, codec in configuration.codec_names)
    if codecs == configuration.codec_names:
        return None
    return dataclasses.replace(configuration, codec_names=codecs)


def promoted(
    plan: Plan,
    strained: Mapping[str, float],
    candidates: Container[Configuration] | None,
    fits: Callable[[Plan], bool],
) -> tuple[Plan, list[str]]:
    """A plan in which blocks with many strained groups have wider codes, the most strained first, and what became of
    which, in words.

    ``strained`` are shares by block, ``candidates`` what blocks may have, ``None`` if nobody has said: more of the same
    codes is no new risk, measured or not. ``fits`` knows the budgets.
    """
    told = []
    for name in sorted((name for name in strained if strained[name] >= MANY), key=lambda name: -strained[name]):
        block = next(block for block in plan.blocks if block.name == name)
        configuration = wider(block.configuration)
        if configuration is None or (candidates is not None and configuration not in candidates):
            continue
        why = f"promoted from {block.configuration.alias}: {strained[name]:.0%} of its groups were strained"
        safer = dataclasses.replace(block, configuration=configuration, why=why)
        wide = dataclasses.replace(plan, blocks=tuple(safer if each is block else each for each in plan.blocks))
        if fits(wide):
            plan = wide
            told.append(f"{name}: {configuration.alias}, {why}")
    return plan, told

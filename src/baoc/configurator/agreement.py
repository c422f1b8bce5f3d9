"""How ranks come to one plan: what they must have in common is compared, and what is left to decide the first decides.

Every function is a collective one: all ranks of the group call it, or none. None is called where there is one rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from baoc.core.plan import PlanError

T = TypeVar("T")
Group = Any  # a torch.distributed.ProcessGroup, or None for all ranks


def is_one_of_many(group: Group) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def from_first(value: T, group: Group) -> T:
    """The first rank's value, on all ranks."""
    if not is_one_of_many(group):
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    return box[0]


def first_decides(decide: Callable[[], T], group: Group) -> T:
    """What the first rank decides, on all ranks; if it cannot, none can, so that none waits for another."""
    if not is_one_of_many(group):
        return decide()
    decided: T | None = None
    failure: str | None = None
    if dist.get_rank(group) == 0:
        try:
            decided = decide()
        except Exception as error:
            failure = f"{error}" if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
    decided, failure = from_first((decided, failure), group)
    if failure is not None:
        raise PlanError(failure)
    return decided  # type: ignore[return-value]


def check_alike(facts: Mapping[str, Sequence[str]], group: Group) -> None:
    """Raise, on all ranks, unless all have the same facts: lists of lines under a title, few of which will differ."""
    mine = {title: hashlib.sha256("\n".join(lines).encode()).hexdigest() for title, lines in facts.items()}
    gathered = _gathered(mine, group)
    for title in facts:
        digests = [each.get(title) for each in gathered]
        if len(set(digests)) == 1:
            continue
        lines = _gathered(list(facts[title]), group)  # all ranks know that some differ, so all come here
        rank = next(index for index, digest in enumerate(digests) if digest != digests[0])
        here, there = _first_difference(lines[0], lines[rank])
        raise RuntimeError(
            f"ranks differ in their {title}: rank 0 has {here}, and rank {rank} has {there}. All ranks must build the "
            "same optimizer and load the same checkpoint, or their weights would drift apart. If they are meant to "
            "train different models, give each its own process_group=."
        )


def _gathered(value: T, group: Group) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _first_difference(first: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    for here, there in zip(first, other):
        if here != there:
            return here, there
    longer = first if len(first) > len(other) else other
    more = longer[min(len(first), len(other))]
    return (more, "no such entry") if longer is first else ("no such entry", more)

"""How ranks agree: they compare what must be equal, and take the first rank's result for what they decide.

Every function is collective: all ranks of the group call it, or none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from baoc.core.plan import PlanError
from baoc.core.sharding import Ranks

T = TypeVar("T")
Group = Any  # a torch.distributed.ProcessGroup, or None for all ranks


def has_peers(group: Group) -> bool:
    """Return whether there are other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def from_first(value: T, group: Group) -> T:
    """Return the first rank's value, on all ranks."""
    if not has_peers(group):
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    return box[0]


def decide(function: Callable[[], T], group: Group) -> T:
    """Call a function on all ranks and return the first rank's result on all of them.

    The function may itself be collective. If it fails on the first rank, it fails on all: no rank waits for another.

    Raises:
        PlanError: it failed on the first rank of several.
    """
    if not has_peers(group):
        return function()
    result: T | None = None
    failure: str | None = None
    try:
        result = function()
    except Exception as error:
        failure = f"{error}" if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
    result, failure = from_first((result, failure), group)
    if failure is not None:
        raise PlanError(failure)
    return result  # type: ignore[return-value]


def total(count: int, ranks: Ranks, device: torch.device) -> int:
    """Return the sum of the counts of all ranks that share parameters on a device."""
    return int(ranks.sum(torch.tensor(count, dtype=torch.int64, device=device)))


def check_equal(facts: Mapping[str, Sequence[str]], group: Group) -> None:
    """Raise on all ranks unless all have the same facts.

    Args:
        facts: lines of text under a title.
        group: ranks.

    Raises:
        RuntimeError: ranks differ; names the first line that does.
    """
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

"""How ranks agree: they compare what must be equal, and take the first rank's result for what they decide.

Every method that communicates is collective: all ranks of the group call it, or none.
"""

from __future__ import annotations

import gc
import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from baoc.core.plan import PlanError

T = TypeVar("T")
Group = Any  # a torch.distributed.ProcessGroup, or None for all ranks


class Peers:
    """The ranks that train one model.

    Within DDP's ``join()``, a rank without data calls nothing but DDP's own collectives: it would never answer, or take
    our collective for one of DDP's. So from the first step in ``join()`` on, no rank asks another, and each decides by
    itself. Planners are pure functions and DDP reduces gradients, so ranks that still have data decide alike.

    Args:
        group: their process group; all ranks by default.
    """

    def __init__(self, group: Group = None) -> None:
        self._group = group
        self._wrappers: list[weakref.ref[DistributedDataParallel]] = []
        self._has_joined = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(Peers())  # a process group cannot be copied

    @property
    def exist(self) -> bool:
        """Whether there are other ranks."""
        return dist.is_available() and dist.is_initialized() and dist.get_world_size(self._group) > 1

    @property
    def answer(self) -> bool:
        """Whether there are other ranks, and all of them make the same calls as this one."""
        if not self.exist:
            return False
        wrappers = (reference() for reference in self._wrappers)
        self._has_joined |= any(wrapper is not None and wrapper._join_config.enable for wrapper in wrappers)
        return not self._has_joined

    def find_wrappers(self, params: Iterable[Tensor]) -> None:
        """Find the DDP modules of some parameters, which know whether ``join()`` is in use.

        Nothing leads from a parameter to its DDP module, so this looks through all objects. It takes a fraction of a
        second; call it where training starts, not in each step.
        """
        self._wrappers, self._has_joined = [], False
        if not self.exist:
            return
        mine = {id(param) for param in params}
        for each in gc.get_objects():
            if issubclass(type(each), DistributedDataParallel) and any(id(p) in mine for p in each.parameters()):
                self._wrappers.append(weakref.ref(each))

    def first(self, value: T) -> T:
        """Return the first rank's value, on all ranks."""
        if not self.answer:
            return value
        box = [value]
        source = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]

    def decide(self, function: Callable[[], T]) -> T:
        """Call a function on all ranks and return the first rank's result on all of them.

        The function may itself be collective. If it fails on the first rank, it fails on all: no rank waits for
        another.

        Raises:
            PlanError: it failed on the first rank of several.
        """
        if not self.answer:
            return function()
        result: T | None = None
        failure: str | None = None
        try:
            result = function()
        except Exception as error:
            failure = f"{error}" if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
        result, failure = self.first((result, failure))
        if failure is not None:
            raise PlanError(failure)
        return result  # type: ignore[return-value]

    def attempt(self, function: Callable[[], T], device: torch.device) -> T:
        """Call a function on all ranks, and raise on all of them if it fails on one.

        Args:
            function: not collective.
            device: where a flag can be reduced.

        Returns:
            This rank's result.

        Raises:
            PlanError: it failed on one of several ranks; says on which, and why.
        """
        if not self.answer:
            return function()
        result: T | None = None
        failure: Exception | None = None
        try:
            result = function()
        except Exception as error:
            failure = error
        if not bool(self.sum(torch.tensor(failure is not None, dtype=torch.float32, device=device))):
            return result  # type: ignore[return-value]
        reasons = self._gathered(None if failure is None else f"{type(failure).__name__}: {failure}")
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
        raise PlanError(
            f"rank {rank} of {len(reasons)} could not adopt the new plan: {reason}. All ranks stopped at the same "
            "parameter: those before it have their new configuration, the others keep their old one."
        ) from failure

    def sum(self, partial: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place, and return it."""
        if self.answer:
            dist.all_reduce(partial, group=self._group)
        return partial

    def check_equal(self, facts: Mapping[str, Sequence[str]]) -> None:
        """Raise on all ranks unless all have the same facts.

        Args:
            facts: lines of text under a title.

        Raises:
            RuntimeError: ranks differ; names the first line that does.
        """
        mine = {title: hashlib.sha256("\n".join(lines).encode()).hexdigest() for title, lines in facts.items()}
        gathered = self._gathered(mine)
        for title in facts:
            digests = [each.get(title) for each in gathered]
            if len(set(digests)) == 1:
                continue
            lines = self._gathered(list(facts[title]))  # all ranks know that some differ, so all come here
            rank = next(index for index, digest in enumerate(digests) if digest != digests[0])
            here, there = _first_difference(lines[0], lines[rank])
            raise RuntimeError(
                f"ranks differ in their {title}: rank 0 has {here}, and rank {rank} has {there}. All ranks must build "
                "the same optimizer and load the same checkpoint, or their weights would drift apart. If they are "
                "meant to train different models, give each its own process_group=."
            )

    def _gathered(self, value: T) -> list[T]:
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values


def _first_difference(first: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    for here, there in zip(first, other):
        if here != there:
            return here, there
    longer = first if len(first) > len(other) else other
    more = longer[min(len(first), len(other))]
    return (more, "no such entry") if longer is first else ("no such entry", more)

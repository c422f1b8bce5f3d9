"""Gradients that are no numbers: they are seen, counted and said once, and what becomes of their step is for the user
to say.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baoc.core.sharding import Ranks
from baoc.core.spec import SPIKE
from baoc.optim.kernels.job import Job
from baoc.optim.state import set_age

logger = logging.getLogger("baoc")

POLICIES = ("step", "skip", "raise")
_READ_EVERY = 64  # steps: how long a count may stay on a device where nothing waits for it
_NAMED = 3


@dataclass(frozen=True)
class Counts:
    """Steps since the optimizer was made."""

    nonfinite: int = 0
    """Some gradient had an element that is no finite number."""
    skipped: int = 0
    """Those of them that changed nothing."""
    clipped: int = 0
    """Some gradient had an element beyond 2**56 that was left out of numbers it would share with its neighbours."""


class Guard:
    """Looks at the gradients of every step.

    ``"skip"`` and ``"raise"`` make a norm of each gradient before the update, on its device, and one number of them
    says whether the step is made. Where parameters are sharded, ranks add up what they found, so that all of them
    decide alike. The host reads that number, as ``torch.amp.GradScaler`` does: on a GPU it waits for the backward pass
    there. A kernel that reads it on the device leaves everything as it is by itself, and the host learns of it *late*,
    before the next step: nothing waits, and ages that were counted for nothing are taken back then.

    ``"step"`` waits for nothing: the native kernel looks at gradients that it has in its registers anyway, and what
    devices counted is read now and then; a rank counts what is in its own rows.
    """

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"on_nonfinite is {policy!r}. Choose one of {', '.join(map(repr, POLICIES))}.")
        self.policy = policy
        self._counts = Counts()
        self._unread: list[Tensor] = []  # each (2,): see _look
        self._is_told = False
        self._open: _Open | None = None
        self.flag: Tensor | None = None
        """On the device: unless its first number is zero, the kernel must not change anything in this step."""

    @property
    def counts(self) -> Counts:
        """Of all steps that are settled."""
        self._settle()
        return self._counts

    @torch.no_grad()
    def admits(
        self, by_device: Mapping[torch.device, Sequence[Job]], ranks: Iterable[Ranks], late: bool = False
    ) -> bool:
        """Whether a step may change anything. All ``ranks`` must ask.

        ``late``: there is one device, whose kernel reads :attr:`flag`; where that says no, nobody knows it yet.
        """
        self.flag = None  # of a step that an error has ended
        if self.policy == "step":
            return True
        for job in (job for jobs in by_device.values() for job in jobs):
            job.refuse_freed()
        found = [_look(jobs, device) for device, jobs in by_device.items()]
        if found:
            for each in ranks:
                each.sum(found[0])
        if late and self.policy == "skip" and found:
            self.flag = found[0]
            return True
        self._unread += found
        return self._settle(by_device)

    def refuse_capture(self) -> None:
        """Raise if a graph would have to stop itself."""
        if self.policy != "step":
            raise RuntimeError(
                f"on_nonfinite={self.policy!r} has to look at gradients between the backward pass and the step, which "
                "a CUDA graph of both cannot. Use on_nonfinite='step', or step after each replay, not in the graph."
            )

    @torch.no_grad()
    def note(self, by_device: Mapping[torch.device, Sequence[Job]]) -> None:
        """A step was made, and these may have had gradients that are no numbers."""
        if self.flag is not None:
            self._open = _Open(self.flag, [job for jobs in by_device.values() for job in jobs])
            self.flag = None
        if self.policy != "step" or not by_device:
            return
        found = [_look(jobs, device) for device, jobs in by_device.items()]
        self._unread += found
        if all(each.is_cpu for each in found) or len(self._unread) >= _READ_EVERY:
            self._settle(by_device)

    def settle(self) -> bool | None:
        """Whether the last step was made, where its kernel has decided that; ``None`` if that is known already."""
        if self._open is None:
            return None
        opened, self._open = self._open, None
        self._unread.append(opened.found())
        was_made = self._settle()
        if not was_made:
            opened.take_back_ages()
        return was_made

    def _settle(self, by_device: Mapping[torch.device, Sequence[Job]] | None = None) -> bool:
        """Count what was found; whether the last step may change anything."""
        unread, self._unread = self._unread, []
        bad = sum(bool(found[0]) for found in unread)
        spiked = sum(bool(found[1]) for found in unread)
        if not bad and not spiked:
            return True
        if self.policy != "step":  # one step, on one device or several
            bad, spiked = min(bad, 1), min(spiked, 1)
        skips = bad and self.policy == "skip"
        then = self._counts
        self._counts = Counts(then.nonfinite + bad, then.skipped + skips, then.clipped + spiked)
        if bad:
            self._tell([job for jobs in (by_device or {}).values() for job in jobs])
        return not skips

    def _tell(self, jobs: Sequence[Job]) -> None:
        """Raise, or say it once."""
        if self.policy != "raise" and self._is_told:
            return
        self._is_told = True
        what = f"gradients are not finite{_where(jobs)}"
        if self.policy == "raise":
            raise FloatingPointError(
                f"{what}. Nothing was changed. Lower the learning rate, clip gradients, look for a bad batch, or leave "
                "such steps out with on_nonfinite='skip'."
            )
        does = {
            "step": "the step is made all the same, as torch.optim does, and spoils the weights it reaches. "
            "on_nonfinite='skip' leaves such steps out, and 'raise' stops at them",
            "skip": "the step changes neither weights nor state",
        }[self.policy]
        logger.warning("%s: %s. This is said once; optimizer.metrics() counts them.", what, does)


class _Open:
    """A step that its kernel may have left out: what was found is on its way to the host."""

    def __init__(self, flag: Tensor, jobs: Sequence[Job]) -> None:
        self._found = flag.clone() if flag.is_cpu else torch.empty(flag.shape, dtype=flag.dtype, pin_memory=True)
        self._arrival: torch.cuda.Event | None = None
        if flag.is_cuda:
            self._found.copy_(flag, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record(torch.cuda.current_stream(flag.device))
        # not the jobs, which hold gradients
        self._ages = [(job.state, stored, age - 1) for job in jobs for stored, age in zip(job.layout.formats, job.ages)]

    def found(self) -> Tensor:
        """Waits for the step that it is of, and for nothing that came after."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._found

    def take_back_ages(self) -> None:
        for state, stored, age in self._ages:
            set_age(state, stored, age)


def _look(jobs: Sequence[Job], device: torch.device) -> Tensor:
    """Whether some gradient of a device is not finite, and whether one has a spike that is left out; shape (2,)."""
    jobs = [job for job in jobs if job.grad.numel()]
    if device.type == "cpu":
        # This norm is as fast as memory, and bounds all elements: hardly ever is there anything left to look at.
        norms = torch._foreach_norm([job.grad for job in jobs], 2.0, torch.float32) if jobs else []
        jobs = [job for job, norm in zip(jobs, norms) if not float(norm) < SPIKE]
    if not jobs:
        return torch.zeros(2, device=device)
    sharing = [job.grad for job in jobs if job.layout.shares]
    others = [job.grad for job in jobs if not job.layout.shares]
    largest = torch.stack(torch._foreach_norm(sharing + others, math.inf, torch.float32))  # (jobs,)
    finite = largest.isfinite()
    spiked = finite & (largest >= SPIKE)
    return torch.stack(((~finite).any(), spiked[: len(sharing)].any())).float()


def _where(jobs: Sequence[Job]) -> str:
    """Which they are, as far as this process can tell."""
    names = [job.name for job in jobs if not bool(job.grad.isfinite().all())]
    if not names:
        return " (on another rank, or in an earlier step)"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f" in {', '.join(map(repr, names[:_NAMED]))}{more}"

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

    ``"skip"`` and ``"raise"`` make a norm of each gradient before the update, on its device, and read one number of
    them, as ``torch.amp.GradScaler`` reads its own: on a GPU the host waits for the backward pass there. Where
    parameters are sharded, ranks add up what they found, so that all of them decide alike. ``"step"`` waits for
    nothing: the native kernel looks at gradients that it has in its registers anyway, and what devices counted is read
    now and then; a rank counts what is in its own rows.
    """

    def __init__(self, policy: str) -> None:
        if policy not in POLICIES:
            raise ValueError(f"on_nonfinite is {policy!r}. Choose one of {', '.join(map(repr, POLICIES))}.")
        self.policy = policy
        self._counts = Counts()
        self._unread: list[Tensor] = []  # each (2,): see _look
        self._is_told = False

    @property
    def counts(self) -> Counts:
        self._settle()
        return self._counts

    @torch.no_grad()
    def admits(self, by_device: Mapping[torch.device, Sequence[Job]], ranks: Iterable[Ranks]) -> bool:
        """Whether a step may change anything. All ``ranks`` must ask."""
        if self.policy == "step":
            return True
        found = [_look(jobs, device) for device, jobs in by_device.items()]
        if found:
            for each in ranks:
                each.sum(found[0])
        self._unread += found
        return self._settle(by_device)

    @torch.no_grad()
    def note(self, by_device: Mapping[torch.device, Sequence[Job]]) -> None:
        """A step was made, and these may have had gradients that are no numbers."""
        if self.policy != "step" or not by_device:
            return
        found = [_look(jobs, device) for device, jobs in by_device.items()]
        self._unread += found
        if all(each.is_cpu for each in found) or len(self._unread) >= _READ_EVERY:
            self._settle(by_device)

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


def _look(jobs: Sequence[Job], device: torch.device) -> Tensor:
    """Whether some gradient of a device is not finite, and whether one has a spike that is left out; shape (2,)."""
    for job in jobs:
        job.refuse_freed()
    jobs = [job for job in jobs if job.grad.numel()]
    if device.type == "cpu":
        # This norm is as fast as memory, and bounds all elements: hardly ever is there anything left to look at.
        norms = torch._foreach_norm([job.grad for job in jobs], 2.0, torch.float32) if jobs else []
        jobs = [job for job, norm in zip(jobs, norms) if not float(norm) < SPIKE]
    if not jobs:
        return torch.zeros(2, device=device)
    largest = torch.stack(torch._foreach_norm([job.grad for job in jobs], math.inf, torch.float32))  # (jobs,)
    shares = torch.tensor([job.layout.shares for job in jobs]).to(device, non_blocking=True)
    finite = largest.isfinite()
    return torch.stack(((~finite).any(), (finite & shares & (largest >= SPIKE)).any())).float()


def _where(jobs: Sequence[Job]) -> str:
    """Which they are, as far as this process can tell."""
    names = [job.name for job in jobs if not bool(job.grad.isfinite().all())]
    if not names:
        return " (on another rank, or in an earlier step)"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f" in {', '.join(map(repr, names[:_NAMED]))}{more}"

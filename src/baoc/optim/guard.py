"""What is noticed in steps: non-finite gradients (:class:`Guard`), sizes of updates and underflow (:class:`Watch`).

The guard finds and counts non-finite gradients, warns once, and applies the user's policy to their step. The watch
estimates metrics from small samples when they are asked for: a step that nobody watches costs nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baoc.core.mechanisms import pooled_rms
from baoc.core.sharding import Ranks
from baoc.core.spec import SPIKE
from baoc.optim.agreement import Peers
from baoc.optim.kernels.job import Job
from baoc.optim.members import Member
from baoc.optim.state import set_age

# ---- non-finite gradients ----

logger = logging.getLogger("baoc")

POLICIES = ("step", "skip", "raise")
_READ_EVERY = 64  # steps: how long a count may stay on a device where nothing waits for it
_NAMED = 3


@dataclass(frozen=True)
class Counts:
    """Numbers of steps since the optimizer was made."""

    nonfinite: int = 0
    """Steps with a non-finite gradient."""
    skipped: int = 0
    """Those of them that were skipped."""
    clipped: int = 0
    """Steps with a gradient element beyond 2**56 that was left out of statistics that several elements share."""


class Guard:
    """Checks the gradients of every step.

    ``"skip"`` and ``"raise"`` compute a norm of each gradient before the update, on its device, and reduce them to one
    number that says whether the step is made. Ranks that share or replicate parameters add up what they found, so that
    all decide alike. The host reads that number, as ``torch.amp.GradScaler`` does: on a GPU it waits for the backward
    pass. A kernel that reads the number on the device skips the step by itself, and the host learns of it *late*,
    before the next step: nothing waits, and the ages of a skipped step are taken back then.

    ``"step"`` waits for nothing: the native kernel checks gradients that it has in registers anyway, and counts on
    other devices are read now and then. A rank counts what is in its own rows.

    Args:
        policy: ``"step"``, ``"skip"`` or ``"raise"``.
        peers: ranks that train the same model. Without them, replicas decide each by itself.
    """

    def __init__(self, policy: str, peers: Peers | None = None) -> None:
        if policy not in POLICIES:
            raise ValueError(f"on_nonfinite must be one of {', '.join(map(repr, POLICIES))}, got {policy!r}.")
        self.policy = policy
        self.peers = peers
        self._counts = Counts()
        self._unread: list[Tensor] = []  # each (2,): see look
        self._has_warned = False
        self._open: _Open | None = None
        self.flag: Tensor | None = None
        """On the device, shape (2,): unless its first number is zero, the kernel must not change anything."""

    @property
    def counts(self) -> Counts:
        """Of all steps whose outcome is known."""
        self._read()
        return self._counts

    @torch.no_grad()
    def admits(
        self, by_device: Mapping[torch.device, Sequence[Job]], ranks: Iterable[Ranks], late: bool = False
    ) -> bool:
        """Return whether a step may change anything. A collective of all ``ranks`` and of the peers.

        Args:
            by_device: the jobs of the step. A rank without gradients has a device without jobs.
            ranks: those that share sharded parameters.
            late: there is one device, and its kernel reads :attr:`flag`. If that stops the step, the host learns it in
                :meth:`synchronize`.
        """
        self.flag = None  # of a step that an error has ended
        if self.policy == "step":
            return True
        for job in (job for jobs in by_device.values() for job in jobs):
            job.refuse_freed()
        found = [look(jobs, device) for device, jobs in by_device.items()]
        if len(found) > 1:
            found = [torch.stack([each.to(found[0].device) for each in found]).amax(0)]
        for each in ranks:
            each.sum(found[0])
        if self.peers is not None:
            self.peers.sum(found[0])
        if late and self.policy == "skip":
            self.flag = found[0]
            return True
        self._unread += found
        return self._read(by_device)

    def admits_found(self, found: Tensor, ranks: Iterable[Ranks], names: Sequence[str]) -> bool:
        """Do the same as :meth:`admits` for gradients that are gone.

        Args:
            found: what :func:`look` would have returned for all of them.
            ranks: those that share sharded parameters.
            names: parameters with non-finite gradients.
        """
        if self.policy == "step":
            return True
        for each in ranks:
            each.sum(found)
        self._unread.append(found)
        return self._read(names=names)

    def refuse_capture(self) -> None:
        """Raise if a captured graph would have to stop itself."""
        if self.policy != "step":
            raise RuntimeError(
                f"on_nonfinite={self.policy!r} has to look at gradients between the backward pass and the step, which "
                "a CUDA graph of both cannot. Use on_nonfinite='step', or step after each replay, not in the graph."
            )

    @torch.no_grad()
    def note(self, by_device: Mapping[torch.device, Sequence[Job]]) -> None:
        """Count a step whose given jobs may have had non-finite gradients."""
        if self.flag is not None:
            self._open = _Open(self.flag, [job for jobs in by_device.values() for job in jobs])
            self.flag = None
        if self.policy != "step" or not by_device:
            return
        found = [look(jobs, device) for device, jobs in by_device.items()]
        self._unread += found
        if all(each.is_cpu for each in found) or len(self._unread) >= _READ_EVERY:
            self._read(by_device)

    def count(self, found: Tensor, names: Sequence[str]) -> None:
        """Count a step that was made with gradients that are gone: see :meth:`admits_found`."""
        if self.policy == "step":
            self._unread.append(found)
            if found.is_cpu or len(self._unread) >= _READ_EVERY:
                self._read(names=names)

    def synchronize(self) -> bool | None:
        """Return whether the last step was made, if its kernel decided that; ``None`` if it is known already."""
        if self._open is None:
            return None
        opened, self._open = self._open, None
        self._unread.append(opened.found())
        was_made = self._read()
        if not was_made:
            opened.take_back_ages()
        return was_made

    def _read(self, by_device: Mapping[torch.device, Sequence[Job]] | None = None, names: Sequence[str] = ()) -> bool:
        """Count what was found; return whether the last step may change anything."""
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
            self._warn([job for jobs in (by_device or {}).values() for job in jobs], names)
        return not skips

    def _warn(self, jobs: Sequence[Job], names: Sequence[str]) -> None:
        """Raise, or warn once."""
        if self.policy != "raise" and self._has_warned:
            return
        self._has_warned = True
        what = f"gradients are not finite{_where(names or _names_of(jobs))}"
        if self.policy == "raise":
            raise FloatingPointError(
                f"{what}. Nothing was changed. Lower the learning rate, clip gradients, look for a bad batch, or skip "
                "such steps with on_nonfinite='skip'."
            )
        does = {
            "step": "the step is made, as in torch.optim, and the weights that it reaches become non-finite. "
            "on_nonfinite='skip' skips such steps, and 'raise' stops at them",
            "skip": "the step is skipped",
        }[self.policy]
        logger.warning("%s: %s. This warning appears once; optimizer.metrics() counts such steps.", what, does)


class _Open:
    """A step that its kernel may have skipped: the flag is on its way to the host."""

    def __init__(self, flag: Tensor, jobs: Sequence[Job]) -> None:
        self._found = flag.clone()
        self._arrival: torch.cuda.Event | None = None
        if flag.is_cuda:
            self._found = torch.empty(flag.shape, dtype=flag.dtype, device="cpu", pin_memory=True)
            self._found.copy_(flag, non_blocking=True)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record(torch.cuda.current_stream(flag.device))
        # not the jobs, which hold gradients
        self._ages = [(job.state, key, age - 1) for job in jobs for key, age in zip(job.layout.age_keys, job.ages)]

    def found(self) -> Tensor:
        """Return the flag. Waits for its own step, and for nothing that came after."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._found

    def take_back_ages(self) -> None:
        """Write the ages from before the step."""
        for state, key, age in self._ages:
            set_age(state, key, age)


def look(jobs: Sequence[Job], device: torch.device) -> Tensor:
    """Return whether a gradient of a device is non-finite, and whether one has a spike that is left out; shape (2,)."""
    jobs = [job for job in jobs if job.grad.numel()]
    if device.type == "cpu":
        # This norm runs at the speed of memory and bounds all elements: hardly ever is there anything left to check.
        norms = torch._foreach_norm([job.grad for job in jobs], 2.0, torch.float32) if jobs else []
        jobs = [job for job, norm in zip(jobs, norms) if not float(norm) < SPIKE]
    if not jobs:
        return torch.zeros(2, dtype=torch.float32, device=device)
    sharing = [job.grad for job in jobs if job.layout.shares]
    others = [job.grad for job in jobs if not job.layout.shares]
    largest = torch.stack(torch._foreach_norm(sharing + others, math.inf, torch.float32))  # (jobs,)
    finite = largest.isfinite()
    spiked = finite & (largest >= SPIKE)
    return torch.stack(((~finite).any(), spiked[: len(sharing)].any())).float()


def _names_of(jobs: Sequence[Job]) -> list[str]:
    return [job.name for job in jobs if not bool(job.grad.isfinite().all())]


def _where(names: Sequence[str]) -> str:
    """Name the parameters, as far as this process can tell."""
    if not names:
        return " (on another rank, or in an earlier step)"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f" in {', '.join(map(repr, names[:_NAMED]))}{more}"


# ---- metrics ----

MANY = 0.5
"""The underflow fraction from which on a block is warned about."""
_TENSORS = 8  # of each block
_ELEMENTS = 512  # of each tensor
_CODES = 1 << 16  # of each tensor


class Watch:
    """Measures how far a sample of every block's elements moved in the last step, decay and rounding included.

    It starts when :meth:`rms` is first called. Between steps it holds one number for each tensor of the sample.
    """

    def __init__(self) -> None:
        self._is_asked = False
        self._before: dict[str, list[tuple[Tensor, Tensor]]] = {}  # by block: (elements, what they were)
        self._rms: dict[str, list[tuple[int, Tensor]]] = {}  # by block: (elements, RMS of their move)
        self._warned: set[str] = set()

    def begin(self, members: Iterable[Member], *, all_trained: bool = False) -> None:
        """Note where a sample of the parameters with gradients is, before a step, or of all that are trained."""
        if not self._is_asked:
            return
        self._before = {}
        with_gradient = [member for member in members if member.param.grad is not None or all_trained]
        for block, sample in _sampled(with_gradient).items():
            seen = [_thinned(member.place.local(member.param.detach())) for member in sample]
            self._before[block] = [(elements, elements.clone()) for elements in seen if elements.numel()]

    def end(self) -> None:
        """Measure how far the sample moved, after a step."""
        if not self._before:
            return
        before, self._before = self._before, {}
        self._rms = {
            block: [(now.numel(), (now.float() - then.float()).square().mean().sqrt()) for now, then in pairs]
            for block, pairs in before.items()
        }

    def rms(self) -> dict[str, float]:
        """Return the RMS of the last update by block; empty on the first call."""
        self._is_asked = True
        return {block: pooled_rms((numel, float(rms)) for numel, rms in parts) for block, parts in self._rms.items()}

    def numbers(self, members: Iterable[Member], state: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, float]:
        """Return the metrics of all blocks, and warn about those that underflow."""
        fractions = underflow_fractions(members, state)
        self._warn(fractions)
        return {
            **{f"update_rms/{block}": rms for block, rms in self.rms().items()},
            **{f"underflow/{block}": fraction for block, fraction in fractions.items()},
        }

    def _warn(self, fractions: Mapping[str, float]) -> None:
        """Warn once about every block of which at least :data:`MANY` groups underflow."""
        for block, fraction in fractions.items():
            if fraction >= MANY and block not in self._warned:
                self._warned.add(block)
                logger.warning(
                    "%.0f%% of the quantization groups of block %r underflow: a few large elements leave no codes to "
                    "the others. Give the block a wider format with set_plan if its loss suffers.",
                    100 * fraction,
                    block,
                )


@torch.no_grad()
def underflow_fractions(members: Iterable[Member], state: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, float]:
    """Return the fraction of a sample of quantization groups that underflow, for every block that has such groups."""
    fractions: dict[str, float] = {}
    grouped = [member for member in members if any(each.groups for each in member.layout.formats)]
    for block, sample in _sampled(grouped).items():
        found: list[Tensor] = []
        for member in sample:
            held = member.place.held(state.get(member.param) or {})
            for stored in member.layout.formats:
                if stored.groups and held:
                    found.append(stored.underflowed(stored.held_in(held), _middle(stored.held_shape)).flatten().cpu())
        if found:
            fractions[block] = float(torch.cat(found).float().mean().nan_to_num(0.0))
    return fractions


def _sampled(members: Sequence[Member]) -> dict[str, list[Member]]:
    """Return a few members of every block, spread over it."""
    by_block: dict[str, list[Member]] = {}
    for member in members:
        by_block.setdefault(member.block.name, []).append(member)
    return {block: found[:: -(-len(found) // _TENSORS)] for block, found in by_block.items()}


def _thinned(tensor: Tensor) -> Tensor:
    """Return a view of at most ``_ELEMENTS`` elements, spread over all dims.

    >>> _thinned(torch.zeros(1000, 1000)).shape
    torch.Size([22, 22])
    """
    most = max(1, int(_ELEMENTS ** (1 / max(1, tensor.dim()))))
    return tensor[tuple(slice(None, None, max(1, -(-size // most))) for size in tensor.shape)]


def _middle(shape: Sequence[int]) -> slice:
    """Return some rows from the middle."""
    rows = shape[0]
    height = min(rows, max(1, _CODES // max(1, math.prod(shape[1:]))))
    first = (rows - height) // 2
    return slice(first, first + height)

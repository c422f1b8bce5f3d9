"""State in host memory, parameters on a device: gradients come down in buckets, the host's kernel advances the state
beside it, and what comes of it goes up.

Of most mechanisms that is the parameter, which has to come down too. Of those that reach over matrices it is the
direction before they are finished: their products run on the device, where they are cheap, and the parameter stays
there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from torch import Tensor

from baoc.core.budget import memory_budget
from baoc.core.plan import PlanError
from baoc.core.spec import Reach
from baoc.optim.kernels import Kernel
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.matrices import Rows, run_matrices
from baoc.optim.offload.staging import Staging

BUCKET_BYTES = 64 << 20
_LEAST_BYTES = 4096


def bucket_bytes(size: int | str) -> int:
    """The size of a bucket as a person gives it.

    >>> bucket_bytes("64MiB") == BUCKET_BYTES
    True
    """
    is_size = isinstance(size, int) or (isinstance(size, str) and not size.strip().endswith("%"))
    with contextlib.suppress(PlanError):
        nbytes = memory_budget(size, 0) if is_size else 0
        if nbytes >= _LEAST_BYTES:
            return nbytes
    raise ValueError(
        f"offload_bucket is {size!r}; it must be a size like '64MiB', or bytes, of at least {_LEAST_BYTES}."
    )


class OffloadKernel:
    """Runs jobs whose state is in host memory by way of it, and leaves the others to the device's own kernel.

    Args:
        device: the kernel of the parameters' device.
        host: the kernel of the host.
        staging: between the two.
    """

    def __init__(self, device: Kernel, host: Kernel, staging: Staging) -> None:
        self.name = f"{device.name}, {host.name} on the host"
        self._device, self._host, self._staging = device, host, staging

    def run(self, jobs: Iterable[Job]) -> bool:
        own: list[Job] = []
        whole: list[Job] = []
        matrices: list[Job] = []
        for job in jobs:
            if not job.offloaded:
                own.append(job)
                continue
            job.refuse_freed()
            if job.param.numel():
                (matrices if _goes_up_as_direction(job) else whole).append(job)
        self._staging.begin()
        spiked = [self._device.run(own)] if own else []  # first: a GPU works on it while the host does the rest
        if matrices:  # likewise
            run_matrices(matrices, self._rows(matrices, spiked))
        self._staging.run(whole, lambda staged: spiked.append(self._host.run(staged)))
        self._staging.lane.end()
        return any(spiked)

    def rows(self, jobs: Sequence[Job], spiked: list[bool] | None = None) -> Rows:
        return self._rows(jobs, [] if spiked is None else spiked)

    def _rows(self, jobs: Sequence[Job], spiked: list[bool]) -> Rows:
        return _OffloadedRows(self._device.rows(jobs), self._host.rows(jobs, spiked), self._staging)


class _OffloadedRows:
    """The rows of matrices: momentum on the host, all that comes after it on the device."""

    def __init__(self, device: Rows, host: Rows, staging: Staging) -> None:
        self._device, self._host, self._staging = device, host, staging

    def directions(self, jobs: Sequence[Job], out: Sequence[Tensor]) -> None:
        def work(staged: Sequence[Job]) -> None:
            self._host.directions(staged, [job.param for job in staged])

        self._staging.run([job._replace(param=each) for job, each in zip(jobs, out)], work, fresh=True)
        self._staging.lane.end()

    def adapt(self, jobs: Sequence[Job], finished: Sequence[Tensor]) -> list[Tensor]:
        """What is remembered of finished directions, a number for each row, goes up and comes back."""
        formats = (stored for stored in jobs[0].layout.formats if stored.slot.of_direction)
        keys = [key for stored in formats for _, key in stored.keys]
        if not keys:
            return list(finished)
        raised = [{key: job.held[key].to(job.param.device) for key in keys} for job in jobs]
        adapted = self._device.adapt([job._replace(held={**job.held, **up}) for job, up in zip(jobs, raised)], finished)
        for job, up in zip(jobs, raised):
            for key in keys:
                job.held[key].copy_(up[key])
        return adapted

    def move(self, jobs: Sequence[Job], directions: Sequence[Tensor]) -> None:
        self._device.move(jobs, directions)


def _goes_up_as_direction(job: Job) -> bool:
    """A direction that depends on the parameter, by coupled decay, is made where that one is: all of it on the host."""
    return job.layout.reach is Reach.MATRIX and job.layout.mechanism.decoupled

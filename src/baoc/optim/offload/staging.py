"""The way of jobs through host memory: while one bucket is worked on, the next comes down and the last goes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baoc.optim.kernels.job import Job
from baoc.optim.offload.buckets import aligned, buckets, load_of, rows_of
from baoc.optim.offload.lanes import Lane, Ticket
from baoc.optim.place import WHOLE, Negated

BUFFERS = 3  # one comes down, one is worked on, one goes up
Work = Callable[[Sequence[Job]], None]


@dataclass
class _Buffer:
    memory: Tensor
    sent: Ticket = None  # the last copies that read it


@dataclass(frozen=True)
class _Bucket:
    """Jobs on the device, and the same in a buffer."""

    jobs: Sequence[Job]
    staged: Sequence[Job]
    buffer: _Buffer
    fetched: Ticket


class Staging:
    """Buffers of one device. They are made when a step needs them, and stay.

    Args:
        lane: to the device.
        most: bytes of a bucket, which is what a buffer holds: gradients, and parameters or directions. A parameter that
            is larger and cannot be cut takes a buffer of its size.
    """

    def __init__(self, lane: Lane, most: int) -> None:
        self.lane, self._most = lane, most
        self._buffers = [_Buffer(lane.buffer(0)) for _ in range(BUFFERS)]
        self._turn = 0

    @property
    def nbytes(self) -> int:
        """Of host memory, now."""
        return sum(buffer.memory.numel() for buffer in self._buffers)

    def begin(self) -> None:
        """A step begins. Its buckets take turns from the first buffer on, or all would grow to the largest bucket."""
        self._turn = 0
        self.lane.begin()

    def run(self, jobs: Sequence[Job], work: Work, *, fresh: bool = False) -> None:
        """Have work done on copies of jobs in host memory. State is used where it is; parameters go back.

        ``fresh``: jobs have directions in the place of their parameters. Those begin as zeros, so none comes down.
        """
        waiting: _Bucket | None = None
        for parts in buckets([load_of(job, fresh=fresh) for job in jobs], self._most):
            coming = self._fetch([rows_of(jobs[part.load], part.rows) for part in parts], fresh)
            if waiting is not None:
                self._finish(waiting, work, fresh)
            waiting = coming
        if waiting is not None:
            self._finish(waiting, work, fresh)

    def _fetch(self, jobs: Sequence[Job], fresh: bool) -> _Bucket:
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % BUFFERS
        needed = sum(aligned(tensor.nbytes) for job in jobs for tensor in (job.grad, job.param))
        if needed > buffer.memory.numel():
            buffer.memory = self.lane.buffer(needed)
        staged, first = [], 0
        for job in jobs:
            views = []
            for tensor in (job.grad, job.param):
                views.append(_like(tensor, buffer.memory[first : first + tensor.nbytes]))
                first += aligned(tensor.nbytes)
            place = WHOLE if isinstance(job.place, Negated) else job.place  # a copy has the sign that it seems to have
            staged.append(job._replace(grad=views[0], param=views[1], place=place, offloaded=False))
        pairs = [(there.grad, job.grad.detach()) for job, there in zip(jobs, staged)]
        if not fresh:
            pairs += [(there.param, job.param.detach()) for job, there in zip(jobs, staged)]
        return _Bucket(jobs, staged, buffer, self.lane.down(pairs, buffer.sent))

    def _finish(self, bucket: _Bucket, work: Work, fresh: bool) -> None:
        self.lane.wait(bucket.fetched)
        if fresh:  # not before: what the buffer held may have been on its way up until then
            for job in bucket.staged:
                job.param.zero_()
        work(bucket.staged)
        pairs = [(there.param, job.param) for job, there in zip(bucket.jobs, bucket.staged)]
        bucket.buffer.sent = self.lane.up(pairs, in_turn=fresh)


def _like(tensor: Tensor, memory: Tensor) -> Tensor:
    """Memory as a tensor that lies in it as the other one lies in its own, so that a copy is one run of bytes."""
    flat = memory.view(tensor.dtype)
    if tensor.is_contiguous():
        return flat.view(tensor.shape)
    return flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())

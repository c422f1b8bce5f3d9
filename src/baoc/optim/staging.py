"""The path of jobs through host memory, for state that is offloaded.

Jobs are cut into buckets. While the host works on one bucket, the next one is copied down from the device and the last
one is copied up. A *lane* makes the copies.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from baoc.core.budget import memory_budget
from baoc.core.plan import PlanError
from baoc.core.sharding import HOST, WHOLE, Negated
from baoc.core.spec import Reach
from baoc.optim.kernels.job import Job, rows_of

Pair = tuple[Tensor, Tensor]  # (on the host, on the device)
Ticket = Any  # stands for copies that were requested; None for none
Work = Callable[[Sequence[Job]], None]

BUCKET_BYTES = 64 << 20
_LEAST_BYTES = 4096
BUFFERS = 3  # one comes down, one is worked on, one goes up
ALIGNMENT = 64  # bytes: every tensor starts at a cache line


# ---- staging ----


def bucket_bytes(size: int | str) -> int:
    """Return the bytes of a bucket from a size such as ``"64MiB"``.

    >>> bucket_bytes("64MiB") == BUCKET_BYTES
    True
    """
    is_size = isinstance(size, int) or (isinstance(size, str) and not size.strip().endswith("%"))
    with contextlib.suppress(PlanError):
        nbytes = memory_budget(size, 0) if is_size else 0
        if nbytes >= _LEAST_BYTES:
            return nbytes
    raise ValueError(f"offload_bucket must be a size like '64MiB', or at least {_LEAST_BYTES} bytes, got {size!r}.")


@dataclass
class _Buffer:
    memory: Tensor
    sent: Ticket = None  # the last copies that read it


@dataclass(frozen=True)
class _Bucket:
    """Jobs on the device, and their copies in a buffer."""

    jobs: Sequence[Job]
    staged: Sequence[Job]
    buffer: _Buffer
    fetched: Ticket


class Staging:
    """The buffers of one device. They are allocated when a step needs them, and kept.

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
        """Bytes of host memory, now."""
        return sum(buffer.memory.numel() for buffer in self._buffers)

    def begin(self) -> None:
        """Start a step. Buckets take turns from the first buffer on, or all would grow to the largest bucket."""
        self._turn = 0
        self.lane.begin()

    def run(self, jobs: Sequence[Job], work: Work, *, fresh: bool = False) -> None:
        """Do work on copies of jobs in host memory. State is used where it is; parameters are copied back.

        Args:
            jobs: on the device.
            work: what to do with their copies.
            fresh: jobs have directions in place of their parameters. Those start as zeros and are not copied down.
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
            staged.append(job._replace(grad=views[0], param=views[1], place=place, offloaded=False, memo=None))
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
    """Return memory as a tensor with the strides of another one, so that a copy is one run of bytes."""
    flat = memory.view(tensor.dtype)
    if tensor.is_contiguous():
        return flat.view(tensor.shape)
    return flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())


# ---- buckets ----


class Load(NamedTuple):
    """What one parameter adds to a bucket: for each row of dim 0, the bytes of a row of each of its tensors."""

    rows: int
    row_bytes: tuple[int, ...]  # of its gradient, and of its parameter or direction
    by_rows: bool  # rows need nothing of each other, so it may be cut between them

    def nbytes(self, rows: int) -> int:
        return sum(aligned(rows * each) for each in self.row_bytes)

    def height(self, most: int) -> int:
        """Return how many rows fit into a bucket of ``most`` bytes, at least one."""
        room = most - len(self.row_bytes) * ALIGNMENT  # what aligning may add
        return min(self.rows, max(1, room // max(1, sum(self.row_bytes))))


class Part(NamedTuple):
    """Some rows of one load."""

    load: int  # its number
    rows: slice


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def buckets(loads: Sequence[Load], most: int) -> list[list[Part]]:
    """Return all loads in order, in buckets of at most ``most`` bytes.

    A load that fits into a bucket is not cut. Others are cut into parts of equal height. A load that must not be cut,
    or a single row, is a bucket by itself, however large.

    >>> loads = [Load(4, (64,), True), Load(4, (64,), True), Load(10, (64,), True), Load(10, (64,), False)]
    >>> for bucket in buckets(loads, most=512):
    ...     print([(part.load, part.rows.start, part.rows.stop) for part in bucket])
    [(0, 0, 4), (1, 0, 4)]
    [(2, 0, 5)]
    [(2, 5, 10)]
    [(3, 0, 10)]
    """
    found: list[list[Part]] = []
    room = 0
    for part in _parts(loads, most):
        nbytes = loads[part.load].nbytes(part.rows.stop - part.rows.start)
        if not found or nbytes > room:
            found.append([])
            room = most
        found[-1].append(part)
        room -= nbytes
    return found


def _parts(loads: Sequence[Load], most: int) -> Iterable[Part]:
    for index, load in enumerate(loads):
        height = load.rows
        if load.by_rows and load.nbytes(load.rows) > most:
            height = -(-load.rows // -(-load.rows // load.height(most)))  # parts of equal height
        for start in range(0, load.rows, max(1, height)):
            yield Part(index, slice(start, min(start + height, load.rows)))


def load_of(job: Job, *, fresh: bool) -> Load:
    """Return what a job adds to a bucket. ``fresh``: only its direction is needed."""
    rows = job.param.shape[0]
    each = math.prod(job.param.shape[1:])
    formats = [stored for stored in job.layout.formats if stored.slot.is_average]
    reaches = [stored.reach for stored in formats] + ([] if fresh else [job.layout.mechanism.reach])
    return Load(
        rows, (each * job.grad.itemsize, each * job.param.itemsize), max(reaches, default=Reach.ROWS) is Reach.ROWS
    )


# ---- lanes ----


class Lane(Protocol):
    """Makes copies between a device and host memory. What overlaps is up to a lane; the order is fixed here."""

    def buffer(self, nbytes: int) -> Tensor:
        """Return host memory to copy from and to."""

    def begin(self) -> None:
        """Start a step: its copies come after everything that was queued on the device so far."""

    def down(self, pairs: Sequence[Pair], after: Ticket) -> Ticket:
        """Copy to the host, once ``after`` is done."""

    def wait(self, ticket: Ticket) -> None:
        """Make the host wait until copies are done."""

    def up(self, pairs: Sequence[Pair], *, in_turn: bool) -> Ticket:
        """Copy to the device; ``in_turn``: also after everything that was queued there since the step began."""

    def end(self) -> None:
        """Make the device wait for all copies to it."""


class PlainLane:
    """Copies synchronously, on any device."""

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=HOST)

    def begin(self) -> None:
        pass

    def down(self, pairs: Sequence[Pair], after: Ticket) -> Ticket:
        for host, device in pairs:
            host.copy_(device)

    def wait(self, ticket: Ticket) -> None:
        pass

    def up(self, pairs: Sequence[Pair], *, in_turn: bool) -> Ticket:
        for host, device in pairs:
            device.copy_(host)

    def end(self) -> None:
        pass


class CudaLane:
    """Copies on two streams, one per direction, with pinned memory. The host waits only for what it reads.

    Gradients need no ``record_stream``: when a step returns, the host has waited for every copy of one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=HOST, pin_memory=True)

    def begin(self) -> None:
        for stream in (self._down, self._up):
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def down(self, pairs: Sequence[Pair], after: Ticket) -> Ticket:
        if after is not None:
            self._down.wait_event(after)
        with torch.cuda.stream(self._down):
            for host, device in pairs:
                host.copy_(device, non_blocking=True)
        return self._down.record_event()

    def wait(self, ticket: Ticket) -> None:
        ticket.synchronize()

    def up(self, pairs: Sequence[Pair], *, in_turn: bool) -> Ticket:
        if in_turn:
            self._up.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._up):
            for host, device in pairs:
                device.copy_(host, non_blocking=True)
        return self._up.record_event()

    def end(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._up)


def lane_to(device: torch.device) -> Lane:
    """Return the best lane to a device."""
    return CudaLane(device) if device.type == "cuda" else PlainLane()

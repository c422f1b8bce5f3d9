"""Cutting a step into buckets: what goes over the bus at once, and is in host memory at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baoc.core.spec import Reach
from baoc.optim.kernels.job import Job
from baoc.optim.place import Slice

ALIGNMENT = 64  # bytes: every tensor begins a line of the cache


class Load(NamedTuple):
    """What one parameter puts into a bucket: a row of dim 0 in each of its tensors, as many times as it has rows."""

    rows: int
    row_bytes: tuple[int, ...]  # of its gradient, and of its parameter or direction
    by_rows: bool  # rows need nothing of each other, so it may be cut between them

    def nbytes(self, rows: int) -> int:
        return sum(aligned(rows * each) for each in self.row_bytes)

    def height(self, most: int) -> int:
        """As many rows as a bucket of so many bytes has room for, at least one."""
        room = most - len(self.row_bytes) * ALIGNMENT  # what aligning may add
        return min(self.rows, max(1, room // max(1, sum(self.row_bytes))))


class Part(NamedTuple):
    """Some rows of one load."""

    load: int  # its number
    rows: slice


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def buckets(loads: Sequence[Load], most: int) -> list[list[Part]]:
    """All loads in order, in buckets of at most so many bytes.

    What fits into a bucket is not cut. What does not is cut into parts of equal height; one that must not be cut, or a
    single row, is a bucket by itself, however large.

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
    """What a job puts into a bucket. ``fresh``: what its slots make of a gradient is all that is asked of it."""
    rows = job.param.shape[0]
    each = math.prod(job.param.shape[1:])
    formats = [stored for stored in job.layout.formats if not stored.slot.of_direction]
    reaches = [stored.reach for stored in formats] + ([] if fresh else [job.layout.mechanism.reach])
    return Load(
        rows, (each * job.grad.itemsize, each * job.param.itemsize), max(reaches, default=Reach.ROWS) is Reach.ROWS
    )


def rows_of(job: Job, rows: slice) -> Job:
    """Some rows of a job, as a shard with these rows would have it."""
    height = rows.stop - rows.start
    if height == job.param.shape[0]:
        return job
    layout = job.layout.configuration.layout(job.layout.shape, rows=height)
    buffers = ((stored.key(buffer.name), buffer) for stored in layout.formats for buffer in stored.buffers)
    held = {key: job.held[key][rows] if buffer.by_rows else job.held[key] for key, buffer in buffers}
    param, grad = job.param[rows], job.grad[rows]
    return job._replace(layout=layout, param=param, grad=grad, held=held, place=Slice(rows))

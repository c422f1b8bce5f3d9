"""Updates that need whole matrices: equal shapes are finished in one batch, which is what matrix products like."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from baoc.core.mechanisms.newton_schulz import aligned
from baoc.core.roles import as_matrices
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.update import Update, row_tiles

BATCH_NUMEL = 15 << 20
"""60 MiB of fp32 at once for a batch of matrices and all that is made of them on the way, or one parameter's."""


class Rows(Protocol):
    """What is done row by row, before matrices are finished and after."""

    def directions(self, jobs: Sequence[Job], out: Sequence[Tensor]) -> None:
        """Advance the state of jobs and write their directions, which start as zeros."""

    def move(self, jobs: Sequence[Job], directions: Sequence[Tensor]) -> None:
        """Move the parameters of jobs."""


class EagerRows:
    """In torch operations, a tile at a time."""

    def __init__(self, tile_numel: int) -> None:
        self._tile_numel = tile_numel

    def directions(self, jobs: Sequence[Job], out: Sequence[Tensor]) -> None:
        for job, direction in zip(jobs, out):
            update, tiles = Update(job), row_tiles(job.param.shape, self._tile_numel)
            update.absorb(tiles)
            for rows in tiles:
                direction[rows] = update.direction(rows)

    def move(self, jobs: Sequence[Job], directions: Sequence[Tensor]) -> None:
        for job, direction in zip(jobs, directions):
            update = Update(job)
            for rows in row_tiles(job.param.shape, self._tile_numel):
                update.move(rows, direction[rows], job.scalars["step"])


def run_matrices(jobs: Iterable[Job], tile_numel: int, by_rows: Rows | None = None) -> None:
    """Run jobs whose mechanism reaches over matrices."""
    by_rows = by_rows or EagerRows(tile_numel)
    found = list(batches(jobs))
    # one piece of memory for all of them: allocators do not give back what batches of many sizes leave between them
    needed: dict[torch.device, int] = {}
    for batch in found:
        device = batch[0].param.device
        needed[device] = max(needed.get(device, 0), sum(map(_held, batch)))
    memory = {device: torch.empty(numel, dtype=torch.float32, device=device) for device, numel in needed.items()}
    for batch in found:
        _run_batch(batch, tile_numel, by_rows, memory[batch[0].param.device])


def _run_batch(batch: Sequence[Job], tile_numel: int, by_rows: Rows, memory: Tensor) -> None:
    stacked, scratch = _stacked(batch, by_rows, memory)
    counts = [as_matrices(job.layout.shape)[0] for job in batch]
    finished = batch[0].layout.mechanism.finish_in(stacked, scratch, batch[0].scalars).split_with_sizes(counts)
    directions = []
    for job, whole in zip(batch, finished):
        direction = job.place.scatter(whole.reshape(_whole_shape(job)))
        directions.append(Update(job).adapt(direction, row_tiles(job.param.shape, tile_numel)))
    by_rows.move(batch, directions)


def _stacked(batch: Sequence[Job], by_rows: Rows, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The directions of a batch as one stack of matrices, and the memory that is left."""
    sizes = [job.param.numel() for job in batch]
    is_whole = all(job.place.rows is None for job in batch)
    flat, scratch = memory[: sum(sizes)].zero_(), memory[aligned(sum(sizes)) :]
    local = [part.view(job.param.shape) for part, job in zip(flat.split_with_sizes(sizes), batch)]
    by_rows.directions(batch, local)
    matrix = as_matrices(batch[0].layout.shape)[1:]
    if is_whole:
        return flat.view(-1, *matrix), scratch
    return torch.cat([job.place.gather(each).reshape(-1, *matrix) for job, each in zip(batch, local)]), scratch


def _whole_shape(job: Job) -> tuple[int, ...]:
    return job.layout.shape if job.place.rows is not None else tuple(job.param.shape)


def batches(jobs: Iterable[Job]) -> Iterator[list[Job]]:
    """Jobs that can be finished together: one mechanism, one step's numbers, matrices of one shape."""
    alike: dict[tuple[object, ...], list[Job]] = {}
    for job in jobs:
        # not the local shape: every rank must make the same batches
        shape = as_matrices(job.layout.shape)[1:]
        alike.setdefault((job.layout.mechanism.name, id(job.scalars), job.param.device, shape), []).append(job)
    for group in alike.values():
        batch: list[Job] = []
        for job in group:
            if batch and sum(map(_workspace, (*batch, job))) > BATCH_NUMEL:
                yield batch
                batch = []
            batch.append(job)
        yield batch


def _held(job: Job) -> int:
    """Elements of memory that a job takes: its direction's, and the scratch of its matrices."""
    matrices, rows, cols = as_matrices(job.layout.shape)
    return aligned(job.param.numel()) + matrices * job.layout.mechanism.scratch(rows, cols)


def _workspace(job: Job) -> int:
    matrices, rows, cols = as_matrices(job.layout.shape)
    return matrices * job.layout.mechanism.workspace(rows, cols)

"""Updates that need whole matrices: equal shapes are finished in one batch, which is what matrix products like."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from baoc.core.roles import as_matrices
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.update import Update, row_tiles

BATCH_NUMEL = 1 << 24
"""64 MiB of fp32 at once for a batch of matrices and all that is made of them on the way, or one parameter's."""


def run_matrices(jobs: Iterable[Job], tile_numel: int) -> None:
    """Run jobs whose mechanism reaches over matrices."""
    for batch in batches(jobs):
        updates = [Update(job) for job in batch]
        directions = [_direction(job, update, tile_numel) for job, update in zip(batch, updates)]
        stacked = torch.cat([each.view(as_matrices(tuple(each.shape))) for each in directions])
        counts = [as_matrices(tuple(each.shape))[0] for each in directions]
        shapes = [each.shape for each in directions]
        del directions
        finished = torch.split(batch[0].layout.mechanism.finish(stacked, batch[0].scalars), counts)
        del stacked
        for job, update, whole, shape in zip(batch, updates, finished, shapes):
            tiles = row_tiles(job.param.shape, tile_numel)
            direction = update.adapt(job.place.scatter(whole.reshape(shape)), tiles)
            for rows in tiles:
                update.move(rows, direction[rows], job.scalars["step"])


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


def _workspace(job: Job) -> int:
    matrices, rows, cols = as_matrices(job.layout.shape)
    return matrices * job.layout.mechanism.workspace(rows, cols)


def _direction(job: Job, update: Update, tile_numel: int) -> Tensor:
    """What one parameter brings to its batch, in its own shape."""
    tiles = row_tiles(job.param.shape, tile_numel)
    update.absorb(tiles)
    local = torch.empty(job.param.shape, dtype=torch.float32, device=job.param.device)
    for rows in tiles:
        local[rows] = update.direction(rows)
    return job.place.gather(local)

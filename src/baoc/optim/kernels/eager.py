"""The reference kernel: plain torch operations, one tile of rows at a time.

A tile bounds the temporaries: no fp32 copy of a whole low-precision state is ever made. What needs whole matrices holds
the directions of one batch of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from baoc.core.sharding import Ranks
from baoc.core.spec import Reach
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.matrices import EagerRows, run_matrices
from baoc.optim.kernels.update import Update, row_tiles

TILE_NUMEL = 1 << 16  # 256 KiB of fp32 per temporary: stays in a core's L2 cache


class EagerKernel:
    name = "eager"

    def run(self, jobs: Iterable[Job]) -> bool:
        jobs, matrices, sums = list(jobs), [], []
        for job in jobs:
            job.refuse_freed()
        for job in jobs:
            if job.place.numel(job.param) == 0:  # the whole of it: a shard without rows is asked by the others
                continue
            if job.layout.reach is Reach.MATRIX:
                matrices.append(job)
            elif job.layout.reach is Reach.SUMS and job.place.ranks is not None:
                sums.append(job)
            else:
                Update(job).run(row_tiles(job.param.shape, TILE_NUMEL))
        _run_shards(sums)
        run_matrices(matrices, self.rows(matrices))
        return True

    def rows(self, jobs: Sequence[Job], spiked: list[bool] | None = None) -> EagerRows:
        """What goes row by row of jobs with matrices. ``spiked``: see :meth:`Kernel.rows`."""
        if spiked is not None:
            spiked.append(bool(jobs))
        return EagerRows(TILE_NUMEL)


def _run_shards(jobs: Sequence[Job]) -> None:
    """Jobs that need sums over ranks: those that their state keeps go in one message for all of them."""
    updates = [(Update(job), row_tiles(job.param.shape, TILE_NUMEL)) for job in jobs]
    partials = [update.partials(tiles) for update, tiles in updates]
    by_ranks: dict[Ranks, list[Tensor]] = {}
    for job, mine in zip(jobs, partials):
        by_ranks.setdefault(cast(Ranks, job.place.ranks), []).extend(each for each in mine if each is not None)
    for ranks, found in by_ranks.items():
        if found:
            summed = ranks.sum(torch.cat([each.reshape(-1) for each in found]))
            for each, total in zip(found, summed.split_with_sizes([each.numel() for each in found])):
                each.copy_(total.view(each.shape))
    for (update, tiles), mine in zip(updates, partials):
        update.finish_sums(mine)
        update.advance(tiles)

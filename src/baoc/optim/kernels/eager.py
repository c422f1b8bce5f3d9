"""The reference kernel: plain torch operations, one tile of rows at a time.

A tile bounds the temporaries: no fp32 copy of a whole low-precision state is ever made. What needs whole matrices holds
the directions of one batch of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from baoc.core.spec import Reach
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.matrices import run_matrices
from baoc.optim.kernels.update import Update, row_tiles

TILE_NUMEL = 1 << 16  # 256 KiB of fp32 per temporary: stays in a core's L2 cache


class EagerKernel:
    name = "eager"

    def run(self, jobs: Iterable[Job]) -> bool:
        jobs, matrices = list(jobs), []
        for job in jobs:
            job.refuse_freed()
        for job in jobs:
            if job.place.numel(job.param) == 0:  # the whole of it: a shard without rows is asked by the others
                continue
            if job.layout.reach is Reach.MATRIX:
                matrices.append(job)
            else:
                Update(job).run(row_tiles(job.param.shape, TILE_NUMEL))
        run_matrices(matrices, TILE_NUMEL)
        return True

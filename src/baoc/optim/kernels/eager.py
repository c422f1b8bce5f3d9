"""The reference kernel: plain torch operations, one tile of rows at a time.

A tile bounds the temporaries: no fp32 copy of a whole low-precision state is ever made.
"""

from __future__ import annotations

from collections.abc import Iterable

from baoc.optim.kernels.update import Job, row_tiles, update

TILE_NUMEL = 1 << 16  # 256 KiB of fp32 per temporary: stays in a core's L2 cache


class EagerKernel:
    name = "eager"

    def run(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.param.numel() == 0:
                continue
            update(
                job.mechanism,
                job.slots,
                job.param.detach(),
                job.grad.detach(),
                job.state,
                job.scalars,
                job.phases,
                job.maximize,
                row_tiles(job.param.shape, TILE_NUMEL),
            )

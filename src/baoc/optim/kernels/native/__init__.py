"""The update in C: one pass over memory in tiles that stay in the L1 cache, and all tensors of a step in one call.

The C code is given addresses and knows nothing of torch, so one build serves every version of it. It serves exactly
the mechanisms and formats that :mod:`words` names, by their very class, in plain tensors of fp32, bf16 and fp16 that
are contiguous in their own order or with channels last. Whatever else there is (a class derived from one of these,
other dtypes, views, tensor subclasses) the eager kernel runs.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from baoc.core.roles import matrix_shape
from baoc.core.sharding import HOST
from baoc.core.spec import SPIKE
from baoc.optim.kernels.eager import TILE_NUMEL, EagerKernel, EagerRows, run_matrices
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.native.words import AHEAD, DTYPES, append, load_library, words_of
from baoc.optim.kernels.update import Update


class NativeKernel:
    """Runs on a CPU, in as many threads as torch would use; the result does not depend on their number.

    Args:
        isa: one of :meth:`isas`; the best one by default.
    """

    name = "native"

    def __init__(self, isa: str | None = None) -> None:
        library = load_library()
        if isinstance(library, str):
            raise RuntimeError(f"kernel='native' cannot run: {library}.")
        self._run = library.run
        # C spells "m.keep" as m_keep
        self._scalars = [(name, name.replace("_", ".", 1)) for name in library.JOB_SCALARS]
        self.isa = isa or self.isas()[0]
        self._eager = EagerKernel()

    @staticmethod
    def isas() -> tuple[str, ...]:
        """The instruction sets that this processor and this build have, best first."""
        library = load_library()
        return () if isinstance(library, str) else library.isas()

    def run(self, jobs: Iterable[Job]) -> bool:
        left: list[Job] = []
        matrices: list[Job] = []
        spiked: list[bool] = []
        for job in self.serve(jobs, spiked=spiked):
            by_rows = type(job.layout.mechanism) in AHEAD and job.place.numel(job.param)
            (matrices if by_rows else left).append(job)
        for job in matrices:
            job.refuse_freed()
        run_matrices(matrices, self.rows(matrices, spiked))
        return (self._eager.run(left) if left else False) or any(spiked)

    def rows(self, jobs: Sequence[Job], spiked: list[bool] | None = None) -> _NativeRows:
        """What goes row by row of jobs with matrices; ``spiked`` is told as it runs."""
        return _NativeRows(self, [] if spiked is None else spiked)

    def serve(self, jobs: Iterable[Job], as_mechanism: str = "", spiked: list[bool] | None = None) -> list[Job]:
        """Run the jobs that C code can run, and return the others.

        Args:
            jobs: what to run.
            as_mechanism: the C name of another update rule to run them under, if any.
            spiked: is told whether a gradient of those that ran is non-finite or beyond all bounds.
        """
        words = array("q")
        scalars = array("d")
        rows: dict[int, int] = {}  # of scalars, by their id: the jobs of a group share them and keep them alive
        served: list[Tensor] = []
        left: list[Job] = []
        for job in jobs:
            memo = job.memo
            own = None if memo is None else memo.derived
            if own is None or own.grad_dtype is not job.grad.dtype:
                own = words_of(job, as_mechanism)
                if memo is not None and not isinstance(own, str):
                    memo.derived = own
            row = rows.get(id(job.scalars))
            if row is None:
                row = rows[id(job.scalars)] = len(rows)
                scalars.extend(self._row(job))
            if isinstance(own, str) or append(words, job, own, row) is not None:
                left.append(job)
            else:
                served.append(job.param)
        if served:
            addresses = (each.buffer_info()[0] for each in (words, scalars))
            found = self._run(*addresses, len(served), torch.get_num_threads(), self.isa)
            if spiked is not None:
                spiked.append(found)
            torch.autograd.graph.increment_version(served)  # autograd cannot see what C writes
        return left

    def _row(self, job: Job) -> list[float]:
        return [float(job.scalars.get(dotted, job.scalars.get(name, 0.0))) for name, dotted in self._scalars]


class _NativeRows(EagerRows):
    """The rows of matrices, in C where it can: momentum before they are finished, and the parameter's move after."""

    def __init__(self, kernel: NativeKernel, spiked: list[bool]) -> None:
        super().__init__(TILE_NUMEL)
        self._kernel, self._spiked = kernel, spiked

    def directions(self, jobs: Sequence[Job], out: Sequence[Tensor]) -> None:
        # the direction is what a parameter of zeros becomes, by a step of -1
        scalars = {**jobs[0].scalars, "step": -1.0, "shrink": 0.0}
        with_out = [job._replace(param=each, scalars=scalars, memo=None) for job, each in zip(jobs, out)]
        left = {id(job.param) for job in self._kernel.serve(with_out, "AHEAD", self._spiked)}
        self._spiked.append(bool(left))  # nobody looks at those
        rest = [(job, each) for job, each in zip(jobs, out) if id(each) in left]
        super().directions([job for job, _ in rest], [each for _, each in rest])

    def square_partial(self, job: Job, update: Update) -> Tensor | None:
        is_served = job.param.dtype in DTYPES and job.grad.dtype in DTYPES
        if len(matrix_shape(job.layout.shape)) > 2 or not is_served:
            return super().square_partial(job, update)
        # in one pass, and in the order of its elements; a spike, which does not count, would show in the norm
        norm = torch.linalg.vector_norm(job.grad.contiguous(), dtype=torch.float32).item()
        if not norm < SPIKE:
            return super().square_partial(job, update)
        return torch.full((1,), norm * norm / math.prod(job.layout.shape), dtype=torch.float32, device=HOST)

    def move(self, jobs: Sequence[Job], directions: Sequence[Tensor]) -> None:
        moving: list[tuple[Job, Tensor]] = []
        rest: list[tuple[Job, Tensor]] = []
        for job, direction in zip(jobs, directions):
            # a gradient that is no number has to show in its element, which C code would not know of
            dtype = torch.float32 if job.grad.dtype == torch.float16 else None  # sums in fp16 overflow
            whole = math.isfinite(job.grad.sum(dtype=dtype).item())
            (moving if whole else rest).append((job, direction))
        by_direction = [job._replace(grad=each, maximize=False, memo=None) for job, each in moving]
        left = {id(job.grad) for job in self._kernel.serve(by_direction, "SGD")}
        rest += [(job, direction) for job, direction in moving if id(direction) in left]
        super().move([job for job, _ in rest], [each for _, each in rest])

"""The update in Triton, for CUDA and ROCm devices: one launch for all tensors of a family.

What there is code for is said in :mod:`~baoc.optim.kernels.triton.families`, by name; everything else is left to
another kernel, and the log says what and why. Addresses, sizes and numbers are read on the device: a step copies the
numbers in one piece, and addresses where they have changed. No step waits for the device, and nothing is tuned by
trying.

Triton is imported when the first kernel is made, so that ``import baoc`` stays light.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from baoc.core.spec import Reach
from baoc.optim.kernels import graphs
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.matrices import EagerRows, run_matrices
from baoc.optim.kernels.triton.families import ALIGNMENT, Family, Form, Use, form_of
from baoc.optim.kernels.triton.lineup import Lineup, Memory, Seen
from baoc.optim.kernels.triton.tables import Tables, Tiles
from baoc.optim.kernels.triton.words import Word

logger = logging.getLogger("baoc")

INTERPRETER = "TRITON_INTERPRET"
_INTERPRETED = Tiles(segments=64, tiles=1, blocks=2)  # a program takes milliseconds there, whatever its size
_MATRIX_TILE = 1 << 22  # elements that torch's operations take at once, around matrix products


class _Other(Protocol):
    name: str

    def run(self, jobs: Iterable[Job]) -> bool: ...


def is_interpreted() -> bool:
    """Triton would run its code on the CPU, in its interpreter."""
    return os.environ.get(INTERPRETER, "0").lower() in ("1", "true", "yes", "on")


def obstacle(device: torch.device) -> str | None:
    """Why this kernel cannot run on a device, or ``None`` if it can.

    >>> obstacle(torch.device("meta"))
    'it runs on CUDA and ROCm devices'
    """
    if device.type not in ("cuda", "cpu"):
        return "it runs on CUDA and ROCm devices"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install 'baoc[triton]')"
    if device.type == "cpu" and not is_interpreted():
        return f"it runs on GPUs; on a CPU only in Triton's interpreter, with {INTERPRETER}=1 in the environment"
    if device.type == "cuda" and is_interpreted():
        return f"{INTERPRETER} is set, and Triton's interpreter reads the memory of CPUs only"
    return None


class TritonKernel:
    """Runs on a GPU; on a CPU in Triton's interpreter, which is for tests.

    Args:
        device: where all tensors are.
        other: makes the kernel for what there is no Triton code for.
        tiles: how much of a tensor a program takes.
    """

    name = "triton"

    def __init__(self, device: torch.device, other: Callable[[], _Other], tiles: Tiles | None = None) -> None:
        from baoc.optim.kernels.triton.launch import launch

        self._launch, self._device, self._on_gpu = launch, device, device.type == "cuda"
        self._tiles = tiles or (_INTERPRETED if is_interpreted() else Tiles.on(64 if torch.version.hip else 32))
        self._usual = self._memory = Memory(device)
        self._recorded: dict[tuple[int, int], list[Memory]] = {}  # of graphs, by the jobs of their step
        self._flag: Tensor | None = None
        self._make_other = other
        self._other: _Other | None = None
        self._reported: set[str] = set()

    def run(self, jobs: Iterable[Job], flag: Tensor | None = None) -> bool:
        """``flag``: where its first number, on the device, is not zero, nothing is changed.

        The host learns of it only where there are jobs for other kernels, which cannot be told so.
        """
        jobs = list(jobs)
        if graphs.is_replaying():
            self._write_for_replay(jobs)
            return False
        is_recorded = graphs.is_capturing(self._device)
        # a graph goes on reading where it did in its capture: that must be its own
        self._memory = Memory(self._device, kept=None) if is_recorded else self._usual
        rows: list[Job] = []
        matrices: list[Job] = []
        for job in jobs:
            if job.layout.reach is not Reach.MATRIX:
                rows.append(job)
            elif job.place.numel(job.param):  # the whole of it: a shard without rows is asked by the others
                job.refuse_freed()  # before anything has changed
                matrices.append(job)
        self._memory.numbers.write(jobs)
        self._flag = flag
        left = [rows[index] for index in self.serve(rows, "step")]
        if is_recorded or flag is not None:
            others = [*left, *(job for job in matrices if not _is_served(job))]
            if others and is_recorded:
                raise RuntimeError(
                    f"parameter {others[0].name!r} cannot be updated in a CUDA graph: other operations than Triton's "
                    f"have a part in {others[0].layout.configuration}, and would repeat the numbers of this step."
                )
            if others and flag is not None and bool(flag[0]):
                return True
        # all in one call, whatever their rows are run by: every rank must make the same batches
        run_matrices(matrices, _TritonRows(self))
        if left:
            self._rest().run(left)
        if is_recorded:
            self._recorded.setdefault(_named(jobs), []).append(self._memory)
        return True

    def rows(self, jobs: Sequence[Job], spiked: list[bool] | None = None) -> _TritonRows:
        """What goes row by row of jobs with matrices, after all else that this kernel runs in a step."""
        self._memory, self._flag = self._usual, None
        self._memory.numbers.write(jobs)
        if spiked is not None:
            spiked.append(bool(jobs))
        return _TritonRows(self)

    def _write_for_replay(self, jobs: Sequence[Job]) -> None:
        recorded = self._recorded.get(_named(jobs))
        if recorded is None:
            raise RuntimeError(
                f"no step of these {len(jobs)} parameters was captured. Capture one with torch.cuda.graph(...), and "
                "leave no gradient out later."
            )
        for memory in recorded:
            memory.write_for_replay(jobs)

    def serve(self, jobs: Sequence[Job], use: Use, directions: Sequence[Tensor] = ()) -> Sequence[int]:
        """Launch what jobs need, all of a family at once; which jobs are left, for there is no Triton code for them.

        ``directions``: where they go, or those to move by.
        """
        if not jobs:
            return ()
        numbers = self._memory.numbers
        flag = numbers.go if self._flag is None else self._flag
        rows = [numbers.row(job) for job in jobs]
        key = use, *_named(jobs)
        lineup = self._memory.lineups.get(key)
        if lineup is None or not lineup.stands(jobs, rows, directions):
            lineup = self._line_up(jobs, use, rows, directions, lineup)
        self._memory.keep(key, lineup)
        with torch.cuda.device(self._device) if self._on_gpu else nullcontext():  # triton launches on the current one
            for family, tables in lineup.launches:
                self._launch(family, tables, numbers.tensor, flag, self._tiles)
        if use != "direction":
            torch.autograd.graph.increment_version([jobs[index].param for index in lineup.served])
        return lineup.left

    def _line_up(
        self,
        jobs: Sequence[Job],
        use: Use,
        rows: Sequence[int],
        directions: Sequence[Tensor],
        last: Lineup | None,
    ) -> Lineup:
        """Write the tables of jobs, into those of the last lineup: what is as it was is not found or copied again."""
        before: Sequence[Seen | None] = [None] * len(jobs) if last is None else last.seen
        written: dict[Family, Tables] = {} if last is None else dict(last.launches)
        left: list[int] = []
        served: list[int] = []
        seen: list[Seen] = []
        families: dict[Family, list[tuple[Form, list[int]]]] = {}
        for index, job in enumerate(jobs):
            own = Seen.of(job, use, directions[index] if directions else None, before[index])
            seen.append(own)
            form = own.form
            if not all(own.addresses):
                job.refuse_freed()
            if isinstance(form, str):
                left.append(index)
                self._report(job, form, "eager" if use != "step" else self._rest().name)
            elif job.param.numel():
                served.append(index)
                words = self._words(job, own, form, use, rows[index])
                family = form.family
                if family.aligned and any(word % ALIGNMENT for word in words[: Word.ROW_PARTS]):
                    family = family._replace(aligned=False)
                families.setdefault(family, []).append((form, words))
        launches = []
        for family, members in families.items():
            tables = written.get(family) or Tables(family, self._device, self._tiles)
            tables.write([form for form, _ in members], [words for _, words in members])
            launches.append((family, tables))
        return Lineup(seen, rows, served, left, launches)

    def _words(self, job: Job, seen: Seen, form: Form, use: Use, row: int) -> list[int]:
        words = [0] * len(Word)
        words[Word.PARAM], words[Word.GRAD], *held = seen.addresses
        for (word, _), address in zip(form.buffers, held):
            words[word] = address
        if seen.direction:
            words[Word.PARAM if use == "direction" else Word.M] = seen.direction
        words[Word.NUMBERS] = row
        words[Word.FIRST_ELEMENT] = job.place.first_row * (job.param.numel() // max(1, job.param.shape[0]))
        return words

    def _rest(self) -> _Other:
        if self._other is None:
            self._other = self._make_other()
        return self._other

    def _report(self, job: Job, reason: str, other: str) -> None:
        if reason not in self._reported:
            self._reported.add(reason)
            logger.info("the %s kernel updates %r: there is no Triton code for %s", other, job.name, reason)


def _named(jobs: Sequence[Job]) -> tuple[int, int]:
    """By what jobs are known again: how many they are, and where the first one lies."""
    return len(jobs), jobs[0].param.data_ptr() if jobs else 0


def _is_served(job: Job) -> bool:
    """Whether all that a matrix's step changes is changed by Triton code."""
    forms = (form_of(job, "direction"), form_of(job, "move"))
    return all(isinstance(form, Form) for form in forms) and not any(
        stored.slot.of_direction for stored in job.layout.formats
    )


class _TritonRows(EagerRows):
    """The rows of matrices: momentum before they are finished, and the parameter's move after."""

    def __init__(self, kernel: TritonKernel) -> None:
        super().__init__(_MATRIX_TILE)
        self._kernel = kernel

    def directions(self, jobs: Sequence[Job], out: Sequence[Tensor]) -> None:
        left = self._kernel.serve(jobs, "direction", out)
        super().directions([jobs[index] for index in left], [out[index] for index in left])

    def move(self, jobs: Sequence[Job], directions: Sequence[Tensor]) -> None:
        left = self._kernel.serve(jobs, "move", directions)
        super().move([jobs[index] for index in left], [directions[index] for index in left])

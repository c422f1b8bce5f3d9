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
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor

from baoc.core.spec import Reach
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.matrices import EagerRows, run_matrices
from baoc.optim.kernels.triton.families import ALIGNMENT, Family, Form, Use, form_of
from baoc.optim.kernels.triton.lineup import Lineup, Seen
from baoc.optim.kernels.triton.tables import Numbers, Tables, Tiles
from baoc.optim.kernels.triton.words import Word

logger = logging.getLogger("baoc")

INTERPRETER = "TRITON_INTERPRET"
_INTERPRETED = Tiles(segments=64, tiles=1, blocks=2)  # a program takes milliseconds there, whatever its size
_MATRIX_TILE = 1 << 22  # elements that torch's operations take at once, around matrix products
_LINEUPS = 256  # that are kept, with their tables


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
        self._numbers = Numbers(device)
        self._go = self._flag = torch.zeros(1, device=device)
        self._lineups: OrderedDict[tuple[Use, int, int], Lineup] = OrderedDict()
        self._make_other = other
        self._other: _Other | None = None
        self._reported: set[str] = set()

    def run(self, jobs: Iterable[Job], flag: Tensor | None = None) -> bool:
        """``flag``: where its first number, on the device, is not zero, nothing is changed.

        The host learns of it only where there are jobs for other kernels, which cannot be told so.
        """
        rows: list[Job] = []
        matrices: list[Job] = []
        for job in jobs:
            if job.layout.reach is not Reach.MATRIX:
                rows.append(job)
            elif job.place.numel(job.param):  # the whole of it: a shard without rows is asked by the others
                job.refuse_freed()  # before anything has changed
                matrices.append(job)
        self._numbers.write([*rows, *matrices])
        self._flag = self._go if flag is None else flag
        left = [rows[index] for index in self.serve(rows, "step")]
        asks = flag is not None and (left or not all(map(_is_served, matrices)))
        if not asks or not bool(self._flag[0]):
            # all in one call, whatever their rows are run by: every rank must make the same batches
            run_matrices(matrices, _MATRIX_TILE, _TritonRows(self))
            if left:
                self._rest().run(left)
        return True

    def serve(self, jobs: Sequence[Job], use: Use, directions: Sequence[Tensor] = ()) -> Sequence[int]:
        """Launch what jobs need, all of a family at once; which jobs are left, for there is no Triton code for them.

        ``directions``: where they go, or those to move by.
        """
        if not jobs:
            return ()
        rows = [self._numbers.row(job) for job in jobs]
        key = use, len(jobs), jobs[0].param.data_ptr()
        lineup = self._lineups.get(key)
        if lineup is None or not lineup.stands(jobs, rows, directions):
            written = {} if lineup is None else dict(lineup.launches)
            lineup = self._lineups[key] = self._line_up(jobs, use, rows, directions, written)
            if len(self._lineups) > _LINEUPS:
                self._lineups.popitem(last=False)
        self._lineups.move_to_end(key)
        with torch.cuda.device(self._device) if self._on_gpu else nullcontext():  # triton launches on the current one
            for family, tables in lineup.launches:
                self._launch(family, tables, self._numbers.tensor, self._flag, self._tiles)
        if use != "direction":
            torch.autograd.graph.increment_version([jobs[index].param for index in lineup.served])
        return lineup.left

    def _line_up(
        self,
        jobs: Sequence[Job],
        use: Use,
        rows: Sequence[int],
        directions: Sequence[Tensor],
        written: dict[Family, Tables],
    ) -> Lineup:
        """Write the tables of jobs, into those that there are: what lies where it lay is not copied again."""
        left: list[int] = []
        served: list[int] = []
        seen: list[Seen] = []
        families: dict[Family, list[tuple[Form, list[int]]]] = {}
        for index, job in enumerate(jobs):
            form = form_of(job, use)
            seen.append(Seen.of(job, form, directions[index] if directions else None))
            if not all(seen[-1].addresses):
                job.refuse_freed()
            if isinstance(form, str):
                left.append(index)
                self._report(job, form, "eager" if use != "step" else self._rest().name)
            elif job.param.numel():
                served.append(index)
                words = self._words(job, seen[-1], form, use, rows[index])
                is_aligned = form.family.aligned and not any(word % ALIGNMENT for word in words[: Word.ROW_PARTS])
                families.setdefault(form.family._replace(aligned=is_aligned), []).append((form, words))
        launches = []
        for family, members in families.items():
            own = written.get(family) or Tables(family, self._device, self._tiles)
            own.write([form for form, _ in members], [words for _, words in members])
            launches.append((family, own))
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

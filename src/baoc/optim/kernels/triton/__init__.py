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
from baoc.optim.kernels.triton.tables import Numbers, Tables, Tiles
from baoc.optim.kernels.triton.words import Word

logger = logging.getLogger("baoc")

INTERPRETER = "TRITON_INTERPRET"
_INTERPRETED = Tiles(segments=64, tiles=1, blocks=2)  # a program takes milliseconds there, whatever its size
_MATRIX_TILE = 1 << 22  # elements that torch's operations take at once, around matrix products
_TABLES = 256  # that are kept


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

        self._launch, self._device = launch, device
        self._tiles = tiles or (_INTERPRETED if is_interpreted() else Tiles.on(64 if torch.version.hip else 32))
        self._numbers = Numbers(device)
        self._tables: OrderedDict[tuple[Family, int], Tables] = OrderedDict()
        self._make_other = other
        self._other: _Other | None = None
        self._reported: set[str] = set()

    def run(self, jobs: Iterable[Job]) -> bool:
        whole: list[tuple[Job, Form]] = []
        matrices: list[Job] = []
        left: list[Job] = []
        for job in jobs:
            if job.layout.reach is Reach.MATRIX:
                if job.place.numel(job.param):  # the whole of it: a shard without rows is asked by the others
                    matrices.append(job)
                continue
            form = form_of(job, "step")
            if isinstance(form, str):
                left.append(job)
                self._report(job, form, self._rest().name)
            elif job.param.numel():
                whole.append((job, form))
        for job in (*matrices, *left):  # before anything has changed
            job.refuse_freed()
        self._numbers.write([*(job for job, _ in whole), *matrices])
        self._serve(whole, "step")
        # all in one call, whatever their rows are run by: every rank must make the same batches
        run_matrices(matrices, _TritonRows(self))
        if left:
            self._rest().run(left)
        return True

    def rows(self, jobs: Sequence[Job], spiked: list[bool] | None = None) -> _TritonRows:
        """What goes row by row of jobs with matrices, after all else that this kernel runs in a step."""
        self._numbers.write(jobs)
        if spiked is not None:
            spiked.append(bool(jobs))
        return _TritonRows(self)

    def serve_half(self, jobs: Sequence[Job], use: Use, directions: Sequence[Tensor]) -> list[int]:
        """Write directions, or move by them, where there is Triton code for it; which jobs are left."""
        served: list[tuple[Job, Form]] = []
        by: list[Tensor] = []
        left: list[int] = []
        for index, (job, direction) in enumerate(zip(jobs, directions)):
            form = form_of(job, use)
            if isinstance(form, str):
                left.append(index)
                self._report(job, form, "eager")
            elif job.param.numel():
                served.append((job, form))
                by.append(direction)
        self._serve(served, use, by)
        return left

    def _serve(self, served: Sequence[tuple[Job, Form]], use: Use, directions: Sequence[Tensor] = ()) -> None:
        """Launch what jobs need, all of a family at once. ``directions``: where they go, or those to move by."""
        families: dict[Family, list[tuple[Form, list[int]]]] = {}
        for index, (job, form) in enumerate(served):
            words = self._words(job, form, use, directions[index] if directions else None)
            is_aligned = form.family.aligned and not any(word % ALIGNMENT for word in words[: Word.ROW_PARTS])
            families.setdefault(form.family._replace(aligned=is_aligned), []).append((form, words))
        on_gpu = self._device.type == "cuda"
        with torch.cuda.device(self._device) if on_gpu else nullcontext():  # triton launches on the current one
            for family, members in families.items():
                tables = self._tables_of(family, members[0][1])
                tables.write([form for form, _ in members], [words for _, words in members])
                self._launch(family, tables, self._numbers.tensor, self._tiles)
        torch.autograd.graph.increment_version([job.param for job, _ in served if use != "direction"])

    def _words(self, job: Job, form: Form, use: Use, direction: Tensor | None) -> list[int]:
        words = [0] * len(Word)
        words[Word.PARAM], words[Word.GRAD] = job.param.data_ptr(), job.grad.data_ptr()
        found = words[Word.PARAM] and words[Word.GRAD]
        for word, key in form.buffers:
            words[word] = job.held[key].data_ptr()
            found = found and words[word]
        if not found:
            job.refuse_freed()
        if direction is not None:
            words[Word.PARAM if use == "direction" else Word.M] = direction.data_ptr()
        words[Word.NUMBERS] = self._numbers.row(job)
        words[Word.FIRST_ELEMENT] = job.place.first_row * (job.param.numel() // max(1, job.param.shape[0]))
        return words

    def _tables_of(self, family: Family, words: Sequence[int]) -> Tables:
        """Those of the last step, if the first tensor's were among them."""
        key = family, words[Word.M] if not family.moves else words[Word.PARAM]
        if key not in self._tables:
            self._tables[key] = Tables(family, self._device, self._tiles)
            if len(self._tables) > _TABLES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key]

    def _rest(self) -> _Other:
        if self._other is None:
            self._other = self._make_other()
        return self._other

    def _report(self, job: Job, reason: str, other: str) -> None:
        if reason not in self._reported:
            self._reported.add(reason)
            logger.info("the %s kernel updates %r: there is no Triton code for %s", other, job.name, reason)


class _TritonRows(EagerRows):
    """The rows of matrices: momentum before they are finished, and the parameter's move after."""

    def __init__(self, kernel: TritonKernel) -> None:
        super().__init__(_MATRIX_TILE)
        self._kernel = kernel

    def directions(self, jobs: Sequence[Job], out: Sequence[Tensor]) -> None:
        left = self._kernel.serve_half(jobs, "direction", out)
        super().directions([jobs[index] for index in left], [out[index] for index in left])

    def move(self, jobs: Sequence[Job], directions: Sequence[Tensor]) -> None:
        left = self._kernel.serve_half(jobs, "move", directions)
        super().move([jobs[index] for index in left], [directions[index] for index in left])

"""Tables and scalars in device memory. Each is written in one copy, and only when its content has changed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baoc.core.codecs.quantized import INT8_GROUP as GROUP
from baoc.core.spec import Scalar
from baoc.optim.kernels import graphs
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.triton.families import Family, Form, Number, Word

WARPS = 4
"""Warps per program."""

_PART = 64  # buffers within the workspace of sums start at multiples of this many fp32 values


class Tiles(NamedTuple):
    """How much of a tensor one program updates: ``tiles`` times ``segments`` groups of int8."""

    segments: int
    tiles: int
    blocks: int
    """Tiles per block of rows in reductions over rows and columns."""

    @property
    def rows(self) -> int:
        """Rows per block of a reduction."""
        return self.segments * self.blocks

    def programs(self, form: Form) -> int:
        """Return how many programs update a tensor."""
        return -(-form.rows * _parts(form.row_len) // (self.segments * self.tiles))

    @staticmethod
    def on(threads: int) -> Tiles:
        """Return the tiles for warps of ``threads`` threads.

        A thread holds four elements of a tile: one vector of fp32, which leaves enough registers free.

        >>> Tiles.on(32), Tiles.on(64)
        (Tiles(segments=2, tiles=16, blocks=64), Tiles(segments=4, tiles=8, blocks=32))
        """
        segments = 4 * threads * WARPS // GROUP
        return Tiles(segments, 32 // segments, 128 // segments)


class DeviceList:
    """A device tensor that follows a list on the host.

    The tensor keeps its address while its length is the same, so a captured CUDA graph reads the values that are
    written later.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._values: list[float] | list[int] = []
        self._is_pending = False
        self.tensor = torch.empty(0, dtype=dtype, device=device)

    def write(self, values: list[float] | list[int]) -> None:
        """Copy values that differ from the last ones, asynchronously; during a capture, postpone the copy."""
        if values == self._values:
            return
        if len(values) != len(self._values):
            self.tensor = torch.empty(len(values), dtype=self._dtype, device=self._device)
        self._values, self._is_pending = values, True
        if not graphs.is_capturing(self._device):
            self.flush()

    def flush(self) -> None:
        """Copy what a capture has postponed."""
        if self._is_pending:
            # the pinned allocator does not reuse this memory before the copy has finished, so nothing waits here
            host = torch.tensor(self._values, dtype=self._dtype, pin_memory=self._device.type == "cuda")
            self.tensor.copy_(host, non_blocking=True)
            self._is_pending = False


class Numbers:
    """The scalars of a step, shape (rows, numbers): jobs of one group, update rule and age share a row."""

    def __init__(self, device: torch.device) -> None:
        self._list = DeviceList(device, torch.float32)
        self._rows: dict[tuple[int, int, bool], int] = {}
        self._order: list[int] = []  # the row of each job
        self.never_skip = torch.zeros(1, dtype=torch.float32, device=device)
        """The flag for steps that are always made."""

    @property
    def tensor(self) -> Tensor:
        """The table on the device, flat."""
        return self._list.tensor

    def write(self, jobs: Sequence[Job]) -> None:
        """Write the scalars of a step."""
        self._list.write(self._collect(jobs))

    def write_for_replay(self, jobs: Sequence[Job]) -> None:
        """Write the scalars of a step that a captured graph makes.

        Raises:
            RuntimeError: The jobs no longer have the rows that the captured tables name.
        """
        before = self._order
        values = self._collect(jobs)
        if self._order != before:
            raise RuntimeError(
                "param groups, or the configurations of their parameters, have changed since the step was captured. "
                "Capture it again."
            )
        self._list.write(values)
        self._list.flush()

    def row(self, job: Job) -> int:
        """Return the row of a job of the last step that was written."""
        return self._rows[id(job.scalars), id(job.phases), job.maximize]

    def scalars(self, job: Job) -> dict[str, Scalar]:
        """Return the scalars of a job as views of the table, by their names in the job."""
        first = self.row(job) * len(Number)
        names = ((number, name) for number in Number for name in (_DOTTED[number], number.name.lower()))
        return {name: self.tensor[first + number] for number, name in names if name in job.scalars}

    def _collect(self, jobs: Sequence[Job]) -> list[float]:
        self._rows, self._order = {}, []
        values: list[float] = []
        for job in jobs:
            key = id(job.scalars), id(job.phases), job.maximize  # the jobs keep these objects alive during the step
            row = self._rows.get(key)
            if row is None:
                row = self._rows[key] = len(self._rows)
                values += _numbers(job)
            self._order.append(row)
        return values


_DOTTED = {number: number.name.lower().replace("_", ".", 1) for number in Number}  # M_KEEP is "m.keep"


def _numbers(job: Job) -> list[float]:
    found = {Number.SIGN: -1.0 if job.maximize else 1.0}
    found |= {Number[f"{slot.upper()}_PHASE"]: float(phase) for slot, phase in job.phases.items() if slot in "mvw"}
    for number in Number:
        if number not in found:
            dotted = job.scalars.get(_DOTTED[number], job.scalars.get(number.name.lower(), 0.0))
            found[number] = float(dotted)
    return [found[number] for number in Number]


class Tables:
    """The tables of one family's tensors, and the workspace of their sums.

    Attributes:
        words: The table of tensors, shape (tensors, words), flat.
        updates: The index of the tensor that each program of the update works on, shape (programs,).
        blocks: The same for the programs of reductions.
    """

    def __init__(self, family: Family, device: torch.device, tiles: Tiles) -> None:
        self._family, self._device, self._tiles = family, device, tiles
        self._forms: list[Form] = []
        self._firsts: list[tuple[int, int]] = []
        self._workspace = torch.empty(0, dtype=torch.float32, device=device)
        self._tickets = torch.empty(0, dtype=torch.int32, device=device)
        self.words = DeviceList(device, torch.int64)
        self.updates, self.blocks = DeviceList(device, torch.int32), DeviceList(device, torch.int32)

    def write(self, forms: list[Form], words: Sequence[list[int]]) -> None:
        """Write the tables.

        Args:
            forms: The form of each tensor.
            words: The row of each tensor with its addresses and its row of numbers; the other columns are filled in.
        """
        if forms != self._forms:
            self._forms = forms
            self._assign_programs()
        for each, form, (program, block) in zip(words, forms, self._firsts):
            each[Word.ROW_LEN], each[Word.ROWS] = form.row_len, form.rows
            each[Word.FIRST_PROGRAM], each[Word.FIRST_BLOCK] = program, block
        if self._family.sums:
            self._add_workspace(words)
        self.words.write([word for each in words for word in each])

    def flush(self) -> None:
        """Copy what a capture has postponed."""
        for each in (self.words, self.updates, self.blocks):
            each.flush()

    def _assign_programs(self) -> None:
        tiles = self._tiles
        firsts, owners = _programs([tiles.programs(form) for form in self._forms])
        self.updates.write(owners)
        blocks = [-(-form.rows // tiles.rows) * _parts(form.row_len) for form in self._forms]
        first_blocks, owners = _programs(blocks)
        self._firsts = list(zip(firsts, first_blocks))
        if self._family.reductions:
            self.blocks.write(owners)
        if self._family.sums:
            needed = [workspace(form, tiles) for form in self._forms]
            numel = sum(sum(each.values.values()) for each in needed)
            self._workspace = torch.empty(numel, dtype=torch.float32, device=self._device)
            numel = sum(sum(each.tickets.values()) for each in needed)
            self._tickets = torch.zeros(numel, dtype=torch.int32, device=self._device)

    def _add_workspace(self, words: Sequence[list[int]]) -> None:
        at, ticket_at = self._workspace.data_ptr(), self._tickets.data_ptr()
        for each, form in zip(words, self._forms):
            needed = workspace(form, self._tiles)
            for word, numel in needed.values.items():
                if not each[word]:  # factors and means of v are in the state
                    each[word] = at
                at += numel * self._workspace.element_size()
            for word, numel in needed.tickets.items():
                each[word] = ticket_at
                ticket_at += numel * self._tickets.element_size()


class Workspace(NamedTuple):
    """The elements that the sums of one tensor need, by the column that holds their address."""

    values: dict[Word, int]  # fp32: about one per 80 elements of the tensor
    tickets: dict[Word, int]  # int32


def workspace(form: Form, tiles: Tiles) -> Workspace:
    """Return the workspace of a tensor with every kind of sum."""
    rows, cols, parts = form.rows, form.row_len, _parts(form.row_len)
    blocks = -(-rows // tiles.rows)
    needed = {
        Word.ROW: rows,
        Word.COL: cols,
        Word.ROW_PARTS: parts * rows,
        Word.COL_PARTS: blocks * cols,
        Word.COL_BLOCKS: parts,
        Word.LENGTH_PARTS: 2 * tiles.programs(form),
        Word.STEP_FACTOR: 1,
    }
    values = {word: -(-numel // _PART) * _PART for word, numel in needed.items()}
    return Workspace(values, {Word.ROW_TICKETS: blocks, Word.COL_TICKETS: parts, Word.LENGTH_TICKET: 1})


def _parts(row_len: int) -> int:
    """Return the number of segments in a row."""
    return -(-row_len // GROUP)


def _programs(counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the first program of each tensor, and the tensor of each program.

    >>> _programs([2, 1])
    ([0, 2], [0, 0, 1])
    """
    firsts = list(itertools.accumulate(counts, initial=0))[:-1]
    return firsts, [owner for owner, count in enumerate(counts) for _ in range(count)]

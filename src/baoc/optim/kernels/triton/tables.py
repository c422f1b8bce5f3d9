"""What a launch reads on the device: written in one copy each, and only when something in it has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baoc.core.codecs.int8 import GROUP
from baoc.optim.kernels import graphs
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.triton.families import Family, Form
from baoc.optim.kernels.triton.words import Number, Word

WARPS = 4  # in a program
_PART = 64  # fp32 numbers: parts of the memory for sums begin at multiples of it


class Tiles(NamedTuple):
    """How much of a tensor a program takes: ``tiles`` times ``segments`` groups of int8."""

    segments: int
    tiles: int
    blocks: int  # tiles in one block of rows, where rows and columns are added up

    @property
    def rows(self) -> int:
        """In one block."""
        return self.segments * self.blocks

    def programs(self, form: Form) -> int:
        """That update a tensor."""
        return -(-form.rows * _parts(form.row_len) // (self.segments * self.tiles))

    @staticmethod
    def on(threads: int) -> Tiles:
        """For warps of so many threads: four elements for each, which is a vector of fp32 and leaves registers free.

        >>> Tiles.on(32), Tiles.on(64)
        (Tiles(segments=2, tiles=16, blocks=64), Tiles(segments=4, tiles=8, blocks=32))
        """
        segments = 4 * threads * WARPS // GROUP
        return Tiles(segments, 32 // segments, 128 // segments)


class Written:
    """A tensor on a device that follows a list on the host."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._last: list[float] | list[int] = []
        self._is_due = False
        self.tensor = torch.empty(0, dtype=dtype, device=device)

    def write(self, values: list[float] | list[int]) -> None:
        """Copy what has changed, without waiting for it.

        The memory stays where it is while the length does, so that a captured graph reads what is written later. While
        one is captured nothing is copied: see :meth:`write_due`.
        """
        if values == self._last:
            return
        if len(values) != len(self._last):
            self.tensor = torch.empty(len(values), dtype=self._dtype, device=self._device)
        self._last, self._is_due = values, True
        if not graphs.is_capturing(self._device):
            self.write_due()

    def write_due(self) -> None:
        """Copy what is not copied yet."""
        if self._is_due:
            # pinned memory is not used again before the copy is made: its allocator waits for it, not we
            host = torch.tensor(self._last, dtype=self._dtype, pin_memory=self._device.type == "cuda")
            self.tensor.copy_(host, non_blocking=True)
            self._is_due = False


class Numbers:
    """The numbers of a step: jobs of one group, mechanism and age share a row."""

    def __init__(self, device: torch.device) -> None:
        self._written = Written(device, torch.float32)
        self._rows: dict[tuple[int, int, bool], int] = {}
        self._order: list[int] = []  # the rows of jobs
        self.go = torch.zeros(1, device=device)
        """The flag of steps that nobody may stop."""

    @property
    def tensor(self) -> Tensor:
        return self._written.tensor

    def write(self, jobs: Sequence[Job]) -> None:
        self._written.write(self._numbered(jobs))

    def write_again(self, jobs: Sequence[Job]) -> None:
        """For a captured graph, which has the row of every job in its tables."""
        before = self._order
        values = self._numbered(jobs)
        if self._order != before:
            raise RuntimeError(
                "param groups, or what their parameters are updated with, have changed since the step was captured. "
                "Capture it again."
            )
        self._written.write(values)
        self._written.write_due()

    def _numbered(self, jobs: Sequence[Job]) -> list[float]:
        self._rows, self._order = {}, []
        values: list[float] = []
        for job in jobs:
            key = id(job.scalars), id(job.phases), job.maximize  # jobs keep them alive for as long as the step takes
            row = self._rows.get(key)
            if row is None:
                row = self._rows[key] = len(self._rows)
                values += _numbers(job)
            self._order.append(row)
        return values

    def row(self, job: Job) -> int:
        return self._rows[id(job.scalars), id(job.phases), job.maximize]


_DOTTED = {number: number.name.lower().replace("_", ".", 1) for number in Number}  # M_KEEP is "m.keep"


def _numbers(job: Job) -> list[float]:
    found = {Number.SIGN: -1.0 if job.maximize else 1.0}
    found |= {Number[f"{slot.upper()}_PHASE"]: float(phase) for slot, phase in job.phases.items() if slot in "mv"}
    for number in Number:
        if number not in found:
            dotted = job.scalars.get(_DOTTED[number], job.scalars.get(number.name.lower(), 0.0))
            found[number] = float(dotted)
    return [found[number] for number in Number]


class Tables:
    """The tables of one family's tensors, and the memory that their sums take."""

    def __init__(self, family: Family, device: torch.device, tiles: Tiles) -> None:
        self._family, self._device, self._tiles = family, device, tiles
        self._forms: list[Form] = []
        self._firsts: list[tuple[int, int]] = []
        self._workspace = torch.empty(0, device=device)
        self._tickets = torch.empty(0, dtype=torch.int32, device=device)
        self.words = Written(device, torch.int64)
        self.updates, self.blocks = Written(device, torch.int32), Written(device, torch.int32)  # owners of programs

    def write(self, forms: list[Form], words: Sequence[list[int]]) -> None:
        """``words``: of each tensor, with its addresses and its row of numbers; what else it needs is added."""
        if forms != self._forms:
            self._forms = forms
            self._write_owners()
        for each, form, (program, block) in zip(words, forms, self._firsts):
            each[Word.ROW_LEN], each[Word.ROWS] = form.row_len, form.rows
            each[Word.FIRST_PROGRAM], each[Word.FIRST_BLOCK] = program, block
        if self._family.sums:
            self._add_room(words)
        self.words.write([word for each in words for word in each])

    def write_due(self) -> None:
        """Copy what could not be while a graph was captured."""
        for written in (self.words, self.updates, self.blocks):
            written.write_due()

    def _write_owners(self) -> None:
        tiles = self._tiles
        firsts, owners = _programs([tiles.programs(form) for form in self._forms])
        self.updates.write(owners)
        blocks = [-(-form.rows // tiles.rows) * _parts(form.row_len) for form in self._forms]
        first_blocks, owners = _programs(blocks)
        self._firsts = list(zip(firsts, first_blocks))
        if self._family.turns:
            self.blocks.write(owners)
        if self._family.sums:
            rooms = [room(form, tiles) for form in self._forms]
            needed = sum(sum(of_tensor.numbers.values()) for of_tensor in rooms)
            self._workspace = torch.empty(needed, dtype=torch.float32, device=self._device)
            needed = sum(sum(of_tensor.tickets.values()) for of_tensor in rooms)
            self._tickets = torch.zeros(needed, dtype=torch.int32, device=self._device)

    def _add_room(self, words: Sequence[list[int]]) -> None:
        at, ticket_at = self._workspace.data_ptr(), self._tickets.data_ptr()
        for each, form in zip(words, self._forms):
            own = room(form, self._tiles)
            for word, numel in own.numbers.items():
                if not each[word]:  # what v keeps has its place in the state
                    each[word] = at
                at += numel * self._workspace.element_size()
            for word, numel in own.tickets.items():
                each[word] = ticket_at
                ticket_at += numel * self._tickets.element_size()


class Room(NamedTuple):
    """What the sums of one tensor take, by the word that has its address."""

    numbers: dict[Word, int]  # of fp32: about one for each 80 elements
    tickets: dict[Word, int]  # of int32


def room(form: Form, tiles: Tiles) -> Room:
    """Of a tensor that has all sums that there are."""
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
    numbers = {word: -(-numel // _PART) * _PART for word, numel in needed.items()}
    return Room(numbers, {Word.ROW_TICKETS: blocks, Word.COL_TICKETS: parts, Word.LENGTH_TICKET: 1})


def _parts(row_len: int) -> int:
    """Segments in a row."""
    return -(-row_len // GROUP)


def _programs(counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """The first program of each owner, and the owner of each program.

    >>> _programs([2, 1])
    ([0, 2], [0, 0, 1])
    """
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    return firsts, [owner for owner, count in enumerate(counts) for _ in range(count)]

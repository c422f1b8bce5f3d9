"""Where a parameter lives changes nothing about its update: two halves that ask each other are one whole."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from baoc import parse
from baoc.core.spec import Hyper, Reach
from baoc.optim.kernels.eager import EagerKernel
from baoc.optim.kernels.job import Job, advance_ages
from baoc.optim.kernels.native import NativeKernel
from baoc.optim.place import WHOLE, Whole
from baoc.optim.state import new_state
from tests import toys
from tests.cases import by_configuration, gradients

SHAPE = (90, 300)
CUT = 37


class Half(Whole):
    """One of two ranks, as threads."""

    def __init__(self, rows: slice, meeting: threading.Barrier, said: dict[int, Tensor]) -> None:
        self.first_row, self.rows = rows.start, rows.stop - rows.start
        self._meeting, self._said = meeting, said

    def numel(self, local: Tensor) -> int:
        return local.numel() // self.rows * SHAPE[0]

    def sum(self, partial: Tensor) -> Tensor:
        return sum(self._exchanged(partial))

    def gather(self, local: Tensor) -> Tensor:
        return torch.cat(self._exchanged(local))

    def scatter(self, whole: Tensor) -> Tensor:
        return whole[self.first_row : self.first_row + self.rows]

    def _exchanged(self, mine: Tensor) -> list[Tensor]:
        self._said[self.first_row] = mine
        self._meeting.wait(timeout=30)
        both = [self._said[first] for first in sorted(self._said)]
        self._meeting.wait(timeout=30)
        return both


def whole_and_halves(configuration, kernel) -> tuple[list[Tensor], list[Tensor]]:
    """The parameter and every buffer after three steps, of the whole and put together from the halves."""
    start, grads = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)), list(gradients(SHAPE, 3))
    meeting, said = threading.Barrier(2), {}
    places = [(slice(0, SHAPE[0]), WHOLE)]
    places += [(rows, Half(rows, meeting, said)) for rows in (slice(0, CUT), slice(CUT, SHAPE[0]))]
    outcomes = {}

    def run(index: int) -> None:
        rows, place = places[index]
        layout = configuration.layout(SHAPE, rows=place.rows)
        param, state = start[rows].clone(), new_state(layout, torch.device("cpu"), place)
        for grad in grads:
            job = Job.of(layout, param, grad[rows].contiguous(), state, Hyper(lr=1e-2), place=place)
            kernel.run([job])
            advance_ages([job])
        outcomes[index] = [param, *(state[key] for key, buffer in layout.buffers.items() if buffer.name != "age")]

    run(0)
    threads = [threading.Thread(target=run, args=(index,)) for index in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    joined = [
        torch.cat(parts) if len(parts[0]) + len(parts[1]) == len(whole) else parts[0]
        for whole, parts in zip(outcomes[0], zip(outcomes[1], outcomes[2]))
    ]
    return outcomes[0], joined


@pytest.mark.parametrize(**by_configuration)
def test_two_halves_are_one_whole(configuration):
    whole, halves = whole_and_halves(configuration, EagerKernel())
    for one, other in zip(whole, halves):
        if configuration.layout(SHAPE).reach is Reach.ROWS:
            assert torch.equal(one, other)
        elif one.dtype == torch.uint8 or one.dtype == torch.int8:
            assert (one.int() - other.int()).abs().max() <= 1
        else:
            torch.testing.assert_close(one, other, rtol=2e-2 if one.dtype == torch.bfloat16 else 1e-4, atol=1e-4)


def test_native_code_leaves_shards_alone():
    """It would add up its own rows and take them for all."""
    _, halves = whole_and_halves(parse("adafactor"), NativeKernel())
    _, expected = whole_and_halves(parse("adafactor"), EagerKernel())
    assert all(torch.equal(one, other) for one, other in zip(halves, expected))


def test_whole_matrices_are_gathered_and_scattered():
    with toys.registered():
        whole, halves = whole_and_halves(parse("polar[m=int8]"), EagerKernel())
        for one, other in zip(whole, halves):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)

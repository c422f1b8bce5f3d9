"""Where a parameter lives changes nothing about its update: shards that ask each other are one whole."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from baoc import parse
from baoc.core.sharding import WHOLE, Ranks, Whole
from baoc.core.spec import Hyper, Reach
from baoc.optim.kernels.eager import EagerKernel
from baoc.optim.kernels.job import Job, advance_ages
from baoc.optim.kernels.native import NativeKernel
from baoc.optim.state import new_state
from tests import toys
from tests.cases import by_configuration, gradients

SHAPE = (90, 300)


class Threads(Ranks):
    """Ranks that are threads of one process, and meet at a barrier."""

    def __init__(self, rank: int, meeting: threading.Barrier, said: dict[int, object]) -> None:
        super().__init__("threads", rank, meeting.parties)
        object.__setattr__(self, "_meeting", meeting)
        object.__setattr__(self, "_said", said)

    def sum(self, partial: Tensor) -> Tensor:
        return sum(self._told(partial))

    def exchange(self, sent, sizes, received) -> Tensor:
        parts = [each[self.rank] for each in self._told(sent.split_with_sizes(list(sizes)))]
        assert [part.numel() for part in parts] == list(received)
        return torch.cat(parts)

    def _told(self, mine):
        self._said[self.rank] = mine
        self._meeting.wait(timeout=30)
        all_said = [self._said[rank] for rank in range(self.size)]
        self._meeting.wait(timeout=30)
        return all_said


class Part(Whole):
    """Some rows of a tensor of one shape."""

    def __init__(self, ranks: Ranks) -> None:
        rows = ranks.rows(SHAPE[0])
        self.first_row, self.rows, self.ranks = rows.start, rows.stop - rows.start, ranks

    def numel(self, local: Tensor) -> int:
        return SHAPE[0] * SHAPE[1]

    def sum(self, partial: Tensor) -> Tensor:
        return self.ranks.sum(partial)


def whole_and_parts(configuration, kernel, parts: int = 2) -> tuple[list[Tensor], list[Tensor]]:
    """The parameter and every buffer after three steps, of the whole and put together from its parts."""
    start, grads = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)), list(gradients(SHAPE, 3))
    meeting, said = threading.Barrier(parts), {}
    places = [WHOLE, *(Part(Threads(rank, meeting, said)) for rank in range(parts))]
    outcomes = {}

    def run(index: int) -> None:
        place = places[index]
        rows = slice(0, SHAPE[0]) if place is WHOLE else place.ranks.rows(SHAPE[0])
        layout = configuration.layout(SHAPE, rows=place.rows)
        param, state = start[rows].clone(), new_state(layout, torch.device("cpu"), place)
        for grad in grads:
            job = Job.of(layout, param, grad[rows].contiguous(), state, Hyper(lr=1e-2), place=place)
            kernel.run([job])
            advance_ages([job])
        buffers = {key: buffer for key, buffer in layout.buffers.items() if buffer.name != "age"}
        outcomes[index] = [(param, True), *((state[key], buffer.by_rows) for key, buffer in buffers.items())]

    run(0)
    threads = [threading.Thread(target=run, args=(index + 1,)) for index in range(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    joined = []
    for pieces in zip(*(outcomes[index + 1] for index in range(parts))):
        tensors = [tensor for tensor, _ in pieces]
        if not pieces[0][1]:  # whole on every rank
            assert all(torch.equal(tensors[0], tensor) for tensor in tensors)
        joined.append(torch.cat(tensors) if pieces[0][1] else tensors[0])
    return [tensor for tensor, _ in outcomes[0]], joined


@pytest.mark.parametrize("kernel", [EagerKernel(), NativeKernel()], ids=["eager", "native"])
@pytest.mark.parametrize(**by_configuration)
def test_two_halves_are_one_whole(configuration, kernel):
    whole, halves = whole_and_parts(configuration, kernel)
    for one, other in zip(whole, halves):
        if configuration.layout(SHAPE).reach is Reach.ROWS:
            assert torch.equal(one, other)
        elif one.dtype == torch.uint8 or one.dtype == torch.int8:
            assert (one.int() - other.int()).abs().max() <= 1
        else:
            torch.testing.assert_close(one, other, rtol=2e-2 if one.dtype == torch.bfloat16 else 1e-4, atol=1e-4)


def test_native_code_leaves_sums_over_ranks_alone():
    """It would add up its own rows and take them for all."""
    _, halves = whole_and_parts(parse("adafactor"), NativeKernel())
    _, expected = whole_and_parts(parse("adafactor"), EagerKernel())
    assert all(torch.equal(one, other) for one, other in zip(halves, expected))


def test_native_code_runs_what_goes_by_rows(monkeypatch):
    monkeypatch.setattr(EagerKernel, "run", lambda *_: pytest.fail("left to torch operations"))
    whole, thirds = whole_and_parts(parse("adamw[m=int4,v=int8]"), NativeKernel(), parts=3)
    assert all(torch.equal(one, other) for one, other in zip(whole, thirds))


def test_matrices_go_to_their_owners_and_back():
    with toys.registered():
        whole, thirds = whole_and_parts(parse("polar[m=int8]"), EagerKernel(), parts=3)
        for one, other in zip(whole, thirds):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)

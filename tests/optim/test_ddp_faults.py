"""One rank runs out of data or memory, or has a bad gradient: no rank waits forever, and replicas stay equal."""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from baoc import BAOC, EffectPlanner, PaperPlanner
from baoc.core.plan import PlanError
from baoc.optim import conversion
from baoc.optim.agreement import Peers
from tests.ranks import together

pytestmark = pytest.mark.xdist_group("ranks")

STEPS, WARMUP = 6, 3
PAPER = PaperPlanner(warmup=WARMUP)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 64))


def backward(model: nn.Module, rank: int, step: int) -> None:
    """Compute gradients of a batch whose size depends on the rank."""
    batch = torch.randn(4 + 4 * rank, 64, generator=torch.Generator().manual_seed(1000 * rank + step))
    model(batch).square().mean().backward()


def held(model: nn.Module, optimizer: BAOC) -> dict[str, Any]:
    """What replicas must have in common."""
    weights = b"".join(_whole(param.detach()).numpy().tobytes() for param in model.parameters())
    state = [_whole(each) for param in model.parameters() for each in optimizer.state[param].values()]
    return {
        "weights": hashlib.sha256(weights).hexdigest(),
        "state": hashlib.sha256(b"".join(map(_bytes, state))).hexdigest(),
        "plan": optimizer.plan.to_json(),
    }


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _bytes(value: Any) -> bytes:
    if isinstance(value, dict):  # the planner's samples
        return b"".join(map(_bytes, value.values()))
    return torch.as_tensor(value).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# ---- data ----

UNEVEN: dict[str, tuple[Any, tuple[int, ...]]] = {
    "the first rank stops in the warm-up": (PAPER, (2, STEPS, STEPS)),
    "another rank stops in the warm-up": (PAPER, (STEPS, STEPS, 2)),
    "samples go on": (PaperPlanner(warmup=2, replan_every=2), (3, STEPS, STEPS)),
    "stability ends the warm-up": (PaperPlanner(warmup=100, stable_within=100.0), (3, 22, 22)),
    "effects, no data at all": (EffectPlanner(), (0, STEPS, STEPS)),
    "effects, planned again": (EffectPlanner(replan_every=2), (1, STEPS, STEPS)),
}


def join_unevenly(rank: int) -> dict[str, dict[str, Any]]:
    found = {}
    for name, (planner, steps) in UNEVEN.items():
        model = DistributedDataParallel(make_model())
        optimizer = BAOC(model.module, lr=1e-2, memory=0.5, planner=planner, on_nonfinite="skip", verbose=False)
        with model.join():
            for step in range(steps[rank]):
                backward(model, rank, step)
                optimizer.step()
                optimizer.zero_grad()
        found[name] = {**held(model.module, optimizer), "is_warming_up": optimizer.is_warming_up}
    return found


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return together(join_unevenly, 3, tmp_path_factory.mktemp("joined"))


@pytest.mark.parametrize("case", UNEVEN)
def test_ranks_with_data_stay_equal_when_another_has_none_left(joined, case):
    most = max(UNEVEN[case][1])
    busy = [each[case] for each, steps in zip(joined, UNEVEN[case][1]) if steps == most]
    assert len(busy) == 2 and busy[0] == busy[1]
    assert not busy[0]["is_warming_up"]
    assert len({each[case]["weights"] for each in joined}) == 1  # join() copies them at its end


# ---- gradients ----


def poisoned(policy: str, planner: Any = None) -> Callable[[int], dict[str, Any]]:
    """The gradient becomes bad on one rank after DDP has reduced it."""

    def scenario(rank: int) -> dict[str, Any]:
        model = DistributedDataParallel(make_model())
        optimizer = BAOC(model.module, lr=1e-2, memory=0.5, planner=planner, on_nonfinite=policy, verbose=False)
        errors = []
        for step in range(STEPS):
            backward(model, rank, step)
            if rank == 1 and step in (0, 3):
                model.module[2].weight.grad[3, 4] = float("inf")
            try:
                optimizer.step()
            except FloatingPointError:
                errors.append(step)
            optimizer.zero_grad()
        counts = {key: optimizer.metrics()[key] for key in ("steps", "nonfinite_steps", "skipped_steps")}
        return {**held(model.module, optimizer), **counts, "errors": errors}

    return scenario


def one_without_gradients(rank: int) -> dict[str, Any]:
    """Nothing reduces gradients here; the rank without any must still answer."""
    model = make_model()
    optimizer = BAOC(model, lr=1e-2, memory=0.5, on_nonfinite="skip", verbose=False)
    if rank == 0:
        backward(model, 0, 0)
    optimizer.step()
    return {"skipped_steps": optimizer.metrics()["skipped_steps"]}


BAD_GRADIENTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "skip": poisoned("skip"),
    "skip, paper": poisoned("skip", PAPER),
    "raise": poisoned("raise"),
    "none": one_without_gradients,
}

# ---- memory ----


def without_memory(
    start: Callable[[BAOC], object], rank_that_fails: int, nth: int, *, is_sharded: bool = False
) -> Callable[[int], Any]:
    """On one rank, a conversion of a change of plans fails. Then the run goes on."""

    def scenario(rank: int) -> dict[str, Any]:
        model = fully_shard(make_model()) if is_sharded else DistributedDataParallel(make_model())
        core = model if is_sharded else model.module
        optimizer = BAOC(core, lr=1e-2, memory=0.5, planner=PAPER, verbose=False)
        real, calls = conversion.allocated, 0

        def failing(*args: Any, **settings: Any) -> Any:
            nonlocal calls
            calls += 1
            if rank == rank_that_fails and calls == nth + 1:
                raise MemoryError("no memory is left")
            return real(*args, **settings)

        errors, after = [], None
        conversion.allocated = failing
        for step in range(STEPS):
            backward(model, rank, step)
            try:
                optimizer.step()
                if step == WARMUP:
                    start(optimizer)
            except (PlanError, MemoryError) as error:
                errors.append(f"{type(error).__name__}: {error}")
                after = held(core, optimizer)
            optimizer.zero_grad()
        conversion.allocated = real
        return {**held(core, optimizer), "after": after, "errors": errors}

    return scenario


NO_MEMORY: dict[str, Callable[[int], dict[str, Any]]] = {
    "step": without_memory(lambda optimizer: None, 1, 2),
    "step, first rank": without_memory(lambda optimizer: None, 0, 0),
    "replan": without_memory(
        lambda optimizer: optimizer.replan(0.3, statistics=optimizer.statistics), 1, 6 + 2
    ),  # six conversions at the end of the warm-up
    "sharded step": without_memory(lambda optimizer: None, 1, 2, is_sharded=True),
    "sharded step, first rank": without_memory(lambda optimizer: None, 0, 0, is_sharded=True),
}


def run_all(rank: int) -> dict[str, dict[str, Any]]:
    found = {}
    for name, scenario in (BAD_GRADIENTS | NO_MEMORY).items():
        found[name] = scenario(rank)
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return together(run_all, 2, tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("case", [*BAD_GRADIENTS, *NO_MEMORY])
def test_what_one_rank_meets_is_decided_by_all(outcomes, case):
    assert outcomes[0][case] == outcomes[1][case]


@pytest.mark.parametrize("case", ["skip", "skip, paper"])
def test_a_gradient_that_is_bad_on_one_rank_is_skipped_by_all(outcomes, case):
    counts = [(each[case]["steps"], each[case]["nonfinite_steps"], each[case]["skipped_steps"]) for each in outcomes]
    assert counts == [(STEPS - 2, 2, 2)] * 2


def test_a_gradient_that_is_bad_on_one_rank_raises_on_all(outcomes):
    assert [each["raise"]["errors"] for each in outcomes] == [[0, 3]] * 2


@pytest.mark.parametrize("case", NO_MEMORY)
def test_a_rank_without_memory_stops_the_change_on_all_ranks(outcomes, case):
    [error] = outcomes[0][case]["errors"]
    failed = 0 if "first" in case else 1
    assert error.startswith(f"PlanError: rank {failed} of 2 could not adopt the new plan: MemoryError: no memory")
    if case != "replan":  # a step tries it again
        assert outcomes[0][case]["after"]["plan"] != outcomes[0][case]["plan"]


def test_copies_have_no_process_group():
    peers = Peers("a group")
    for copied in (copy.deepcopy(peers), pickle.loads(pickle.dumps(peers))):
        assert copied._group is None


def test_without_other_ranks_nothing_is_asked(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        peers = Peers()
        assert not peers.exist and not peers.answer
        with pytest.raises(MemoryError):
            peers.attempt(_fail, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def _fail() -> None:
    raise MemoryError

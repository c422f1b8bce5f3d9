"""What happens to sharded state besides steps: changes of plans, late groups, copies, files, whole state dicts."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from baoc import BlockOptimizer, to_torch
from tests.optim.test_sharded import Net, outcome, set_gradients, sharded
from tests.ranks import together
from tests.training import assert_same

PLANS = (
    "adamw-32",
    "muon-8 else adamw-8",
    "adafactor",
    "adamw[m=int8,v=factored]",
    "sgdm-16",
    "lion-8",
    "sgd",
    "adamw[m=int4,v=col-mean]",
    "normuon-4 else adamw-32",
)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()


def changed(rank: int, model: nn.Module) -> list[dict[str, Any]]:
    """Plan after plan in one run: the length of updates after each change, and what it left behind."""
    optimizer = BlockOptimizer(model, lr=1e-3, plan=PLANS[0])
    found = []
    for number, plan in enumerate(PLANS):
        optimizer.set_plan(plan)
        scales = {name: block.lr_scale for name, block in optimizer.plan.by_parameter}
        train(model, optimizer, range(2 * number, 2 * number + 2))
        found.append({"scales": scales, "params": outcome(model, optimizer)["params"]})
    return found


def checks(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"changes": changed(rank, sharded(Net(), (3,)))}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("baoc.optim.migrate.SIDE_BY_SIDE", -(1 << 60))
        found["changes aside"] = changed(rank, sharded(Net(), (3,)))
    model = sharded(Net(), (3,))
    optimizer = BlockOptimizer(model, lr=1e-2, plan="normuon-8 else adamw[m=int4,v=factored-bf16]")
    found["at construction"] = all(
        (isinstance(value, DTensor) and type(param) is type(value)) or not isinstance(value, Tensor) or not value.dim()
        for param, state in optimizer.state.items()
        for value in state.values()
    ) and len(optimizer.state) == len(list(model.parameters()))
    train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    ways: dict[str, Any] = {"file": torch.load(file), "copy": copy.deepcopy(optimizer.state_dict())}
    for name, options in {
        "full": StateDictOptions(full_state_dict=True),
        "from the first rank": StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True),
    }.items():
        ways[name] = options, get_optimizer_state_dict(model, optimizer, options=options)
    expected = outcome(model, optimizer)["state"]
    for name, way in ways.items():
        fresh = BlockOptimizer(model, lr=1e-2, plan="normuon-8 else adamw[m=int4,v=factored-bf16]")
        if isinstance(way, tuple):
            set_optimizer_state_dict(model, fresh, way[1], options=way[0])
        else:
            fresh.load_state_dict(way)
        found[name] = outcome(model, fresh)["state"]
    theirs = torch.optim.AdamW(model.parameters())
    theirs.load_state_dict(to_torch(optimizer))
    train(model, theirs, range(2, 3))
    back = BlockOptimizer(model, lr=1e-2, plan="adamw-32")
    back.load_state_dict(theirs.state_dict())
    found["ages after torch"] = {int(state["m.age"]) for param, state in back.state.items() if param.grad is not None}
    added = nn.Parameter(model.matrix.detach().clone())
    back.add_param_group({"params": [("added", added)]})
    found["added"] = isinstance(back.state[added]["m"], DTensor)
    return {"expected": expected, **found}


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory) -> dict[str, Any]:
    return together(checks, 3, tmp_path_factory.mktemp("ranks"))[0]


@pytest.mark.xdist_group("ranks")
def test_plans_change_as_in_one_process(on_ranks):
    for number, (ours, alone) in enumerate(zip(on_ranks["changes"], changed(0, Net()))):
        for name, scale in alone["scales"].items():
            assert (ours["scales"][name] or 1.0) == pytest.approx(scale or 1.0, rel=1e-2), (PLANS[number], name)
        for name, param in alone["params"].items():
            torch.testing.assert_close(ours["params"][name], param, rtol=1e-3, atol=1e-3)


@pytest.mark.xdist_group("ranks")
def test_shards_that_were_put_aside_are_converted_to_the_same_bits(on_ranks):
    for beside, aside in zip(on_ranks["changes"], on_ranks["changes aside"], strict=True):
        assert beside["scales"] == aside["scales"]
        assert all(torch.equal(beside["params"][name], param) for name, param in aside["params"].items())


@pytest.mark.xdist_group("ranks")
def test_state_is_there_from_construction_on(on_ranks):
    assert on_ranks["at construction"]
    assert on_ranks["added"]


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("way", ["file", "copy", "full", "from the first rank"])
def test_state_comes_back_to_the_bit(way, on_ranks):
    assert_same(on_ranks[way], on_ranks["expected"], way)


@pytest.mark.xdist_group("ranks")
def test_torch_optimizers_take_sharded_state_and_give_it_back(on_ranks):
    assert on_ranks["ages after torch"] == {3}

"""FSDP2 and slot ``w``: uneven shards of 16-bit weights train, export and resume as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import baoc
from baoc import BlockOptimizer, parse
from baoc.core.sharding import shard_of
from tests.cases import gradients
from tests.optim.test_sharded import SHAPES, Net, sharded
from tests.ranks import together

KINDS = ("16", "8", "sr")


def built(ranks: int, weight: str) -> tuple[nn.Module, BlockOptimizer]:
    """One rank is a plain model. The low bits of the initial weights are there."""
    model = baoc.to_low_precision(Net() if ranks == 1 else sharded(Net(), (ranks,)))
    return model, BlockOptimizer(model, lr=1e-3, plan=parse("adamw-8").with_weight(weight))


def train(model: nn.Module, optimizer: BlockOptimizer, steps: range) -> None:
    for step in steps:
        for index, (name, param) in enumerate(model.named_parameters()):
            *_, grad = gradients(SHAPES[name], step + 1, seed=index, dtype=torch.bfloat16)
            shard = shard_of(param)
            param.grad = grad if shard is None else shard.wrap(grad[shard.rows].contiguous(), by_rows=True)
        optimizer.step()


def exported(model: nn.Module, optimizer: BlockOptimizer) -> dict[str, Tensor]:
    found = baoc.fp32_state_dict(model, optimizer)
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}


def trained(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    for weight in KINDS:
        model, optimizer = built(ranks, weight)
        start = exported(model, optimizer)
        train(model, optimizer, range(2))
        content = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(content, checkpoint_id=folder / f"{ranks}-{weight}", no_dist=ranks == 1)
        train(model, optimizer, range(2, 4))
        outcomes[weight] = start, exported(model, optimizer), optimizer.plan.state_bytes
        baoc.load_fp32_state_dict(model, optimizer, start)  # whole tensors
        outcomes[f"{weight} loaded"] = exported(model, optimizer)
    return outcomes


def resumed(rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    outcomes = {}
    for others in {1, 2, 3} - {ranks}:
        for weight in KINDS:
            model, optimizer = built(ranks, weight)
            nn.init.zeros_(model.matrix)
            content = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.load(content, checkpoint_id=folder / f"{others}-{weight}", no_dist=ranks == 1)
            set_optimizer_state_dict(model, optimizer, content["optimizer"])
            set_model_state_dict(model, content["model"])
            train(model, optimizer, range(2, 4))
            outcomes[others, weight] = exported(model, optimizer)
    return outcomes


def on(ranks: int, target: Any, folder: Path) -> Any:
    if ranks == 1:
        return target(0, 1, folder)
    return together(target, ranks, folder / f"{target.__name__}{ranks}", ranks, folder)[0]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], what: object) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), (what, name)


@pytest.mark.xdist_group("ranks")
def test_ranks_train_and_resume_as_one_process(tmp_path):
    """Bitwise: weights and low bits, on any number of ranks, and from the checkpoint of any other number."""
    one = on(1, trained, tmp_path)
    initial = {name: value.detach() for name, value in Net().state_dict().items()}
    assert_equal(one["16"][0], initial, "start")
    for ranks in (2, 3):
        found = on(ranks, trained, tmp_path)
        for weight in KINDS:
            for part in (0, 1):
                assert_equal(found[weight][part], one[weight][part], (ranks, weight, part))
            assert found[weight][2] == one[weight][2]
            assert_equal(found[f"{weight} loaded"], one[f"{weight} loaded"], (ranks, weight, "loaded"))
        assert_equal(found["16 loaded"], initial, "loaded")
    for ranks in (1, 2, 3):
        for (others, weight), weights in on(ranks, resumed, tmp_path).items():
            assert_equal(weights, one[weight][1], f"{others} to {ranks}, w={weight}")

"""Distributed checkpoints: what some ranks saved, any other number of them goes on from, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from baoc import BlockOptimizer
from tests.ranks import together
from tests.test_sharded import Net, outcome, set_gradients, sharded
from tests.training import assert_same

PLANS = (
    "adamw[m=int4,v=int8] else adamw-32",
    "adamw[m=int8,v=factored-int8] else adamw-32",
    "adamw[m=bf16,v=col-mean] else adamw-32",
    "adafactor-16",
    "normuon-8 else adamw-32",
    "sgd",
)
RANKS = (1, 2, 3)


def built(plan: str, ranks: int) -> tuple[nn.Module, BlockOptimizer]:
    """One rank is a plain model."""
    model = Net() if ranks == 1 else sharded(Net(), (ranks,))
    return model, BlockOptimizer(model, lr=1e-2, plan=plan)


def step(model: nn.Module, optimizer: BlockOptimizer, number: int) -> None:
    set_gradients(model, number)
    optimizer.step()


def saved(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Two steps under each plan, a checkpoint of both kinds, and how it stood then."""
    outcomes = {}
    for index, plan in enumerate(PLANS):
        model, optimizer = built(plan, ranks)
        for number in range(2):
            step(model, optimizer, number)
        for flat in (False, True):
            options = StateDictOptions(flatten_optimizer_state_dict=flat)
            content = {
                "model": get_model_state_dict(model),
                "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
            }
            dcp.save(content, checkpoint_id=folder / f"{ranks}-{index}-{flat}", no_dist=ranks == 1)
        outcomes[plan] = outcome(model, optimizer)
    return outcomes


def loaded(rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    """What fresh optimizers hold after they were given the checkpoints of others, and after one more step."""
    outcomes = {}
    for others in set(RANKS) - {ranks}:
        for index, plan in enumerate(PLANS):
            for flat in (False, True):
                model, optimizer = built(plan, ranks)
                nn.init.zeros_(model.matrix)
                options = StateDictOptions(flatten_optimizer_state_dict=flat)
                content = {
                    "model": get_model_state_dict(model),
                    "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
                }
                dcp.load(content, checkpoint_id=folder / f"{others}-{index}-{flat}", no_dist=ranks == 1)
                set_model_state_dict(model, content["model"])
                set_optimizer_state_dict(model, optimizer, content["optimizer"], options=options)
                found = outcome(model, optimizer)
                step(model, optimizer, 2)
                outcomes[others, plan, flat] = found, outcome(model, optimizer)
    return outcomes


def on(ranks: int, target: Any, folder: Path, shared: Path) -> Any:
    if ranks == 1:
        return target(0, 1, shared)
    return together(target, ranks, folder, ranks, shared)[0]


@pytest.mark.xdist_group("ranks")
def test_any_number_of_ranks_goes_on_from_what_any_other_saved(tmp_path):
    uninterrupted = {plan: after_three_steps(plan) for plan in PLANS}
    before = {ranks: on(ranks, saved, tmp_path / f"save{ranks}", tmp_path) for ranks in RANKS}
    for ranks in RANKS:
        for (others, plan, flat), (found, later) in on(ranks, loaded, tmp_path / f"load{ranks}", tmp_path).items():
            assert_same(found, before[others][plan], f"{plan}, {others} to {ranks} ranks, flat: {flat}")
            for name, param in later["params"].items():
                torch.testing.assert_close(param, uninterrupted[plan]["params"][name], rtol=1e-4, atol=1e-4)


def after_three_steps(plan: str) -> dict[str, Any]:
    model, optimizer = built(plan, 1)
    for number in range(3):
        step(model, optimizer, number)
    return outcome(model, optimizer)

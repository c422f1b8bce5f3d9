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

from baoc import Block, BlockOptimizer, Plan, parse
from tests.optim.test_sharded import SHAPES, Net, outcome, set_gradients, sharded
from tests.ranks import together
from tests.training import assert_same

CONFIGURATIONS = {
    "matrix": "adamw[m=int4,v=int8]",
    "alike": "adamw[m=int8,v=factored-int8]",
    "third": "normuon-8",
    "convolution": "adafactor-16",
    "stack": "adamw[m=bf16,v=factored-int8]",
    "fewer_rows_than_ranks": "adamw[m=int8,v=col-mean]",
    "one_row": "adamw[m=int8,v=row-mean]",
    "vector": "adamw-32",
    "without_gradient": "sgd",
}
PLAN = Plan(tuple(Block(name, parse(chosen), {name: SHAPES[name]}) for name, chosen in CONFIGURATIONS.items()))
RANKS = (1, 2, 3)
KINDS = {flat: StateDictOptions(flatten_optimizer_state_dict=flat) for flat in (False, True)}


def built(ranks: int) -> tuple[nn.Module, BlockOptimizer]:
    """One rank is a plain model."""
    model = Net() if ranks == 1 else sharded(Net(), (ranks,))
    return model, BlockOptimizer(model, lr=1e-2, plan=PLAN)


def train(model: nn.Module, optimizer: BlockOptimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()


def content_of(model: nn.Module, optimizer: BlockOptimizer, options: StateDictOptions) -> dict[str, Any]:
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": get_model_state_dict(model), "optimizer": optimizer_state}


def saved(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """A checkpoint of both kinds after two steps, and how things stood then."""
    model, optimizer = built(ranks)
    train(model, optimizer, range(2))
    for flat, options in KINDS.items():
        content = content_of(model, optimizer, options)
        dcp.save(content, checkpoint_id=folder / f"{ranks}-{flat}", no_dist=ranks == 1)
    return outcome(model, optimizer)


def loaded(rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    """What fresh optimizers hold after they were given the checkpoints of others, and after one more step."""
    outcomes = {}
    for others in set(RANKS) - {ranks}:
        for flat, options in KINDS.items():
            model, optimizer = built(ranks)
            nn.init.zeros_(model.matrix)
            content = content_of(model, optimizer, options)
            dcp.load(content, checkpoint_id=folder / f"{others}-{flat}", no_dist=ranks == 1)
            set_model_state_dict(model, content["model"])
            set_optimizer_state_dict(model, optimizer, content["optimizer"], options=options)
            found = outcome(model, optimizer)
            train(model, optimizer, range(2, 3))
            outcomes[others, flat] = found, outcome(model, optimizer)
    return outcomes


def on(ranks: int, target: Any, folder: Path) -> Any:
    if ranks == 1:
        return target(0, 1, folder)
    return together(target, ranks, folder / f"{target.__name__}{ranks}", ranks, folder)[0]


@pytest.mark.xdist_group("ranks")
def test_any_number_of_ranks_goes_on_from_what_any_other_saved(tmp_path):
    model, optimizer = built(1)
    train(model, optimizer, range(3))
    uninterrupted = outcome(model, optimizer)["params"]
    before = {ranks: on(ranks, saved, tmp_path) for ranks in RANKS}
    for ranks in RANKS:
        for (others, flat), (found, later) in on(ranks, loaded, tmp_path).items():
            assert_same(found, before[others], f"{others} to {ranks} ranks, flat: {flat}")
            for name, param in later["params"].items():
                torch.testing.assert_close(param, uninterrupted[name], rtol=1e-4, atol=1e-4)

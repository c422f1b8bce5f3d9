"""Learning rates by role: who gets them, and who is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from baoc import BAOC, Plan
from baoc.core.spec import Hyper
from baoc.planning import rates as factors
from baoc.planning.planner import Planner
from baoc.planning.settings import Settings
from baoc.profiling.facts import Facts
from experiments import rates
from experiments.runs import RunOptions, Store
from experiments.runs.batch import run_all
from tests.training import shapes

WIDTH, WORDS = 64, 256


class Net(nn.Module):
    """With one of every kind, and a head that is too small for anything but fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.position_embedding = nn.Parameter(torch.randn(1, 80, WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)


def scales(plan: Plan) -> dict[str, float | None]:
    return {name: block.lr_scale for block in plan.blocks for name in block.parameters}


def plan(memory: float = 0.25, **settings: str) -> Plan:
    model = Net()
    return Planner(shapes(model), None, Hyper(lr=1e-3), Settings(**settings), Facts.of(model)).plan(memory)


@pytest.mark.parametrize("memory", [0.0, 0.15, 0.25, 1.0])
def test_from_scratch_tables_and_vectors_learn_faster_at_every_budget(memory: float) -> None:
    found = scales(plan(memory, regime="scratch"))
    fast = {"embed.weight": factors.TABLE} | {
        name: factors.VECTOR for name in found if name.endswith("bias") or name.startswith("norm")
    }
    assert found == {name: fast.get(name, 1.0) for name in found}


@pytest.mark.parametrize("settings", [{"regime": "finetune"}, {"lr_match": "rms"}, {"lr_match": "none"}])
def test_trained_weights_and_those_who_ask_for_it_keep_one_learning_rate(settings: dict[str, str]) -> None:
    assert set(scales(plan(**{"regime": "scratch", **settings})).values()) == {1.0}


def test_small_heads_are_not_called_vectors_where_their_rate_is_another() -> None:
    names = {regime: {block.name for block in plan(regime=regime).blocks} for regime in ("scratch", "finetune")}
    assert {"vectors", "small tables"} <= names["scratch"] and "small tables" not in names["finetune"]


def test_a_model_of_nothing_but_tables_keeps_the_learning_rate_that_was_meant_for_them() -> None:
    model = nn.ModuleDict({name: nn.Embedding(WORDS, WIDTH) for name in ("user", "item")})
    made = Planner(shapes(model), None, Hyper(lr=1e-3), Settings(), Facts.of(model)).plan(0.5)
    assert set(scales(made).values()) == {1.0}


def test_layers_as_blocks_have_one_learning_rate() -> None:
    found = scales(plan(1.0, regime="scratch", granularity="layer"))
    assert found["layers.0.weight"] == found["layers.0.bias"] == 1.0


def test_the_plan_shows_them_in_80_columns() -> None:
    text = plan(regime="scratch").table()
    assert f"x{factors.TABLE:g}" in text and max(map(len, text.splitlines())) <= 80


def test_groups_with_learning_rates_of_their_own_are_left_alone() -> None:
    def made(*lrs: float) -> set[float | None]:
        model = Net()
        groups = [
            {"params": [item for item in model.named_parameters() if item[0].startswith("embed")], "lr": lrs[0]},
            {"params": [item for item in model.named_parameters() if not item[0].startswith("embed")], "lr": lrs[1]},
        ]
        return set(scales(BAOC(groups, memory=0.25, regime="scratch", quiet=True).plan).values())

    assert made(1e-3, 1e-3) == {1.0, factors.VECTOR, factors.TABLE}
    assert made(4e-3, 1e-3) == {1.0}


def test_a_table_that_learns_faster_moves_further() -> None:
    def moved(**settings: str) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10))
        before = model[0].weight.detach().clone()
        optimizer = BAOC(model, lr=1e-3, weight_decay=0.0, memory=0.25, quiet=True, **settings)
        model(torch.arange(WORDS)).square().mean().backward()
        optimizer.step()
        return float((model[0].weight.detach() - before).norm())

    assert moved() == pytest.approx(factors.TABLE * moved(lr_match="rms"), rel=1e-3)


def test_factors_are_compared_with_none_seed_by_seed(tiny: str, tmp_path: Path) -> None:
    settings = [rates.Setting(tiny, 2)]
    with Store(tmp_path / "rates").writing("rates") as store:
        run_all(rates.jobs(settings, 2, RunOptions()), store)
        assert {row["method"] for row in store.rows} == {
            rates.method("muon-8", factors) for factors in ({}, *rates.FACTORS)
        }
        told = rates.page(settings, store, 3, "some command").splitlines()
    losses = {(row["method"], row["seed"]): row["test_loss"] for row in store.rows}
    without, with_factor = (
        [losses[rates.method("muon-8", factors), seed] for seed in range(2)] for factors in ({}, {"vector": 2.0})
    )
    mean = sum(100 * (ours / other - 1) for ours, other in zip(with_factor, without)) / 2
    assert f"| {mean:+.2f}" in told[-1], "two of three seeds are there"

"""Learning-rate multipliers by role: which parameters get them, and when all keep one learning rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from baoc import BAOC, EffectPlanner, Plan, make_plan
from baoc.core.roles import Role
from baoc.planners.lr_multipliers import HEAD, TABLE, VECTOR, multiplier, multipliers

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


def plan(memory: float | str = 0.25, **settings: Any) -> Plan:
    return make_plan(Net(), memory, planner=EffectPlanner(**settings))


@pytest.mark.parametrize("memory", [0.0, 0.15, 0.25, 1.0, "auto"])
def test_from_scratch_tables_and_vectors_learn_faster_at_every_budget(memory: float | str) -> None:
    found = scales(plan(memory, regime="scratch"))
    fast = {"embed.weight": TABLE} | {
        name: VECTOR for name in found if name.endswith("bias") or name.startswith("norm")
    }
    assert found == {name: fast.get(name, 1.0) for name in found}


@pytest.mark.parametrize("settings", [{"regime": "finetune"}, {"lr_multipliers": False}], ids=str)
def test_trained_weights_and_those_who_ask_for_it_keep_one_learning_rate(settings: dict[str, Any]) -> None:
    assert set(scales(plan(**{"regime": "scratch", **settings})).values()) == {1.0}


def test_small_heads_are_not_called_vectors_where_their_rate_is_another() -> None:
    assert {"vectors", "heads"} <= {block.name for block in plan(regime="scratch").blocks}


def test_a_model_of_nothing_but_tables_keeps_the_learning_rate_that_was_meant_for_them() -> None:
    model = nn.ModuleDict({name: nn.Embedding(WORDS, WIDTH) for name in ("user", "item")})
    assert set(scales(make_plan(model, 0.5)).values()) == {1.0}


@pytest.mark.parametrize(
    ("role", "shape", "expected"),
    [
        (Role.EMBEDDING, (2 * WIDTH, WIDTH), TABLE),
        (Role.EMBEDDING, (2 * WIDTH - 1, WIDTH), 1.0),  # positions of image patches are not looked up
        (Role.EMBEDDING, (4, WORDS, WIDTH), 1.0),
        (Role.VECTOR, (WIDTH,), VECTOR),
        (Role.VECTOR, (), VECTOR),
        (Role.HEAD, (2 * WIDTH, WIDTH), HEAD),
        (Role.HEAD, (2 * WIDTH - 1, WIDTH), 1.0),  # over few classes
        (Role.MATRIX, (WORDS, WIDTH), 1.0),
        (Role.STACK, (4, WIDTH, WIDTH), 1.0),
        (Role.CONVOLUTION, (WIDTH, 3, 3, 3), 1.0),
    ],
)
def test_multipliers_by_role(role: Role, shape: tuple[int, ...], expected: float) -> None:
    assert multiplier(role, shape, "scratch") == expected
    assert multiplier(role, shape, "finetune") == 1.0
    both = {"w": (role, shape), "hidden": (Role.MATRIX, (WIDTH, WIDTH))}
    assert multipliers(both, "scratch") == {"w": expected, "hidden": 1.0}


def test_the_plan_shows_them_in_80_columns() -> None:
    text = plan(regime="scratch").table()
    assert f"x{TABLE:g}" in text and max(map(len, text.splitlines())) <= 80


def test_groups_with_learning_rates_of_their_own_are_left_alone() -> None:
    def made(*lrs: float) -> set[float | None]:
        model = Net()
        groups = [
            {"params": [item for item in model.named_parameters() if item[0].startswith("embed")], "lr": lrs[0]},
            {"params": [item for item in model.named_parameters() if not item[0].startswith("embed")], "lr": lrs[1]},
        ]
        return set(
            scales(BAOC(groups, memory=0.25, planner=EffectPlanner(regime="scratch"), verbose=False).plan).values()
        )

    assert made(1e-3, 1e-3) == {1.0, VECTOR, TABLE}
    assert made(4e-3, 1e-3) == {1.0}


def test_a_table_that_learns_faster_moves_further() -> None:
    def moved(**settings: Any) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10))
        before = model[0].weight.detach().clone()
        optimizer = BAOC(
            model,
            lr=1e-3,
            weight_decay=0.0,
            memory=0.25,
            verbose=False,
            planner=EffectPlanner(regime="scratch", **settings),
        )
        model(torch.arange(WORDS)).square().mean().backward()
        optimizer.step()
        return float((model[0].weight.detach() - before).norm())

    assert moved() == pytest.approx(TABLE * moved(lr_multipliers=False), rel=1e-3)

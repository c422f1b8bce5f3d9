"""Plan files: what is written is read, and nothing else is."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from baoc import Block, Plan, PlanError, parse

SHAPES = {"wte.weight": (512, 64), "h.weight": (64, 64), "h.bias": (64,)}
PLAN = Plan(
    (
        Block("a", parse("muon-8 else adamw-8"), {"h.weight": (64, 64)}, lr_scale=0.5, risk={"fit": 0.1}, why="tested"),
        Block("b", parse("adamw[m=int8,v=factored]"), {"wte.weight": (512, 64), "h.bias": (64,)}, host=True),
    ),
    {"memory_budget": 1000, "expected_loss": -0.25, "regime": "scratch", "time_budget": None},
)
GOOD = {"name": "a", "configuration": "sgd", "parameters": {"w": [2, 3]}}


def of_blocks(*blocks: Any) -> dict[str, Any]:
    return {"format": "baoc.plan", "version": 1, "blocks": list(blocks)}


def test_a_plan_survives_its_file(tmp_path):
    PLAN.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read == PLAN and read.to_json() == PLAN.to_json()
    assert [(block.lr_scale, block.risk, block.why, block.host) for block in read.blocks] == [
        (0.5, {"fit": 0.1}, "tested", False),
        (None, {}, "", True),
    ]


def test_a_minimal_plan_by_hand_is_enough():
    assert Plan.from_json(json.dumps(of_blocks(GOOD))) == Plan((Block("a", parse("sgd"), {"w": (2, 3)}),))


NOT_PLANS = {
    **{repr(text): (text, "not a plan file") for text in ("", "{", "[]", "3", "null", '{"blocks": []}', "plan")},
    "nested": ("[" * 100_000, "not a plan file: its brackets are nested too deeply"),
    "another format": ({**of_blocks(), "format": "other"}, "not a plan file"),
    "a later version": ({**of_blocks(), "version": 2}, "version 2, and this baoc reads version 1"),
    "a version as text": ({**of_blocks(), "version": "1"}, "version '1'"),
    "no blocks": ({**of_blocks(), "blocks": None}, '"blocks" must be a list'),
    "no settings": ({**of_blocks(), "settings": None}, '"settings" an object'),
    "a block that is text": (of_blocks("a"), "block 0 of the plan cannot be read"),
    **{f"no {key}": (of_blocks({k: GOOD[k] for k in GOOD if k != key}), f"has no '{key}'") for key in GOOD},
    "a list of parameters": (of_blocks({**GOOD, "parameters": []}), "block 0 of the plan cannot be read"),
    "a number for a configuration": (of_blocks({**GOOD, "configuration": 8}), "8 is not a configuration"),
    "an unknown configuration": (of_blocks({**GOOD, "configuration": "adamww"}), "unknown update rule 'adamww'"),
    **{
        f"shape {shape}": (of_blocks({**GOOD, "parameters": {"w": shape}}), "a shape must be a list of whole numbers")
        for shape in (["x"], [-2], [2.5], "12", [True], [1 << 40, 1 << 40])
    },
    **{
        f"lr_scale {scale}": (of_blocks({**GOOD, "lr_scale": scale}), "must be")
        for scale in (-1, 0, 1e300, 1e-300, "x", "1.0", True, [1])
    },
    "host as a number": (of_blocks({**GOOD, "host": 1}), "'host' must be true or false, got 1"),
    "risk as text": (of_blocks({**GOOD, "risk": {"fit": "0.1"}}), "must be numbers"),
    "one name twice": (of_blocks(GOOD, {**GOOD, "parameters": {}}), "two blocks are called 'a'"),
    "one parameter twice": (of_blocks(GOOD, {**GOOD, "name": "b"}), "parameter 'w' is in two blocks"),
    **{
        f"{name} as text": ({**of_blocks(), "settings": {name: "x"}}, f"'{name}' must be a number")
        for name in (
            "expected_loss",
            "expected_low",
            "expected_high",
            "expected_from_runs",
            "given_up",
            "time",
            "tokens",
        )
    },
    "a number for a regime": ({**of_blocks(), "settings": {"regime": 1}}, "'regime' must be text"),
    "a number for a source": ({**of_blocks(), "settings": {"expected_source": 1}}, "'expected_source' must be text"),
    **{
        f"{number} in {place}": (text.replace('"?"', number), "out of range. Numbers must be finite")
        for number in ("NaN", "Infinity", "-Infinity", "1e999", "9" * 19, "9" * 5000)
        for place, text in (
            ("settings", json.dumps({**of_blocks(), "settings": {"gap": ["?"]}})),
            ("risk", json.dumps(of_blocks({**GOOD, "risk": {"fit": "?"}}))),
            ("lr_scale", json.dumps(of_blocks({**GOOD, "lr_scale": "?"}))),
        )
    },
}


@pytest.mark.parametrize("case", NOT_PLANS, ids=lambda case: case[:40])
def test_anything_else_is_refused_in_one_line(case):
    content, message = NOT_PLANS[case]
    with pytest.raises(PlanError) as caught:
        Plan.from_json(content if isinstance(content, str) else json.dumps(content))
    assert message in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "plan.json").write_bytes(b"\x80plan")
    with pytest.raises(PlanError, match=r"plan\.json' is not a plan file: byte 0 is not UTF-8"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("number", [math.inf, math.nan], ids=str)
def test_a_number_that_is_not_finite_is_not_written(number, tmp_path):
    for plan in (Plan((), {"bound": number}), Plan((Block("a", parse("sgd"), {}, risk={"fit": number}),))):
        with pytest.raises(PlanError, match="not finite"):
            plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="lr_scale of block 'a' must be a number from 1e-30 to 1e"):
        Block("a", parse("sgd"), {}, lr_scale=number)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wide", [False, True])
def test_names_in_a_file_cannot_steer_a_terminal(wide):
    block = {**GOOD, "name": "\x1b[2Jblock\n", "why": "\x1b]0;title\x07", "risk": {"\x1b[31m": 1.0}}
    plan = Plan.from_json(json.dumps(of_blocks(block)))
    assert all(line.isprintable() for line in plan.table(wide=wide).split("\n"))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({**SHAPES, "new": (2,)}, "the plan does not cover 'new'"),
        ({"h.weight": (64, 64)}, "the plan has 'wte.weight', 'h.bias', which the optimizer does not have"),
        ({**SHAPES, "h.bias": (65,)}, r"parameter 'h.bias' has shape \(65,\), but the plan was made for \(64,\)"),
    ],
)
def test_a_plan_of_another_model_is_refused(shapes, message):
    PLAN.check(SHAPES)
    with pytest.raises(PlanError, match=message):
        PLAN.check(shapes)

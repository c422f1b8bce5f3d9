"""The JSON schema of plan files against the plans that planners make."""

from __future__ import annotations

import json
import math
from importlib import resources
from typing import Any

import pytest
import torch
from torch import nn

from baoc import EffectPlanner, GradientStatistics, PaperPlanner, Plan, Split, collect_statistics, make_plan
from tests.training import shapes

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def schema() -> dict[str, Any]:
    return json.loads((resources.files("baoc.core") / "plan.schema.json").read_text(encoding="utf-8"))


def faults(value: Any, rule: dict[str, Any], root: dict[str, Any], place: str = "plan") -> list[str]:
    """As much of JSON schema as the plan's uses."""
    known = {"$schema", "$id", "$defs", "title", "description", "default", "examples"}
    known |= {"$ref", "const", "type", "required", "properties", "additionalProperties", "items"}
    known |= {"minimum", "exclusiveMinimum", "minLength"}
    assert set(rule) <= known, f"this check does not know {set(rule) - known}"
    if "$ref" in rule:
        rule = root["$defs"][rule["$ref"].removeprefix("#/$defs/")]
    found = []
    if "const" in rule and value != rule["const"]:
        found.append(f"{place} is {value!r}")
    types = rule.get("type", list(TYPES))
    allowed = [types] if isinstance(types, str) else types
    is_right = "boolean" in allowed if isinstance(value, bool) else any(isinstance(value, TYPES[n]) for n in allowed)
    if not is_right:
        return [*found, f"{place} is not {allowed}"]
    if isinstance(value, (int, float)):
        if not value >= rule.get("minimum", -math.inf) or not value > rule.get("exclusiveMinimum", -math.inf):
            found.append(f"{place} is {value}")
    elif isinstance(value, str) and len(value) < rule.get("minLength", 0):
        found.append(f"{place} is too short")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += faults(item, rule.get("items", {}), root, f"{place}[{index}]")
    elif isinstance(value, dict):
        found += [f"{place} has no {name}" for name in rule.get("required", ()) if name not in value]
        for name, item in value.items():
            inner = rule.get("properties", {}).get(name, rule.get("additionalProperties", {}))
            if inner is False:
                found.append(f"{place} has an unknown {name}")
            elif isinstance(inner, dict):
                found += faults(item, inner, root, f"{place}.{name}")
    return found


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.Linear(128, 64))


def statistics() -> GradientStatistics:
    return collect_statistics(make_model(), lambda m, x: m(x).square().mean(), [torch.randn(4, 64)], steps=2)


def plans() -> dict[str, Plan]:
    return {
        "effects": make_plan(make_model(), 0.3),
        "splits": Plan.uniform("muon-8", {"qkv": (96, 32)}).split({"qkv": Split((8, 16, 8), dim=1)}),
        "splits by head": Plan.uniform("muon-8", {"qkv": (96, 32)}).split({"qkv": Split((8, 8, 8), repeat=4)}),
        "no ceiling": make_plan(make_model(), planner=EffectPlanner(time=math.inf)),
        "host": make_plan(make_model(), 0.2, host_memory=0.4),
        "per rank": make_plan(make_model(), "30%/rank", ranks=2),
        "paper": make_plan(statistics(), 0.3, planner=PaperPlanner()),
        "by hand": Plan.uniform("adamw-8", shapes(make_model())),
    }


@pytest.fixture(scope="module", params=["effects", "no ceiling", "host", "per rank", "paper", "by hand"])
def content(request: pytest.FixtureRequest) -> dict[str, Any]:
    text = plans()[request.param].to_json()
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


def test_plans_are_as_the_schema_says(content: dict[str, Any]) -> None:
    assert faults(content, schema(), schema()) == []


def test_the_schema_has_every_key_that_is_written(content: dict[str, Any]) -> None:
    rules = schema()
    assert rules["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert set(content) == set(rules["properties"])
    assert set(content["settings"]) <= set(rules["properties"]["settings"]["properties"])
    assert set(content["blocks"][0]) == set(rules["$defs"]["block"]["properties"])


def test_the_schema_has_no_key_that_no_planner_writes() -> None:
    written = {key for plan in plans().values() for key in plan.settings}
    assert set(schema()["properties"]["settings"]["properties"]) == written


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"format": "other"},
        {"blocks": None},
        {"blocks": [{}]},
        {"blocks": [{"name": "a", "configuration": "sgd", "parameters": {"w": [-1]}}]},
        {"blocks": [{"name": "a", "configuration": "sgd", "parameters": {"w": [1]}, "lr_scale": 0}]},
        {"settings": {"memory_budget": "1GiB"}},
    ],
)
def test_the_schema_refuses(change: dict[str, Any], content: dict[str, Any]) -> None:
    assert faults(content | change, schema(), schema())

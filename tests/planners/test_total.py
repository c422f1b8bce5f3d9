"""One budget for weights, gradients, activations and state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from baoc import BAOC, EffectPlanner, PlanError, release_gradients
from baoc.planners.total import Tensors, Total, low_bits_bytes

MIB = 2**20


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).to(dtype)


def build(model: nn.Module, **settings: Any) -> BAOC:
    return BAOC(model, lr=1e-3, verbose=False, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradients", ["keep", "release"])
@pytest.mark.parametrize("total", ["21MiB", "26MiB", "64MiB"])
def test_everything_that_training_holds_is_within_the_budget(dtype: torch.dtype, gradients: str, total: str) -> None:
    model = model_of(dtype)
    optimizer = build(model, total_memory=total, gradients=gradients, activations="1MiB")
    weights = sum(param.nbytes for param in model.parameters())
    held = max(param.nbytes for param in model.parameters()) if gradients == "release" else weights
    state = int(optimizer.metrics()["state_bytes"])
    state += optimizer.plan.workspace(one_by_one=True) if gradients == "release" else 0  # else activations make room
    state += max(0, optimizer.plan.workspace_bytes - MIB) if gradients == "keep" else 0
    assert weights + held + state + MIB <= int(total.removesuffix("MiB")) * MIB
    numel = sum(param.numel() for param in model.parameters())
    assert optimizer._run.total is not None
    parts = optimizer._run.total.bytes_per_parameter(optimizer.plan)
    assert sum(parts.values()) * numel == pytest.approx(weights + held + state)
    assert f"{sum(parts.values()):.2f}" in optimizer.total


def with_norms() -> nn.Module:
    """Its matrices would have Muon, if there is room."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(8) for layer in (nn.LayerNorm(512), nn.Linear(512, 512))]
    return nn.Sequential(nn.Embedding(1000, 512), *hidden)


@pytest.mark.parametrize(
    ("settings", "workspace"),
    [
        ({"total_memory": "64MiB"}, 28.0),
        ({"total_memory": "64MiB", "activations": "20MiB"}, 8.0),
        ({"total_memory": "64MiB", "activations": "30MiB"}, 0.0),
        ({"total_memory": "24MiB", "gradients": "release"}, 4.0),  # one matrix at a time, beside activations
        ({"total_memory": "64MiB", "activations": "20MiB", "gradients": "release"}, 4.0),
    ],
)
def test_the_workspace_of_updates_is_in_the_budget(settings: dict[str, Any], workspace: float) -> None:
    optimizer = build(with_norms(), planner=EffectPlanner(tokens=65536), **settings)
    total = optimizer._run.total
    assert total is not None and "muon" in str(optimizer.plan)
    assert total.workspace(optimizer.plan) == workspace * MIB
    assert optimizer.plan.state_bytes + workspace * MIB <= total.room
    assert ("\nupdate workspace " in optimizer.total) is (workspace > 0)


def test_without_room_for_workspace_plans_have_other_rules() -> None:
    """State alone would fit, and so it does without activations that are free by then."""
    tight = build(with_norms(), planner=EffectPlanner(tokens=65536), total_memory="32MiB")
    assert "muon" not in str(tight.plan) and tight.plan.workspace_bytes == 0
    assert "update workspace" not in tight.total
    only = EffectPlanner(tokens=65536, candidates=["muon-8", "adamw-8"], forbid={"*": "adamw*"})
    with pytest.raises(PlanError, match=r"11.9 MiB are left for state.* 2.1 MiB and 32.0 MiB of workspace"):
        build(nn.Sequential(*with_norms()[1:]), planner=only, total_memory="28MiB")


def test_a_plan_of_the_user_may_exceed_the_budget() -> None:
    optimizer = build(with_norms(), planner=EffectPlanner(tokens=65536), total_memory="32MiB")
    optimizer.replan(memory="12MiB")
    assert "muon" in str(optimizer.plan)


def test_more_room_is_used() -> None:
    kept, released = (build(model_of(), total_memory="20MiB", gradients=each) for each in ("keep", "release"))
    assert kept.plan.state_bytes < released.plan.state_bytes
    assert (kept.plan.settings["expected_loss"] or 0) >= (released.plan.settings["expected_loss"] or 0)


def test_advice_frees_what_it_says() -> None:
    wide = model_of()
    optimizer = build(wide, total_memory="64MiB")
    cast, release = optimizer.plan.advice
    assert "baoc.to_low_precision(model, torch.bfloat16)" in cast and "frees 6.0 MiB" in cast
    assert "baoc.release_gradients(optimizer)" in release and "frees 7.0 MiB" in release
    rooms = {
        (dtype, gradients): build(model_of(dtype), total_memory="64MiB", gradients=gradients)._run.total.room  # type: ignore[union-attr]
        for dtype in (torch.float32, torch.bfloat16)
        for gradients in ("keep", "release")
    }
    kept = rooms[torch.float32, "keep"]
    assert (rooms[torch.float32, "release"] - kept) / MIB == pytest.approx(7.0, abs=0.05)
    low_bits = sum(param.numel() for param in wide.parameters())  # one byte each
    assert (rooms[torch.bfloat16, "keep"] - low_bits - kept) / MIB == pytest.approx(6.0, abs=0.05)
    assert not build(model_of(torch.bfloat16), total_memory="64MiB", gradients="release").plan.advice
    assert not build(model_of(), memory=0.5).plan.advice


def test_low_bits_count_as_such() -> None:
    from baoc import Plan

    shapes = {"a": (64, 256), "b": (128, 256)}
    assert low_bits_bytes(Plan.uniform("adamw[m=int8,v=int8,w=8]", shapes)) == 192 * 256
    assert low_bits_bytes(Plan.uniform("adamw[m=int8,v=int8]", shapes)) == 0
    tensors = Tensors.of(shapes, dict.fromkeys(shapes, torch.bfloat16), {})
    parts = Total("1MiB", tensors).bytes_per_parameter(Plan.uniform("adamw[m=int8,v=factored,w=8]", shapes))
    assert parts["weights"] == parts["gradients"] == 2.0 and parts["low bits"] == 1.0


def test_frozen_weights_count() -> None:
    model = model_of()
    model[0].requires_grad_(False)
    optimizer = build(model, total_memory="64MiB")
    assert optimizer._run.total is not None
    assert optimizer._run.total.tensors.weights == sum(param.nbytes for param in model.parameters())
    assert optimizer._run.total.tensors.gradients == sum(p.nbytes for p in model.parameters() if p.requires_grad)


def test_a_checkpoint_and_a_copy_keep_the_budget() -> None:
    optimizer = build(model_of(), total_memory="26MiB")
    other = build(model_of(), total_memory="26MiB")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.plan.blocks == optimizer.plan.blocks and other.total == optimizer.total
    assert copy.deepcopy(optimizer).total == optimizer.total
    release_gradients(optimizer)


def test_parameters_that_join_later_count() -> None:
    model, extra = model_of(), nn.Parameter(torch.randn(512, 512))
    optimizer = build(model, total_memory="20MiB")
    optimizer.add_param_group({"params": [("extra", extra)]})
    weights = sum(param.nbytes for param in (*model.parameters(), extra))
    assert 2 * weights + optimizer.plan.state_bytes <= 20 * MIB
    assert optimizer._run.total is not None and optimizer._run.total.tensors.weights == weights
    said = optimizer.total
    with pytest.raises(PlanError, match="no room for the parameters of another group"):
        optimizer.add_param_group({"params": [("large", nn.Parameter(torch.randn(2048, 2048)))]})
    assert optimizer.total == said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"total_memory": "7MiB"}, r"8.0 MiB of weights, 8.0 MiB of gradients: 9.0 MiB too much.*release_gradients"),
        ({"total_memory": "17MiB", "activations": "2MiB"}, "2.0 MiB of activations: 1.0 MiB too much"),
        ({"total_memory": "64MiB", "memory": 0.5}, "are both given"),
        ({"total_memory": 0.5}, "must be a size"),
        ({"total_memory": "50%"}, "must be a size"),
        ({"total_memory": -1}, "must be a size.*got -1"),
        ({"total_memory": 10**5000}, "must be a size.*got an integer of more than 30 digits"),
        ({"total_memory": "64MiB", "activations": 5}, "activations must be a size"),
        ({"total_memory": "64MiB", "gradients": "drop"}, "'keep' or 'release'"),
        ({"total_memory": "64MiB", "activations": "some"}, "activations must be a size"),
        ({"activations": "1GiB"}, "are for total_memory="),
    ],
)
def test_what_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        build(model_of(), **settings)

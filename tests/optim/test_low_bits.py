"""Models in 16 bits whose low bits are in the optimizer: casts, exports, checkpoints, defaults and refusals."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import baoc
from baoc import BAOC, BlockOptimizer, CheckpointError, EffectPlanner, PaperPlanner, Plan, parse
from baoc.optim.low_bits import lost_share
from tests.cases import WEIGHTS

BF16, FP16 = torch.bfloat16, torch.float16
EXACT = "adamw[m=int8,v=int8,w=16]"


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(96, 128), nn.BatchNorm1d(128), nn.Linear(128, 96))


def train(model: nn.Module, optimizer: BlockOptimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator).bfloat16().to(param.dtype)
        optimizer.step()


def build(model: nn.Module, plan: Any = EXACT) -> BlockOptimizer:
    return BlockOptimizer(model, lr=1e-4, weight_decay=0.1, plan=plan)


def assert_weights(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=0.0, msg=name)


# ---- a model ----


@pytest.mark.parametrize(("weight", "error"), [("16", 0.0), ("8", 2.0**-15), ("sr", 2.0**-8), ("none", 2.0**-8)])
def test_the_optimizer_takes_over_what_a_cast_removes(weight, error):
    model = net()
    exact = copy.deepcopy(model.state_dict())
    assert baoc.to_low_precision(model, BF16) is model
    optimizer = build(model, parse("adamw-8").with_weight(weight))
    assert {param.dtype for layer in (model[0], model[2]) for param in layer.parameters()} == {BF16}
    assert {each.dtype for each in (*model[1].parameters(), model[1].running_var)} == {torch.float32}
    assert_weights(baoc.fp32_state_dict(model, optimizer), exact, error)
    assert not any(hasattr(param, "_baoc_low_bits") for param in model.parameters())  # held once


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_training_is_that_of_fp32_parameters(dtype):
    wide, narrow = net(), baoc.to_low_precision(net(), dtype)
    theirs, ours = build(wide, "adamw-8"), build(narrow)
    for model, optimizer in ((wide, theirs), (narrow, ours)):
        train(model, optimizer, range(5))
    if dtype == BF16:
        assert_weights(baoc.fp32_state_dict(narrow, ours), wide.state_dict())
    else:  # tiny weights are multiples of 2^-40
        for name, tensor in wide.state_dict().items():
            torch.testing.assert_close(baoc.fp32_state_dict(narrow, ours)[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_first_plans_of_baoc_keep_them():
    """BAOC plans at construction, and again when it has counted tokens."""
    model = net()
    exact = copy.deepcopy(model.state_dict())
    optimizer = BAOC(baoc.to_low_precision(model), lr=0.0, weight_decay=0.0, verbose=False)
    model(torch.randn(64, 96).bfloat16()).square().mean().backward()
    optimizer.step()
    optimizer.replan(memory=2.0)
    found = baoc.fp32_state_dict(model, optimizer)
    for name, param in (item for item in model.named_parameters() if item[1].dtype == BF16):
        torch.testing.assert_close(found[name], exact[name], rtol=2.0**-15, atol=0.0)
        assert (found[name] != param.float()).any()


def test_frozen_and_tied_parameters():
    tied, twin, frozen = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
    twin.weight = tied.weight
    model = nn.ModuleList([tied, twin, frozen.requires_grad_(False)])
    exact = tied.weight.detach().clone()
    optimizer = build(baoc.to_low_precision(model))
    assert twin.weight is tied.weight
    found = baoc.fp32_state_dict(model, optimizer)
    assert torch.equal(found["0.weight"], exact) and torch.equal(found["1.weight"], exact)
    assert torch.equal(found["2.weight"], frozen.weight.float())


def test_weights_that_are_loaded_after_a_cast_have_no_low_bits():
    model = baoc.to_low_precision(net())
    other = baoc.to_low_precision(net(1))
    model.load_state_dict(other.state_dict())
    found = baoc.fp32_state_dict(model, build(model))
    for name, param in other.named_parameters():
        assert torch.equal(found[name], param.float())


def test_casts_that_are_refused():
    with pytest.raises(ValueError, match=r"must be torch.bfloat16 or torch.float16, got torch.float64"):
        baoc.to_low_precision(net(), torch.float64)
    model = net()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(ValueError, match=r"'0.weight' has a gradient.*zero_grad"):
        baoc.to_low_precision(model)
    model = net()
    nn.init.constant_(model[2].bias, 1e6)
    with pytest.raises(ValueError, match=r"'2.bias' has a weight of 1e\+06, and fp16 ends at 65504"):
        baoc.to_low_precision(model, FP16)
    assert {param.dtype for param in model.parameters()} == {torch.float32}


# ---- checkpoints ----


def test_fp32_checkpoints_load_into_either_form():
    wide = net()
    theirs = build(wide, "adamw-8")
    train(wide, theirs, range(3))
    checkpoint = copy.deepcopy((wide.state_dict(), theirs.state_dict()))
    again = net(1)
    after_cast, before_cast = baoc.to_low_precision(net(1)), net(1)
    before_cast.load_state_dict(checkpoint[0])
    found = []
    for model, plan in ((again, "adamw-8"), (after_cast, EXACT), (baoc.to_low_precision(before_cast), EXACT)):
        optimizer = build(model, plan)
        if model is not before_cast:
            baoc.load_fp32_state_dict(model, optimizer, checkpoint[0])
        optimizer.load_state_dict(copy.deepcopy(checkpoint[1]))
        train(model, optimizer, range(3, 5))
        found.append(baoc.fp32_state_dict(model, optimizer))
    train(wide, theirs, range(3, 5))
    for weights in found:
        trained = {name for name, _ in wide.named_parameters()}
        assert_weights({n: weights[n] for n in trained}, {n: wide.state_dict()[n] for n in trained})


def test_checkpoints_of_16_bits_load_into_fp32():
    narrow = baoc.to_low_precision(net())
    ours = build(narrow)
    train(narrow, ours, range(3))
    wide = net(1)
    theirs = build(wide, None)
    wide.load_state_dict(baoc.fp32_state_dict(narrow, ours))
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert not any(block.configuration.weight for block in theirs.plan.blocks)
    for model, optimizer in ((narrow, ours), (wide, theirs)):
        train(model, optimizer, range(3, 6))
    assert_weights(baoc.fp32_state_dict(narrow, ours), wide.state_dict())


def test_low_bits_without_their_weights_are_refused():
    model = baoc.to_low_precision(net())
    optimizer = build(model)
    train(model, optimizer, range(3))
    other = baoc.to_low_precision(net(1))
    resumed = build(other)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(RuntimeError, match=r"49\d\d\d B of low bits .*, but \d of 4 parameters.*clear_low_bits"):
        train(other, resumed, range(1))
    assert_weights(other.state_dict(), before)
    other.load_state_dict(model.state_dict())  # in this order, too
    for each, mine in ((model, optimizer), (other, resumed)):
        train(each, mine, range(3, 5))
    assert_weights(baoc.fp32_state_dict(other, resumed), baoc.fp32_state_dict(model, optimizer))


def test_a_checkpoint_saved_before_the_weights_are_loaded_belongs_to_those_weights():
    model = baoc.to_low_precision(net())
    optimizer = build(model)
    train(model, optimizer, range(3))
    between = build(baoc.to_low_precision(net(1)))
    between.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    saved_again = copy.deepcopy(between.state_dict())
    other = baoc.to_low_precision(net(1))
    resumed = build(other)
    resumed.load_state_dict(saved_again)
    with pytest.raises(RuntimeError, match="low bits"):
        train(other, resumed, range(1))
    other.load_state_dict(model.state_dict())
    train(other, resumed, range(3, 5))


def test_weights_without_their_low_bits_are_refused():
    model = baoc.to_low_precision(net())
    optimizer = build(model)
    train(model, optimizer, range(2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    model.load_state_dict(saved[0])
    with pytest.raises(RuntimeError, match=r"all 4 parameters .* written since the last step.*load_fp32_state_dict"):
        train(model, optimizer, range(1))
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, range(2, 4))
    model.load_state_dict(saved[0])
    optimizer.clear_low_bits()
    assert_weights(
        {n: w for n, w in baoc.fp32_state_dict(model, optimizer).items() if "running" not in n and "num" not in n},
        {n: w.float() for n, w in saved[0].items() if "running" not in n and "num" not in n},
    )
    train(model, optimizer, range(1))


def test_weights_that_are_put_back_are_the_same():
    """As around an evaluation of averaged weights; and some weights may be written at any time."""
    model = baoc.to_low_precision(net())
    optimizer = build(model)
    train(model, optimizer, range(2))
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(baoc.to_low_precision(net(1)).state_dict())
    model.load_state_dict(kept)
    train(model, optimizer, range(1))
    with torch.no_grad():
        model[2].weight.clamp_(-0.01, 0.01)
    train(model, optimizer, range(1))


def test_a_checkpoint_that_lost_low_bits_is_refused():
    model = baoc.to_low_precision(net())
    optimizer = build(model)
    train(model, optimizer, range(1))
    content = copy.deepcopy(optimizer.state_dict())
    del content["state"][0]["w"]
    with pytest.raises(CheckpointError, match=r"needs 'w' as torch.int16.*holds nothing"):
        build(model).load_state_dict(content)


# ---- defaults ----


def test_configurations_have_eight_bits_unless_they_say_otherwise():
    assert {b.configuration.weight for b in build(net().bfloat16(), "muon-8 else adamw-8").plan.blocks} == {"8"}
    assert {b.configuration.weight for b in build(net().bfloat16(), None).plan.blocks} == {"8"}
    for weight in WEIGHTS:
        plan = build(net().bfloat16(), parse("muon-8 else adamw-8").with_weight(weight)).plan
        assert {block.configuration.weight for block in plan.blocks} == {weight}
    assert not any(block.configuration.weight for block in build(net(), "adamw-8").plan.blocks)


def test_plans_keep_their_bytes():
    """A plan that says nothing about low bits gets those that take none."""
    model = net().bfloat16()
    plan = Plan.uniform("adamw-8", {name: tuple(param.shape) for name, param in model.named_parameters()})
    optimizer = build(model, plan)
    assert {block.configuration.weight for block in optimizer.plan.blocks} == {"sr"}
    assert optimizer.plan.state_bytes == plan.state_bytes == baoc.state_bytes(optimizer)


def large() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(512, 256), nn.LayerNorm(256), *[nn.Linear(256, 256) for _ in range(6)])


@pytest.mark.parametrize("planner", [EffectPlanner(), PaperPlanner(warmup_base="budget")])
def test_planners_spend_on_low_bits_what_a_budget_allows(planner):
    found = {}
    for memory in (2.0, 0.75, 0.5, 0.25):
        optimizer = BAOC(large().bfloat16(), lr=1e-3, memory=memory, planner=planner, verbose=False)
        plan = optimizer.plan
        (found[memory],) = {block.configuration.weight for block in plan.blocks}
        assert baoc.state_bytes(optimizer) == plan.state_bytes <= memory * plan.reference_bytes
    assert found[2.0] == "8" and found[0.25] == "sr"
    fixed = type(planner)(low_bits="16", **({} if isinstance(planner, EffectPlanner) else {"warmup_base": "budget"}))
    optimizer = BAOC(large().bfloat16(), lr=1e-3, memory=1.0, planner=fixed, verbose=False)
    assert {block.configuration.weight for block in optimizer.plan.blocks} == {"16"}


def test_the_smallest_plan_has_no_low_bits():
    plan = BAOC(large().bfloat16(), memory=0.0, verbose=False).plan
    assert {block.configuration.weight for block in plan.blocks} == {"sr"}


def test_frontiers_agree_with_plans():
    facts = baoc.ModelFacts.of(large().bfloat16())
    problem = EffectPlanner().problem(facts)
    budgets = [problem.reference_bytes * share // 100 for share in (10, 25, 40, 50, 60, 100)]
    for budget, plan in zip(budgets, problem.frontier(budgets)):
        alone = problem.plan(baoc.Budget(f"{budget}B"))
        assert plan.state_bytes <= budget
        assert {b.configuration.weight for b in plan.blocks} == {b.configuration.weight for b in alone.blocks}


def test_predictions_include_the_format_of_weights():
    plans = {
        w: EffectPlanner(low_bits=w).initial_plan(baoc.ModelFacts.of(large().bfloat16()), baoc.Budget())
        for w in WEIGHTS
    }
    losses = [plans[weight].settings["expected_loss"] for weight in WEIGHTS]
    assert losses == sorted(losses) and losses[-1] > losses[0]


# ---- what rounding to nearest loses ----


def test_rounding_to_nearest_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING, logger="baoc"):
        model = net().bfloat16()
        BlockOptimizer(model, lr=1e-5, plan="adamw[m=int8,v=int8,w=none]")
    (line,) = [record.getMessage() for record in caplog.records]
    share = lost_share(model[0].weight.detach(), 1e-5)
    assert "6 parameters have w=none" in line and "at lr=1e-05" in line and "w=sr" in line and share > 0.9
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="baoc"):
        BlockOptimizer(net().bfloat16(), lr=1e-5)
    assert not caplog.records


@pytest.mark.parametrize("lr", [1e-3, 1e-4, 1e-5])
def test_the_share_of_lost_updates_is_what_rounding_loses(lr):
    weights = (0.02 * torch.randn(400, 400)).bfloat16()
    moved = (weights.float() - 0.3 * lr * torch.randn(400, 400)).bfloat16()
    assert lost_share(weights, lr) == pytest.approx((moved == weights).float().mean().item(), abs=0.02)

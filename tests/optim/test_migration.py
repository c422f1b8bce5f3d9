"""Changing configurations in the middle of training keeps training."""

from __future__ import annotations

import copy
import itertools
import logging
import random

import pytest
import torch
from torch import nn

from baoc import CATALOG, Block, BlockOptimizer, Plan, parse, state_bytes
from baoc.core.mechanisms import Adam, Muon, Normalised
from baoc.optim import conversion, migrate
from tests.cases import CONFIGURATIONS, gradients, train, trained
from tests.memory import PeakMemory
from tests.training import REPRESENTATIVE

SHAPE = (70, 96)


def shares_a_slot(pair) -> bool:
    old, new = ({slot.name for slot in configuration.slots} for configuration in pair)
    return bool(old & new)


def is_told_by_itself(pair) -> bool:
    """From updates of a known length to AdamW and back, with and without state."""
    old, new = pair
    normalised = [isinstance(configuration.mechanism, Normalised) for configuration in pair]
    return all(normalised) or (normalised[0] and new.mechanism_name == "adamw") or (old.slots and normalised[1])


LATE = [str(parse(spelling)) for spelling in (*REPRESENTATIVE, "muon-8", "lion-8")]
"""What state that is older is moved to as well."""
PAIRS = [pair for pair in itertools.permutations(CONFIGURATIONS, 2) if shares_a_slot(pair) or is_told_by_itself(pair)]


@pytest.mark.parametrize("lr", [1e-3])
@pytest.mark.parametrize("old", list(dict.fromkeys(pair[0] for pair in PAIRS)), ids=str)
def test_the_first_update_after_a_migration_is_as_long_as_the_last_before(old, lr):
    """For every configuration that shares a slot with the old one, or whose updates have a length of their own."""
    for new in (pair[1] for pair in PAIRS if pair[0] == old):
        for age in (3, 60) if str(new) in LATE else (3,):
            optimizer, param = trained(old, SHAPE, steps=age, lr=lr, weight_decay=0.0)
            *_, last, following = gradients(SHAPE, age + 2)
            before = _update_rms(optimizer, param, last)
            optimizer.set_plan(new)
            after = _update_rms(optimizer, param, following)
            # four bits make updates of AdamW longer by noise, where elements of a group differ by orders of magnitude
            most = 2.6 if old.mechanism_name == "adamw" and old.codec("m").name == "int4" else 2
            assert before / most <= after <= before * most, f"{old} -> {new} at age {age}: {before:.3g} -> {after:.3g}"


def _update_rms(optimizer, param, grad) -> float:
    previous = param.detach().clone()
    param.grad = grad
    optimizer.step()
    return (param - previous).square().mean().sqrt().item()


@pytest.mark.parametrize("old", CONFIGURATIONS, ids=str)
def test_state_takes_the_new_layout_and_ages_stay_with_their_slots(old):
    for new in CONFIGURATIONS:
        optimizer, param = trained(old, SHAPE, steps=5)
        optimizer.set_plan(new)
        train(optimizer, param, gradients(SHAPE, 2))
        assert state_bytes(optimizer) == new.state_bytes(SHAPE)
        state = optimizer.state[param]
        for slot in new.slots:
            inherited = slot.name in {s.name for s in old.slots}
            averages = isinstance(new.mechanism, (Adam, Muon))
            known = {s.name for s in old.slots}
            inferred = averages and ((slot.name in "vs" and "m" in known) or (slot.name == "s" and "v" in known))
            late = slot.name == "m" and averages and isinstance(old.mechanism, Normalised)
            late_age = 145 if isinstance(new.mechanism, Muon) else 4
            assert int(state[f"{slot.name}.age"]) == (7 if inherited or inferred else late_age if late else 2)


def test_a_migration_there_and_back_through_a_wider_format_loses_nothing():
    optimizer, param = trained("adamw-8", SHAPE, steps=5)
    before = {key: value.clone() for key, value in optimizer.state[param].items() if torch.is_tensor(value)}
    optimizer.set_plan("adamw-32")
    optimizer.set_plan("adamw-8")
    assert all(torch.equal(optimizer.state[param][key], value) for key, value in before.items())


def test_a_checkpoint_right_after_a_late_start_resumes_bitwise():
    """Its slots have different ages, and none has seen a gradient."""
    optimizer, param = trained("colnorm", SHAPE, steps=3)
    optimizer.set_plan("adamw[m=int8,v=factored]")
    copied = nn.Parameter(param.detach().clone())
    resumed = BlockOptimizer([copied], plan="adamw[m=int8,v=factored]")
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for grad in gradients(SHAPE, 2):
        param.grad, copied.grad = grad.clone(), grad.clone()
        optimizer.step()
        resumed.step()
        assert torch.equal(param, copied)


def test_restarting_drops_state():
    optimizer, param = trained("adamw-32", SHAPE, steps=5)
    optimizer.set_plan("adamw-16", inherit=False)
    assert state_bytes(optimizer) == optimizer.plan.state_bytes and not any(optimizer.state[param]["m"].flatten())
    train(optimizer, param, gradients(SHAPE, 1))
    assert optimizer.state[param]["v.age"] == 1


def test_an_explicit_lr_scale_is_kept_and_scales_the_step_but_not_the_decay():
    shape = (8, 8)
    plan = Plan((Block("b", parse("sgd"), {"0.0": shape}, lr_scale=0.5),))
    param = nn.Parameter(torch.ones(shape))
    optimizer = BlockOptimizer([param], lr=0.1, weight_decay=0.0, plan=plan)
    param.grad = torch.ones(shape)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full(shape, 0.95))
    optimizer.set_plan(Plan((Block("b", parse("sgdw"), {"0.0": shape}, lr_scale=0.5),)))
    optimizer.param_groups[0]["weight_decay"] = 1.0
    param.grad = torch.zeros(shape)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full(shape, 0.95 * 0.9))
    assert optimizer.plan.blocks[0].lr_scale == 0.5


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("adamw-32", "adamw-8"),
        ("adamw-8", "adamw-32"),
        ("adamw-32", "sgdm-32"),
        ("adamw-16", "adamw[m=int8,v=factored]"),
        ("adamw[m=bf16,v=fp32]", "adamw[m=fp32,v=bf16]"),
    ],
)
def test_a_migration_holds_at_most_one_extra_tensor(old, new):
    params = [nn.Parameter(torch.randn(512, 1024)) for _ in range(4)]
    optimizer = BlockOptimizer(params, plan=old)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    before = state_bytes(optimizer)
    held = [tensor for state in optimizer.state.values() for tensor in state.values() if torch.is_tensor(tensor)]
    with PeakMemory(held) as memory:
        del held, param
        optimizer.set_plan(new)
    one_tensor = params[0].numel() * 4
    tiles = 8 * (1 << 16) * 4
    assert memory.peak <= max(before, state_bytes(optimizer)) + one_tensor + tiles


@pytest.mark.parametrize(("old", "new"), [("adamw-16", "adamw-8"), ("adamw[m=fp32,v=int8]", "adamw[m=int8,v=fp32]")])
def test_where_the_rule_stays_one_slot_is_there_twice(old, new):
    """One parameter that is the whole model: both slots side by side would be half as much again."""
    param = nn.Parameter(torch.randn(2048, 2048))
    optimizer = BlockOptimizer([param], plan=old)
    param.grad = torch.randn_like(param)
    optimizer.step()
    before = state_bytes(optimizer)
    held = [tensor for tensor in optimizer.state[param].values() if torch.is_tensor(tensor)]
    with PeakMemory(held) as memory:
        del held
        optimizer.set_plan(new)
    formats = parse(new).layout((2048, 2048)).formats
    smallest = min(each.nbytes for each in formats)
    assert memory.peak <= before + smallest + 12 * (1 << 16) * 4


NEVER = -(1 << 60)
"""For ``SIDE_BY_SIDE``: all state is put aside before it is converted."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C."""


@pytest.mark.parametrize(("old", "new"), [("adamw-32", "adamw-8"), ("adamw-8", "sgdm-32"), ("sgdm-8", "adamw-32")])
@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("aside", [False, True], ids=["side by side", "aside"])
def test_an_interrupted_change_of_plans_leaves_a_working_optimizer(old, new, calls, aside, monkeypatch):
    """Each slot is in its old format or in its new one; training goes on, and checkpoints resume to the bit."""
    if aside:
        monkeypatch.setattr(migrate, "SIDE_BY_SIDE", NEVER)
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(70, 96)) for _ in range(4)]
    optimizer = BlockOptimizer(params, plan=old, weight_decay=0.0)

    def step(some, optimizer) -> None:
        for param, grad in zip(some, gradients((70, 96), len(some))):
            param.grad = grad
        optimizer.step()

    step(params, optimizer)
    encode, left = conversion._fill, iter(range(calls))

    def interrupted(*arguments):
        if next(left, None) is None:
            raise Interrupted
        encode(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(conversion, "_fill", interrupted)
        with pytest.raises(Interrupted):
            optimizer.set_plan(new)
    for configuration in {block.configuration for block in optimizer.plan.blocks}:
        ends = [end for end in (parse(old), parse(new)) if end.mechanism_name == configuration.mechanism_name]
        assert all(any(slot in end.codec_names for end in ends) for slot in configuration.codec_names)
    assert state_bytes(optimizer) == optimizer.plan.state_bytes
    twins = copy.deepcopy(params)
    resumed = BlockOptimizer(twins)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, its in ((params, optimizer), (twins, resumed)):
        step(each, its)
    assert all(torch.equal(one, other) for one, other in zip(params, twins))
    optimizer.set_plan(new)
    step(params, optimizer)
    assert {str(block.configuration) for block in optimizer.plan.blocks} == {str(parse(new))}


def measured(old: Plan, new: Plan, *, inherit: bool = True) -> int:
    """Return the most bytes of tensors during a migration beyond those of the larger plan."""
    shapes = {name: shape for block in old.blocks for name, shape in block.parameters.items()}
    params = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    optimizer = BlockOptimizer(params.items(), plan=old)
    for param in params.values():
        param.grad = torch.randn_like(param)
    optimizer.step()
    held = [tensor for state in optimizer.state.values() for tensor in state.values() if torch.is_tensor(tensor)]
    with PeakMemory(held) as memory:
        del held
        optimizer.set_plan(new, inherit=inherit)
    assert state_bytes(optimizer) == new.state_bytes
    return memory.peak - max(old.state_bytes, new.state_bytes)


@pytest.mark.parametrize("seed", range(16))
def test_a_migration_between_any_plans_holds_no_more_than_the_larger_one(seed, monkeypatch):
    """Random pairs of the paper's configurations; one parameter is most of the model."""
    monkeypatch.setattr(migrate, "SIDE_BY_SIDE", 1 << 16, raising=False)
    draw = random.Random(seed)
    shapes = {"wte": (2048, 2048), "a": (512, 512), "b": (512, 1024), "norm": (512,)}
    old, new = (
        Plan(tuple(Block(name, draw.choice(CATALOG), {name: shape}) for name, shape in shapes.items()))
        for _ in range(2)
    )
    tiles = 12 * (1 << 16) * 4
    assert measured(old, new, inherit=seed % 4 > 0) <= (1 << 16) + tiles


@pytest.mark.parametrize(
    ("old", "new"),
    [("adamw-16", "adamw-32"), ("adamw-32", "adamw-16"), ("adamw-8", "adamw-32"), ("sgdm-32", "adamw-16")],
)
def test_a_migration_of_one_large_parameter_puts_old_slots_aside(old, new, monkeypatch):
    """The loop over slots kept the old tensors of the last slot alive while it allocated the new ones."""
    monkeypatch.setattr(migrate, "SIDE_BY_SIDE", 1 << 16)
    plans = (Plan((Block("all", parse(each), {"a": (2048, 2048)}),)) for each in (old, new))
    assert measured(*plans) <= (1 << 16) + 12 * (1 << 16) * 4


@pytest.mark.parametrize("old", [str(parse(each)) for each in (*REPRESENTATIVE, "muon-8")])
def test_state_that_was_put_aside_is_converted_to_the_same_bits(old, monkeypatch):
    for new in CONFIGURATIONS:
        states = []
        for side_by_side in (migrate.SIDE_BY_SIDE, NEVER):
            with monkeypatch.context() as patched:
                patched.setattr(migrate, "SIDE_BY_SIDE", side_by_side)
                optimizer, param = trained(old, SHAPE, steps=3)
                optimizer.set_plan(new)
                states.append(optimizer.state[param])
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(torch.as_tensor(states[0][key]), torch.as_tensor(states[1][key])) for key in states[0])


def test_without_a_temporary_file_state_is_converted_side_by_side(monkeypatch, caplog):
    def refuse() -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    monkeypatch.setattr(migrate, "SIDE_BY_SIDE", 0)
    optimizer, param = trained("sgdm-32", SHAPE, steps=3)
    with caplog.at_level(logging.WARNING, logger="baoc"):
        optimizer.set_plan("sgdm-16")
    assert "Migrating '0.0' needs 0.0 MiB more than the larger plan" in caplog.text and "TMPDIR" in caplog.text
    assert optimizer.state[param]["m"].dtype is torch.bfloat16

"""The self-configuring optimizer: an unchanged training loop, within its budget at every step."""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from baoc import BAOC, PlanError, parse, state_bytes
from baoc.optim.checkpoint import SAMPLES
from tests.memory import PeakMemory

WARMUP = 6
UNTIMED = 100.0  # a time budget that no plan reaches
by_space = pytest.mark.parametrize("space", ["measured", "paper"])


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96)) for _ in range(3)]
    return nn.Sequential(nn.Embedding(200, 96), *layers, nn.Linear(96, 200))


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, check=lambda: None) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(200, (32,), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens), (tokens * 7) % 200)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        check()
        losses.append(loss.item())
    return losses


def baoc(model, **settings) -> BAOC:
    return BAOC(model, lr=3e-3, **({"warmup": WARMUP, "time": UNTIMED, "memory": 0.5} | settings))


@pytest.mark.parametrize("memory", [1.0, 0.5, 0.3])
@pytest.mark.parametrize("replan_every", [None, 4])
@by_space
def test_the_budget_holds_at_every_step(memory, replan_every, space):
    """Measured on real storages, the sampler's too."""
    model = make_model()
    optimizer = baoc(model, memory=memory, replan_every=replan_every, space=space)
    budget = memory * optimizer.plan.reference_bytes
    losses = run(model, optimizer, range(24), check=lambda: _assert(state_bytes(optimizer) <= budget))
    assert optimizer.plan.settings["warmup_steps"] >= WARMUP
    assert losses[-1] < losses[0]


def samples_of(optimizer: BAOC) -> tuple[int, int]:
    """Steps that were sampled, and that were skipped, as a checkpoint has them."""
    saved = optimizer.state_dict()
    assert any(SAMPLES in entry for entry in saved["state"].values())
    samples = json.loads(saved["param_groups"][0]["planner"])["samples"]
    return samples["steps"], samples["skipped"]


def _assert(condition: bool) -> None:
    assert condition


@by_space
def test_the_change_of_plans_holds_little_more_than_the_budget(space):
    model = make_model()
    optimizer = baoc(model, memory=0.5, space=space)
    run(model, optimizer, range(WARMUP - 1))
    held = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    with PeakMemory(held) as memory:
        del held
        optimizer.replan(memory=0.4)
    largest = max(param.numel() for param in model.parameters()) * 4
    samples = 2_000_000  # the metrics' own arrays, which do not grow with the model
    assert memory.peak <= 0.5 * optimizer.plan.reference_bytes + largest + samples


def test_the_plan_says_what_and_why():
    model = make_model()
    optimizer = baoc(model, space="paper")
    assert "no gradients seen yet" in optimizer.plan.table(wide=True)
    run(model, optimizer, range(WARMUP))
    text = optimizer.plan.table(wide=True)
    for word in ("block", "tensors", "configuration", "state", "lr", "risk", "why", "aggressive"):
        assert word in text
    assert optimizer.profile is not None and optimizer.profile.steps == WARMUP


@pytest.mark.parametrize("kind", ["module", "parameters", "named", "groups"])
def test_it_takes_what_people_pass_and_keeps_their_groups(kind):
    model = make_model()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    params = {
        "module": model,
        "parameters": model.parameters(),
        "named": model.named_parameters(),
        "groups": [{"params": decayed, "lr": 1e-3}, {"params": plain, "weight_decay": 0.0}],
    }[kind]
    optimizer = baoc(params)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    for step in range(10):
        run(model, optimizer, range(step, step + 1))
        schedule.step()
    lrs = [group["lr"] for group in optimizer.param_groups]
    assert lrs == ([2.5e-4, 7.5e-4] if kind == "groups" else [7.5e-4])
    assert optimizer.param_groups[-1]["weight_decay"] == (0.0 if kind == "groups" else 1e-2)
    names = [name for block in optimizer.plan.blocks for name in block.parameters]
    assert len(names) == len(set(names)) == len(list(model.parameters()))


@by_space
def test_same_seed_same_plan(space):
    plans = []
    for _ in range(2):
        model = make_model()
        optimizer = baoc(model, seed=3, space=space)
        run(model, optimizer, range(WARMUP))
        plans.append(optimizer.plan)
    assert plans[0] == plans[1]


@pytest.mark.parametrize("steps_before", [0, 3, WARMUP, WARMUP + 3])
@pytest.mark.parametrize("way", ["state_dict", "pickle", "deepcopy"])
@by_space
def test_a_resumed_run_is_the_same_run(steps_before, way, space):
    """In the warm-up and after it; the plan and the samples travel with the checkpoint."""
    model = make_model()
    optimizer = baoc(model, space=space)
    run(model, optimizer, range(steps_before))
    if way == "state_dict":
        twin = copy.deepcopy(model)
        other = baoc(twin, space=space)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True))
    elif way == "pickle":
        twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    else:
        twin, other = copy.deepcopy((model, optimizer))
    rest = range(steps_before, steps_before + WARMUP + 3)
    assert run(model, optimizer, rest) == run(twin, other, rest)
    assert other.plan == optimizer.plan


@pytest.mark.parametrize("steps_before", [0, 3, WARMUP + 3])
@by_space
def test_distributed_checkpoints_carry_the_warmup_too(steps_before, space):
    model = make_model()
    optimizer = baoc(model, space=space)
    run(model, optimizer, range(steps_before))
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    twin = copy.deepcopy(model)
    other = baoc(twin, space=space)
    set_optimizer_state_dict(twin, other, saved)
    rest = range(steps_before, steps_before + WARMUP + 3)
    assert run(model, optimizer, rest) == run(twin, other, rest)
    assert other.plan == optimizer.plan


def test_a_rehearsal_is_not_a_step_of_the_warmup():
    model = make_model()
    optimizer = baoc(model)
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.state and samples_of(optimizer) == (0, 0)


def test_non_finite_gradients_are_skipped_and_counted(caplog):
    model = make_model()
    optimizer = baoc(model)
    for param in model.parameters():
        param.grad = torch.full_like(param, float("nan"))
    with caplog.at_level(logging.WARNING, logger="baoc"):
        optimizer.step()
    assert samples_of(optimizer) == (0, 1)
    assert "non-finite" in caplog.text


def test_a_step_that_the_grad_scaler_skips_is_not_sampled():
    model = make_model()
    optimizer = baoc(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, poison in enumerate((1.0, float("inf"), 1.0)):
        tokens = torch.randint(200, (32,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens), (tokens * 7) % 200)
        scaler.scale(loss * poison).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert samples_of(optimizer) == (2, 0)


def test_replanning_by_hand():
    model = make_model()
    optimizer = baoc(model, memory=0.8, space="paper", risk="update")
    run(model, optimizer, range(WARMUP))
    ages = {id(p): dict(optimizer.state[p]) for p in model.parameters() if optimizer.state.get(p)}
    optimizer.replan(memory=0.4, forbid="adafactor*")
    assert state_bytes(optimizer) <= 0.4 * optimizer.plan.reference_bytes
    assert not [b for b in optimizer.plan.blocks if b.configuration.mechanism_name == "adafactor"]
    kept = [p for p in model.parameters() if "v.age" in optimizer.state.get(p, {}) and "v.age" in ages.get(id(p), {})]
    assert kept and all(int(optimizer.state[p]["v.age"]) == WARMUP for p in kept)
    run(model, optimizer, range(WARMUP, WARMUP + 3))
    optimizer.replan(memory=0.5, inherit=False)
    assert not any(optimizer.state.get(p) for p in model.parameters())


def test_the_warmup_may_end_early():
    model = make_model()
    optimizer = baoc(model, warmup=200, settle=10.0, memory=2.0)
    run(model, optimizer, range(20))
    assert optimizer.profile is not None and optimizer.profile.steps == 20
    patient = baoc(make_model(), warmup=200, settle=1e-9)
    run(make_model(), patient, range(1))
    assert not patient.has_profile


def test_the_papers_warmup_can_be_had():
    model = make_model()
    optimizer = baoc(model, warmup_base="adamw-16")
    assert {block.configuration for block in optimizer.plan.blocks} == {parse("adamw-16")}
    run(model, optimizer, range(WARMUP))
    assert optimizer.plan.state_bytes <= 0.5 * optimizer.plan.reference_bytes


def test_parameters_that_join_later_keep_their_configuration():
    model, late = make_model(), nn.Parameter(torch.ones(80, 80))
    optimizer = baoc(list(model.parameters()))
    optimizer.add_param_group({"params": [late], "configuration": "adamw-8"})
    late.grad = torch.ones_like(late)
    run(model, optimizer, range(WARMUP + 1))
    assert optimizer.plan.blocks[-1].configuration == parse("adamw-8")
    assert state_bytes(optimizer) <= 0.5 * optimizer.plan.reference_bytes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": 1}, r"smallest that does needs .*An int is read as bytes: write 1\.0"),
        ({"memory": "a lot"}, "cannot read the budget"),
        ({"granularity": "fine"}, "unknown granularity"),
        ({"risk": "none"}, "unknown risk model"),
        ({"forbid": "adagrad"}, "names no candidate"),
        ({"warmup": 0}, "at least one gradient"),
        ({"replan_every": 0}, "at least 1"),
        ({"sample_ratio": 2.0}, "sampling ratio"),
        ({"lr_match": "max"}, "unknown lr_match"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises((PlanError, ValueError), match=message):
        baoc(make_model(), **settings)


def test_without_a_profile_there_is_nothing_to_replan_from():
    optimizer = baoc(make_model(), space="paper")
    with pytest.raises(RuntimeError, match="no profile to plan from"):
        optimizer.replan(memory=0.4)


def test_measured_effects_need_no_profile():
    optimizer = baoc(make_model())
    assert optimizer.replan(memory=0.3).state_bytes <= 0.3 * optimizer.plan.reference_bytes

"""BAOC: an unchanged training loop with a plan from the first step on, for every planner."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import io
import json
import logging
import math
import pickle
import weakref
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import baoc
from baoc import BAOC, EffectPlanner, PaperPlanner, PlanError, StatisticsError, parse, state_bytes
from baoc.optim.checkpoint import SAMPLES
from tests.memory import PeakMemory

WARMUP = 6
UNTIMED = math.inf
PLANNERS: dict[str, Any] = {
    "effects": EffectPlanner(time=UNTIMED),
    "paper": PaperPlanner(warmup=WARMUP, time=UNTIMED),
    "paper within the budget": PaperPlanner(warmup=WARMUP, time=UNTIMED, warmup_base="budget"),
}
by_planner = pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
PAPER = PLANNERS["paper"]


def with_settings(planner: Any, **settings: Any) -> Any:
    return dataclasses.replace(planner, **settings)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96)) for _ in range(3)]
    return nn.Sequential(nn.Embedding(200, 96), *layers, nn.Linear(96, 200))


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, check=lambda: None) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.randint(200, (32,), generator=torch.Generator("cpu").manual_seed(step), device="cpu")
        loss = nn.functional.cross_entropy(model(tokens).float(), (tokens * 7) % 200)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        check()
        losses.append(loss.item())
    return losses


def make(params: Any, planner: Any = PLANNERS["effects"], **settings: Any) -> BAOC:
    return BAOC(params, **({"lr": 3e-3, "memory": 0.5, "planner": planner, "verbose": False} | settings))


def through_file(state_dict: Any) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def held(optimizer: BAOC) -> float:
    """Bytes of state, and in the warm-up of the planner's samples too."""
    assert optimizer.plan.state_bytes == state_bytes(optimizer)
    samples = optimizer.metrics().get("planner_bytes", 0.0) if optimizer.is_warming_up else 0.0
    return optimizer.plan.state_bytes + samples


def samples_of(optimizer: BAOC) -> tuple[int, int]:
    """Steps that were sampled, and that were skipped, as a checkpoint has them."""
    saved = optimizer.state_dict()
    assert any(SAMPLES in entry for entry in saved["state"].values())
    sampler = json.loads(saved["param_groups"][0]["planner"])["session"]["sampler"]
    return sampler["steps"], sampler["skipped"]


def _assert(condition: bool) -> None:
    assert condition


# ---- plans and budgets ----


@pytest.mark.parametrize("memory", [1.0, 0.5, 0.3])
@pytest.mark.parametrize("replan_every", [None, 4])
@by_planner
def test_the_budget_holds_at_every_step(memory, replan_every, planner):
    """Measured on real storages, with samples; the paper's own warm-up is exempt."""
    model = make_model()
    optimizer = make(model, with_settings(planner, replan_every=replan_every), memory=memory)
    budget = memory * optimizer.plan.reference_bytes

    def check() -> None:
        assert held(optimizer) <= budget or (planner is PAPER and optimizer.is_warming_up)

    check()
    losses = run(model, optimizer, range(2 * WARMUP), check)
    assert not optimizer.is_warming_up
    assert losses[-1] < losses[0]


def test_the_plan_is_there_before_the_first_step_and_stays():
    model = make_model()
    optimizer = make(model)
    plan, before = optimizer.plan, {id(t) for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)}
    assert state_bytes(optimizer) == plan.state_bytes > 0 and "expected_loss" in plan.settings
    run(model, optimizer, range(3))
    assert {n: b.configuration for n, b in optimizer.plan.by_parameter} == {
        n: b.configuration for n, b in plan.by_parameter
    }
    assert before == {id(t) for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)}


@pytest.mark.parametrize("use_closure", [False, True])
def test_tokens_change_the_plan_once_before_state_has_content(use_closure, monkeypatch):
    """Few tokens make matrix rules too slow for the time budget."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = make(model, EffectPlanner(time=1.3, regime="scratch"), memory=0.3)
    changes = []
    change_plan = BAOC._change_plan

    def spy(self, plan, **settings):
        changes.append(all(not int(v) for s in self.state.values() for k, v in s.items() if k.endswith(".age")))
        change_plan(self, plan, **settings)

    monkeypatch.setattr(BAOC, "_change_plan", spy)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(3, 256)).square().mean()
        loss.backward()
        return loss

    expected = make(model, EffectPlanner(time=1.3, tokens=3, regime="scratch"), memory=0.3).plan
    changes.clear()
    for _ in range(3):
        if use_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    assert changes == [True]
    assert optimizer.plan.settings["tokens"] == 3 and optimizer.plan.blocks == expected.blocks


def test_a_plan_that_was_set_by_hand_is_not_replaced_by_tokens():
    model = make_model()
    optimizer = make(model)
    optimizer.set_plan("adamw-8")
    run(model, optimizer, range(2))
    assert {block.configuration for block in optimizer.plan.blocks} == {parse("adamw-8")}


@pytest.mark.parametrize("planner", [PAPER, PLANNERS["effects"]], ids=["paper", "effects"])
def test_the_change_of_plans_holds_little_more_than_the_budget(planner):
    model = make_model()
    optimizer = make(model, planner, memory=0.5)
    run(model, optimizer, range(WARMUP + 1))
    tensors = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    with PeakMemory(tensors) as memory:
        del tensors
        optimizer.replan(memory=0.4)
    largest = max(param.numel() for param in model.parameters()) * 4
    samples = 2_000_000  # the metrics' own arrays, which do not grow with the model
    assert memory.peak <= 0.5 * optimizer.plan.reference_bytes + largest + samples


@by_planner
def test_a_model_is_freed_with_its_optimizer(planner):
    """Nothing outlives them: a sweep that builds many optimizers must not hold every model it has seen."""
    model = make_model()
    optimizer = make(model, planner)
    run(model, optimizer, range(WARMUP + 1))
    params = [weakref.ref(param) for param in model.parameters()]
    del model, optimizer
    gc.collect()
    assert not any(param() is not None for param in params)


def test_the_plan_says_what_and_why():
    model = make_model()
    optimizer = make(model, PLANNERS["paper within the budget"])
    assert "no gradients seen yet" in optimizer.plan.table(wide=True)
    run(model, optimizer, range(WARMUP))
    text = optimizer.plan.table(wide=True)
    for word in ("block", "tensors", "configuration", "state", "lr", "risk", "least risk"):
        assert word in text
    assert optimizer.statistics.steps == WARMUP


@pytest.mark.parametrize("kind", ["module", "parameters", "named", "groups"])
@by_planner
def test_it_takes_what_people_pass_and_keeps_their_groups(kind, planner):
    model = make_model()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    params = {
        "module": model,
        "parameters": model.parameters(),
        "named": model.named_parameters(),
        "groups": [{"params": decayed, "lr": 1e-3}, {"params": plain, "weight_decay": 0.0}],
    }[kind]
    optimizer = make(params, planner)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    for step in range(10):
        run(model, optimizer, range(step, step + 1))
        schedule.step()
    lrs = [group["lr"] for group in optimizer.param_groups]
    assert lrs == ([2.5e-4, 7.5e-4] if kind == "groups" else [7.5e-4])
    assert optimizer.param_groups[-1]["weight_decay"] == (0.0 if kind == "groups" else 1e-2)
    names = [name for block in optimizer.plan.blocks for name in block.parameters]
    assert len(names) == len(set(names)) == len(list(model.parameters()))


@by_planner
def test_plans_do_not_depend_on_the_random_numbers_of_the_process(planner):
    plans = []
    for seed in (1, 2):
        model = make_model()
        torch.manual_seed(seed)
        optimizer = make(model, planner)
        run(model, optimizer, range(WARMUP))
        plans.append(optimizer.plan)
    assert plans[0] == plans[1]


def test_another_seed_samples_other_coordinates():
    found = []
    for seed in (0, 1):
        model = make_model()
        optimizer = make(model, with_settings(PAPER, seed=seed))
        run(model, optimizer, range(2))
        found.append(optimizer.statistics.records["0.weight"].second)
    assert not np.array_equal(*found)


# ---- checkpoints and copies ----


@pytest.mark.parametrize("steps_before", [0, 3, WARMUP, WARMUP + 3])
@pytest.mark.parametrize("way", ["state_dict", "pickle", "deepcopy", "distributed"])
@by_planner
def test_a_resumed_run_is_the_same_run(steps_before, way, planner):
    """In the warm-up and after it; the plan and the samples travel with the checkpoint."""
    model = make_model()
    optimizer = make(model, planner)
    run(model, optimizer, range(steps_before))
    if way == "pickle":
        twin, other = pickle.loads(pickle.dumps((model, optimizer)))
    elif way == "deepcopy":
        twin, other = copy.deepcopy((model, optimizer))
    else:
        twin = copy.deepcopy(model)
        other = make(twin, planner)
        if way == "state_dict":
            other.load_state_dict(through_file(optimizer.state_dict()))
        else:
            set_optimizer_state_dict(twin, other, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    rest = range(steps_before, steps_before + WARMUP + 3)
    assert run(model, optimizer, rest) == run(twin, other, rest)
    assert other.plan == optimizer.plan


def test_asking_for_a_distributed_state_dict_is_not_a_step():
    model = make_model()
    optimizer = make(model, PAPER)
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.state and samples_of(optimizer) == (0, 0) and optimizer.metrics()["steps"] == 0


DEFAULTS = {
    "dtype": (lambda: torch.set_default_dtype(torch.bfloat16), lambda: torch.set_default_dtype(torch.float32)),
    "device": (lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
}


@pytest.mark.parametrize("default", DEFAULTS)
@by_planner
def test_torchs_defaults_do_not_matter(default, planner):
    def outcome(has_default: bool) -> Any:
        model = make_model()
        twin = copy.deepcopy(model)
        change, restore = DEFAULTS[default]
        try:
            if has_default:
                change()
            optimizer = make(model, with_settings(planner, replan_every=2))
            losses = run(model, optimizer, range(3))
            twin.load_state_dict(model.state_dict())
            other = make(twin, with_settings(planner, replan_every=2))
            other.load_state_dict(through_file(optimizer.state_dict()))
            losses += run(twin, other, range(3, WARMUP + 5))
            other.metrics()
            return losses, other.replan(memory=0.4)
        finally:
            restore()

    assert outcome(True) == outcome(False)


@by_planner
def test_a_model_may_change_its_dtype(planner):
    model = make_model()
    optimizer = make(model, planner)
    model.to(torch.bfloat16)
    run(model, optimizer, range(3))
    model.to(torch.float32)
    run(model, optimizer, range(3, WARMUP + 3))
    assert not optimizer.is_warming_up and state_bytes(optimizer) == optimizer.plan.state_bytes


@pytest.mark.parametrize("keys", [("params", "param_names"), ("params",)], ids="+".join)
@by_planner
def test_parameters_may_leave_in_the_warmup(planner, keys, caplog):
    model = make_model()
    optimizer = make(model, planner)
    run(model, optimizer, range(3))
    gone, *_ = [optimizer.param_groups[0][key].pop(3) for key in keys]
    run(model, optimizer, range(3, WARMUP + 3))
    assert not optimizer.is_warming_up and "no plan could be made" not in caplog.text
    left = [name for name, param in model.named_parameters() if param is not gone]
    assert sorted(name for name, _ in optimizer.plan.by_parameter) == sorted(left)
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == left
    assert gone.grad is not None


# ---- steps that are not made ----


def test_non_finite_gradients_are_not_sampled(caplog):
    model = make_model()
    optimizer = make(model, PAPER)
    for param in model.parameters():
        param.grad = torch.full_like(param, float("nan"))
    with caplog.at_level(logging.WARNING, logger="baoc"):
        optimizer.step()
    assert samples_of(optimizer) == (0, 1)
    assert "not finite" in caplog.text


def test_a_step_that_the_grad_scaler_skips_is_not_sampled():
    model = make_model()
    optimizer = make(model, PAPER)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, poison in enumerate((1.0, float("inf"), 1.0)):
        tokens = torch.randint(200, (32,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens), (tokens * 7) % 200)
        scaler.scale(loss * poison).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert samples_of(optimizer) == (2, 0)


def test_a_skipped_step_does_not_count_toward_the_warmup():
    model = make_model()
    optimizer = make(model, dataclasses.replace(PAPER, warmup=3), on_nonfinite="skip")
    for step, bad in enumerate((True, False, True, False, False)):
        tokens = torch.randint(200, (32,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        (loss * math.nan if bad else loss).backward()
        assert optimizer.metrics()["warmup"] == 1
        optimizer.step()
        optimizer.zero_grad()
    metrics = optimizer.metrics()
    assert (metrics["steps"], metrics["skipped_steps"], metrics["warmup"]) == (3, 2, 0)


@by_planner
def test_metrics_are_plain_numbers_that_count_what_is_there(planner):
    model = make_model()
    optimizer = make(model, planner)
    for step in range(WARMUP + 2):
        run(model, optimizer, range(step, step + 1))
        metrics = optimizer.metrics()
        assert all(type(value) is float and math.isfinite(value) for value in metrics.values())
        assert metrics["state_bytes"] == state_bytes(optimizer)
        assert metrics["state_bytes"] <= metrics["budget_bytes"] or (planner is PAPER and optimizer.is_warming_up)
    assert optimizer.metrics() == metrics, "asking changes nothing"


# ---- new plans ----


def test_replanning_by_hand():
    model = make_model()
    planner = with_settings(PAPER, risk="update")
    optimizer = make(model, planner, memory=0.8)
    run(model, optimizer, range(WARMUP))
    ages = {id(p): dict(optimizer.state[p]) for p in model.parameters() if optimizer.state.get(p)}
    optimizer.replan(memory=0.4, planner=with_settings(planner, forbid="adafactor*"))
    assert state_bytes(optimizer) <= 0.4 * optimizer.plan.reference_bytes
    assert not [b for b in optimizer.plan.blocks if b.configuration.mechanism_name == "adafactor"]
    kept = [p for p in model.parameters() if "v.age" in optimizer.state.get(p, {}) and "v.age" in ages.get(id(p), {})]
    assert kept and all(int(optimizer.state[p]["v.age"]) == WARMUP for p in kept)
    run(model, optimizer, range(WARMUP, WARMUP + 3))
    optimizer.replan(memory=0.5, inherit=False)
    assert not any(int(v) for state in optimizer.state.values() for k, v in state.items() if k.endswith(".age"))


@by_planner
def test_replanning_by_hand_ends_the_warmup(planner):
    model = make_model()
    optimizer = make(model, planner)
    run(model, optimizer, range(2))
    optimizer.replan()
    assert not optimizer.is_warming_up and held(optimizer) <= 0.5 * optimizer.plan.reference_bytes
    plan = optimizer.plan
    run(model, optimizer, range(2, WARMUP + 2))
    assert optimizer.plan == plan


@pytest.mark.parametrize(
    ("planner", "changes", "error"),
    [
        ("effects", {"memory": 1e-4}, PlanError),
        ("effects", {"planner": PAPER}, StatisticsError),
        ("effects", {"planner": PaperPlanner}, TypeError),
        ("paper", {"memory": 0.4}, StatisticsError),
        ("paper", {"memory": "much"}, PlanError),
    ],
)
def test_a_new_plan_that_cannot_be_made_changes_nothing(planner, changes, error):
    optimizer = make(make_model(), PLANNERS[planner])
    before = optimizer.plan, copy.deepcopy(optimizer.state_dict()["param_groups"])
    with pytest.raises(error):
        optimizer.replan(**changes)
    assert (optimizer.plan, optimizer.state_dict()["param_groups"]) == before


def test_statistics_can_come_from_elsewhere_and_go_to_a_run_that_had_another_planner():
    model = make_model()
    donor = make(model, PAPER)
    run(model, donor, range(WARMUP))
    optimizer = make(model)
    with pytest.raises(ValueError, match="EffectPlanner reads no gradients, so statistics= would do nothing"):
        optimizer.replan(statistics=donor.statistics)
    plan = optimizer.replan(planner=PAPER, statistics=donor.statistics)
    assert plan.settings["planner"] == "paper" and not optimizer.is_warming_up
    run(model, optimizer, range(2))
    assert optimizer.plan.blocks == plan.blocks


def test_the_effect_planner_has_no_statistics():
    with pytest.raises(StatisticsError, match=r"EffectPlanner reads no gradients\. Use planner=baoc\.PaperPlanner"):
        _ = make(make_model()).statistics


def test_the_warmup_may_end_early():
    model = make_model()
    planner = PaperPlanner(warmup=200, stable_within=10.0, time=UNTIMED)
    optimizer = make(model, planner, memory=2.0)
    run(model, optimizer, range(20))
    assert optimizer.statistics.steps == 20 and not optimizer.is_warming_up
    patient = make(model, with_settings(planner, stable_within=1e-9))
    run(model, patient, range(20))
    assert patient.is_warming_up


def test_the_paper_warms_up_on_adamw16():
    model = make_model()
    optimizer = make(model, PAPER)
    assert {block.configuration for block in optimizer.plan.blocks} == {parse("adamw-16")}
    run(model, optimizer, range(WARMUP))
    assert optimizer.plan.state_bytes <= 0.5 * optimizer.plan.reference_bytes


def test_a_repeated_plan_is_not_announced_again(caplog):
    model = make_model()
    with caplog.at_level(logging.INFO, logger="baoc"):
        optimizer = make(model, EffectPlanner(time=UNTIMED, replan_every=2, tokens=32))
        run(model, optimizer, range(7))
    assert len([record for record in caplog.records if "of state" in record.message]) == 1


# ---- param groups ----


@pytest.mark.parametrize("memory", [0.5, 2.0])
@by_planner
def test_a_group_may_have_a_configuration_of_its_own(planner, memory):
    model, late = make_model(), nn.Parameter(torch.ones(80, 80))
    first = nn.Parameter(torch.ones(80, 80))
    groups = [{"params": [first], "configuration": "adamw-8"}, {"params": list(model.parameters())}]
    optimizer = make(groups, planner, memory=memory)
    optimizer.add_param_group({"params": [late], "configuration": "adamw-8"})
    assert late in optimizer.state and held(optimizer)
    first.grad, late.grad = torch.ones_like(first), torch.ones_like(late)
    run(model, optimizer, range(WARMUP + 1))
    assert {optimizer.plan.block_of(name).configuration for name in ("0.0", "2.0")} == {parse("adamw-8")}
    assert state_bytes(optimizer) <= memory * optimizer.plan.reference_bytes


def test_a_plan_set_by_hand_may_mix_planned_parameters_with_others():
    model, other = make_model(), nn.Parameter(torch.ones(80, 80))
    optimizer = make([{"params": [other], "configuration": "sgdm-8"}, {"params": list(model.parameters())}])
    optimizer.set_plan("adamw-8")
    optimizer.replan(memory=0.4)
    assert optimizer.plan.block_of("0.0").configuration == parse("adamw-8")
    assert state_bytes(optimizer) == optimizer.plan.state_bytes <= 0.4 * optimizer.plan.reference_bytes


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("where", ["join", "plan", "migrate"])
@pytest.mark.parametrize("steps_before", [0, WARMUP + 1])
@by_planner
def test_an_interrupted_group_is_not_added(where, steps_before, planner, monkeypatch):
    model, late = make_model(), nn.Parameter(torch.ones(160, 160))
    optimizer = make(model, planner)
    run(model, optimizer, range(steps_before))

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise Interrupted

    with monkeypatch.context() as patch:
        if where == "join":
            patch.setattr("baoc.optim.optimizer.refuse_offloading", stop)
        elif where == "plan":
            patch.setattr("baoc.planning.Run.model", stop)
        else:
            allocate, calls = baoc.optim.migrate.Move.allocate, []

            def second(self, **settings):
                calls.append(1)
                return stop() if len(calls) == 2 else allocate(self, **settings)

            patch.setattr("baoc.optim.migrate.Move.allocate", second)
        with pytest.raises(Interrupted):
            optimizer.add_param_group({"params": [("late", late)]})
    assert len(optimizer.param_groups) == 1
    assert {name for name, _ in optimizer.plan.by_parameter} == {name for name, _ in model.named_parameters()}
    run(model, optimizer, range(steps_before, steps_before + WARMUP + 1))
    assert state_bytes(optimizer) == optimizer.plan.state_bytes
    optimizer.add_param_group({"params": [("late", late)]})
    assert "late" in optimizer.plan


# ---- arguments ----


def test_all_arguments_are_typed_and_visible():
    parameters = list(inspect.signature(BAOC).parameters.values())
    assert len(parameters) <= 17
    for parameter in parameters:
        assert parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        assert parameter.annotation not in (parameter.empty, "Any")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("warmup", r"BAOC has no argument 'warmup': it is now planner=baoc\.PaperPlanner\(warmup=\.\.\.\)"),
        ("tokens", r"it is now planner=baoc\.EffectPlanner\(tokens=\.\.\.\)"),
        ("space", r"it is now planner=baoc\.PaperPlanner\(\) or planner=baoc\.EffectPlanner\(\)"),
        ("update_rms", r"it is now a key of a param group"),
        ("wieght_decay", r"Did you mean 'weight_decay'\?"),
        ("quiet", "verbose"),
        ("offload", "Did you mean 'host_memory'"),
        ("fused", "BAOC has no argument 'fused'"),
    ],
)
def test_an_unknown_argument_says_what_was_meant(name, message):
    with pytest.raises(TypeError, match=message) as caught:
        BAOC(make_model(), **{name: 1})
    assert "\n" not in str(caught.value)


NUMPY = {
    "lr": np.float32(1e-3),
    "betas": (np.float64(0.9), np.float32(0.99)),
    "eps": np.float16(1e-4),
    "weight_decay": np.int64(0),
    "memory": np.float64(0.5),
}


@pytest.mark.parametrize("name", NUMPY)
@by_planner
def test_numpy_scalars_become_plain_numbers(name, planner):
    model, late = make_model(), nn.Parameter(torch.ones(4))
    optimizer = make(model, planner, **{name: NUMPY[name]})
    if name != "memory":
        optimizer.add_param_group({"params": [("late", late)], name: NUMPY[name]})
    run(model, optimizer, range(1))
    other = make(model, planner)
    if name != "memory":
        other.add_param_group({"params": [("late", late)]})
    other.load_state_dict(through_file(optimizer.state_dict()))
    for group in optimizer.param_groups:
        values = [group["lr"], *group["betas"], group["eps"], group["weight_decay"]]
        assert all(type(value) in (int, float) for value in values)


def test_lr_may_be_a_tensor():
    model = make_model()
    optimizer = make(model, lr=torch.tensor(1e-3))
    run(model, optimizer, range(1))
    other = make(model, lr=torch.tensor(2e-3))
    other.load_state_dict(through_file(optimizer.state_dict()))
    assert isinstance(other.param_groups[0]["lr"], torch.Tensor) and float(other.param_groups[0]["lr"]) == float(
        torch.tensor(1e-3)
    )


@pytest.mark.parametrize(
    "kind",
    [Decimal, Fraction, lambda text: torch.tensor(float(text)), str],
    ids=["Decimal", "Fraction", "tensor", "str"],
)
@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay", "memory"])
def test_other_types_are_refused_by_name(name, kind):
    value = kind("0.5")
    if (name == "lr" and isinstance(value, torch.Tensor)) or (name == "memory" and isinstance(value, str)):
        pytest.skip("accepted, or refused as a text")
    with pytest.raises((TypeError, ValueError), match=name):
        make(make_model(), **{name: (0.9, value) if name == "betas" else value})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: {"memory": 1}, r"memory=1"),
        (lambda: {"memory": 4095}, r"memory=4095"),
        (lambda: {"memory": "a lot"}, "memory"),
        (lambda: {"planner": PaperPlanner}, "planner must be an object such as"),
        (lambda: {"planner": "paper"}, "planner must be an object such as"),
        (lambda: {"planner": PaperPlanner(granularity="fine")}, "unknown granularity"),
        (lambda: {"planner": PaperPlanner(risk="none")}, "unknown risk model"),
        (lambda: {"planner": PaperPlanner(forbid="adagrad")}, "names no configuration"),
        (lambda: {"planner": EffectPlanner(forbid="adagrad")}, "names no candidate"),
        (lambda: {"planner": PaperPlanner(warmup=0)}, "warmup must be a whole number of at least 1"),
        (lambda: {"planner": EffectPlanner(replan_every=0)}, "replan_every must be a whole number of at least 1"),
        (lambda: {"planner": PaperPlanner(sample_ratio=2.0)}, "sample_ratio must be a number above 0 and at most 1"),
        (lambda: {"on_nonfinite": "ignore"}, "on_nonfinite must be one of"),
        (lambda: {"kernel": "cuda"}, "unknown kernel 'cuda'"),
    ],
)
def test_bad_settings_are_refused_when_the_optimizer_is_built(build, message):
    with pytest.raises((PlanError, ValueError, TypeError), match=message) as caught:
        make(make_model(), **build())
    assert "\n" not in str(caught.value)

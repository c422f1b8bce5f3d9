"""A run of BAOC that goes on is the run that was never stopped, unless its script asks for something else."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import baoc
from baoc import BAOC, BlockOptimizer, CheckpointError, EffectPlanner, PaperPlanner, PlanError, state_bytes
from baoc.optim.state import held_bytes
from tests.memory import PeakMemory
from tests.training import assert_same, snapshot

WARMUP = 4
WAYS = ("file", "nested", "flat", "full", "dcp", "dcp flat")
OPTIONS = {
    "nested": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "dcp": StateDictOptions(),
    "dcp flat": StateDictOptions(flatten_optimizer_state_dict=True),
}
EFFECTS, PAPER = EffectPlanner(), PaperPlanner(warmup=WARMUP)
by_planner = pytest.mark.parametrize("planner", [EFFECTS, PAPER], ids=["effects", "paper"])


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2)]
    return nn.Sequential(nn.Embedding(100, 64), *layers, nn.Linear(64, 100)).to(dtype)


def make(model: Any, **settings: Any) -> BAOC:
    return BAOC(model, **({"lr": 3e-3, "memory": 0.5, "planner": EFFECTS, "verbose": False} | settings))


def paper(**settings: Any) -> PaperPlanner:
    return dataclasses.replace(PAPER, **settings)


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.randint(100, (24,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens).float(), (tokens * 7) % 100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def through_file(state_dict: Any) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def carried_over(way: str, model: nn.Module, optimizer: BAOC, other: BAOC, twin: nn.Module, folder: Any) -> None:
    """Take a checkpoint of one optimizer and load it into another."""
    if way == "file":
        other.load_state_dict(through_file(optimizer.state_dict()))
        return
    options = {"options": OPTIONS[way]}
    saved = get_optimizer_state_dict(model, optimizer, **options)
    if way.startswith("dcp"):
        dcp.save({"optimizer": saved}, checkpoint_id=folder, no_dist=True)
        baoc.prepare_for_load(other, folder)
        target = {"optimizer": get_optimizer_state_dict(twin, other, **options)}
        dcp.load(target, checkpoint_id=folder, no_dist=True)
        saved = target["optimizer"]
    else:
        saved = copy.deepcopy(saved)
        if way != "nested":
            baoc.prepare_for_load(other, saved)
    set_optimizer_state_dict(twin, other, saved, **options)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("steps_before", [0, 2, WARMUP, WARMUP + 3], ids=["fresh", "warm-up", "planned", "later"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"planner": PAPER},
        {"planner": paper(stable_within=1e-3, replan_every=2)},
        {"planner": paper(warmup_base="budget"), "memory": 0.0},
    ],
    ids=["effects", "paper", "replanned", "smallest"],
)
def test_every_kind_of_checkpoint_carries_everything(steps_before, way, settings, tmp_path):
    if way == "full" and not settings.get("memory", 1):
        pytest.skip("torch cannot set a full state dict without any tensor in it")
    model = make_model()
    optimizer = make(model, **settings)
    run(model, optimizer, range(steps_before))
    twin = copy.deepcopy(model)
    other = make(twin, **settings)
    carried_over(way, model, optimizer, other, twin, tmp_path)
    rest = range(steps_before, steps_before + WARMUP + 3)
    assert run(model, optimizer, rest) == run(twin, other, rest)
    assert other.plan == optimizer.plan
    assert_same(other.state_dict(), optimizer.state_dict())


NAMINGS = {
    "module": lambda model: model,
    "bare": lambda model: model.parameters(),
    "named": lambda model: model.named_parameters(),
    "module.": lambda model: [(f"module.{name}", param) for name, param in model.named_parameters()],
    "model.": lambda model: [(f"model.{name}", param) for name, param in model.named_parameters()],
    "compiled": lambda model: [(f"_orig_mod.{name}", param) for name, param in model.named_parameters()],
}


@pytest.mark.parametrize("saved_as", NAMINGS)
@pytest.mark.parametrize("loaded_as", NAMINGS)
@by_planner
def test_a_warmup_goes_on_under_other_names(saved_as, loaded_as, planner):
    """And ends: plan, samples and roles are those of the parameters, whatever they are called."""
    fixed = {"granularity": "tensor"} if planner is PAPER else {"tokens": 24}
    model, settings = make_model(), {"planner": dataclasses.replace(planner, **fixed)}
    optimizer = make(NAMINGS[saved_as](model), **settings)
    run(model, optimizer, range(2))
    twin = copy.deepcopy(model)
    other = make(NAMINGS[loaded_as](twin), **settings)
    other.load_state_dict(through_file(optimizer.state_dict()))
    rest = range(2, WARMUP + 3)
    assert run(model, optimizer, rest) == run(twin, other, rest)
    assert [block.configuration for block in other.plan.blocks] == [b.configuration for b in optimizer.plan.blocks]


def test_names_in_another_order_are_told_under_prefixes_too():
    model = make_model()
    optimizer = make([(f"module.{name}", param) for name, param in model.named_parameters()])
    with pytest.raises(CheckpointError, match="another order"):
        make(reversed(list(model.named_parameters()))).load_state_dict(optimizer.state_dict())


# ---- what the script asks for ----


def resumed(optimizer: BAOC, model: nn.Module, **settings: Any) -> tuple[nn.Module, BAOC]:
    twin = copy.deepcopy(model)
    other = make(twin, **settings)
    other.load_state_dict(through_file(optimizer.state_dict()))
    return twin, other


@by_planner
@pytest.mark.parametrize("steps_before", [2, WARMUP + 2])
def test_another_budget_of_the_script_wins(steps_before, planner, caplog):
    """The paper's planner may have no gradients to plan from: then it warms up again."""
    model = make_model()
    optimizer = make(model, memory=0.5, planner=planner)
    run(model, optimizer, range(steps_before))
    with caplog.at_level(logging.INFO, logger="baoc"):
        twin, other = resumed(optimizer, model, memory=0.3, planner=planner)
    assert [record.message for record in caplog.records if "memory=0.3 (it had 0.5)" in record.message]
    run(twin, other, range(steps_before, steps_before + 1))
    assert other.is_warming_up == (planner is PAPER)
    assert planner is PAPER or state_bytes(other) <= 0.3 * other.plan.reference_bytes
    run(twin, other, range(steps_before + 1, steps_before + WARMUP + 2))
    assert not other.is_warming_up and state_bytes(other) <= 0.3 * other.plan.reference_bytes
    assert "no plan could be made" not in caplog.text


@by_planner
def test_settings_that_replan_changed_go_on(planner):
    model = make_model()
    settings = {"memory": 0.6, "planner": dataclasses.replace(planner, replan_every=3)}
    optimizer = make(model, **settings)
    run(model, optimizer, range(WARMUP))
    changed = {"time": math.inf, "forbid": "adamw-16", "preference": 0.4}
    optimizer.replan(memory=0.4, planner=dataclasses.replace(settings["planner"], **changed))
    twin, other = resumed(optimizer, model, **settings)
    assert other.plan == optimizer.plan
    rest = range(WARMUP, WARMUP + 7)
    assert run(model, optimizer, rest) == run(twin, other, rest)
    assert other.plan == optimizer.plan and state_bytes(other) <= 0.4 * other.plan.reference_bytes
    assert not [b for b in other.plan.blocks if str(b.configuration) == "adamw[m=bf16,v=bf16]"]


def test_each_setting_is_resolved_by_itself(caplog):
    """``replan`` changed two settings; the next script changes one of them and a third."""
    model = make_model()
    first = EffectPlanner(forbid="adafactor*", preference=0.3)
    optimizer = make(model, planner=first)
    run(model, optimizer, range(2))
    optimizer.replan(planner=dataclasses.replace(first, forbid="adamw-16", preference=0.4))
    with caplog.at_level(logging.INFO, logger="baoc"):
        _, other = resumed(optimizer, model, planner=dataclasses.replace(first, preference=0.7, tolerance=0.1))
    effective = json.loads(other.state_dict()["param_groups"][0]["planner"])["effective"]
    assert (effective["forbid"], effective["preference"], effective["tolerance"]) == ("adamw-16", 0.7, 0.1)
    assert "preference=0.7 (it had 0.4), tolerance=0.1 (it had 0.2)" in caplog.text.replace(
        "tolerance=0.1 (it had 0.2), preference=0.7 (it had 0.4)",
        "preference=0.7 (it had 0.4), tolerance=0.1 (it had 0.2)",
    )


@pytest.mark.parametrize("way", ["script", "replan"])
@pytest.mark.parametrize("back", [False, True], ids=["to the paper's", "to effects"])
def test_another_planner_of_the_script_wins_and_that_of_replan_goes_on(way, back, caplog):
    model = make_model()
    old, new = (PAPER, EFFECTS) if back else (EFFECTS, paper(gamma=0.2))
    optimizer = make(model, planner=old)
    run(model, optimizer, range(WARMUP + 1))
    if way == "replan":
        donor = make(twin := make_model(), planner=PAPER)
        run(twin, donor, range(WARMUP))
        optimizer.replan(planner=new, **({} if back else {"statistics": donor.statistics}))
        twin, other = resumed(optimizer, model, planner=old)
        assert other.plan == optimizer.plan
        assert (
            json.loads(other.state_dict()["param_groups"][0]["planner"])["effective"]["planner"] == type(new).__name__
        )
        rest = range(WARMUP + 1, WARMUP + 4)
        assert run(model, optimizer, rest) == run(twin, other, rest) and other.plan == optimizer.plan
        return
    twin, other = resumed(optimizer, model, planner=new)
    run(twin, other, range(WARMUP + 1, WARMUP + 2))
    assert other.is_warming_up == (not back)
    run(twin, other, range(WARMUP + 2, 2 * WARMUP + 2))
    assert other.plan.settings["planner"] == ("effects" if back else "paper")
    assert not other.is_warming_up and state_bytes(other) <= 0.5 * other.plan.reference_bytes
    assert "no plan could be made" not in caplog.text


@by_planner
@pytest.mark.parametrize("kind", ["torch", "blocks"])
def test_a_run_goes_on_from_an_optimizer_without_a_planner(planner, kind, caplog):
    model = make_model()
    before: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if kind == "blocks":
        before = BlockOptimizer(model, lr=3e-3, plan="adamw-32")
    run(model, before, range(3))
    optimizer = make(model, planner=planner)
    optimizer.load_state_dict(through_file(before.state_dict()))
    run(model, optimizer, range(3, 4))
    ages = [int(v) for state in optimizer.state.values() for key, v in state.items() if key == "m.age"]
    assert ages and set(ages) == {4}, "state is inherited"
    assert optimizer.is_warming_up == (planner is PAPER)
    run(model, optimizer, range(4, WARMUP + 4))
    assert state_bytes(optimizer) <= 0.5 * optimizer.plan.reference_bytes
    assert "no plan could be made" not in caplog.text


def test_a_shorter_warmup_plans_at_the_next_step_and_a_longer_one_goes_on():
    model = make_model()
    optimizer = make(model, planner=paper(warmup=10))
    run(model, optimizer, range(5))
    twin, shorter = resumed(optimizer, model, planner=paper(warmup=3))
    assert shorter.is_warming_up
    run(twin, shorter, range(5, 6))
    assert shorter.plan.settings["warmup_steps"] == 6
    twin, longer = resumed(optimizer, model, planner=paper(warmup=12))
    run(twin, longer, range(5, 11))
    assert longer.is_warming_up
    run(twin, longer, range(11, 12))
    assert longer.plan.settings["warmup_steps"] == 12


@by_planner
def test_replan_every_may_be_requested_later(planner, monkeypatch):
    model = make_model()
    optimizer = make(model, planner=planner)
    run(model, optimizer, range(WARMUP + 1))
    twin, other = resumed(optimizer, model, planner=dataclasses.replace(planner, replan_every=2))
    plans = []
    monkeypatch.setattr(BAOC, "_plan_again", lambda self: plans.append(self._steps) or self._note_plan())
    run(twin, other, range(WARMUP + 1, WARMUP + 5))
    assert len(plans) >= 2


def test_stability_is_judged_from_where_it_was():
    model = make_model()
    settings = {"planner": paper(warmup=100, stable_within=10.0), "memory": 2.0}
    optimizer = make(model, **settings)
    run(model, optimizer, range(15))
    twin, other = resumed(optimizer, model, **settings)
    for each, mine in ((model, optimizer), (twin, other)):
        run(each, mine, range(15, 20))
        assert mine.plan.settings["warmup_steps"] == 20


@by_planner
def test_the_state_dict_of_step_0_starts_a_new_warmup(planner):
    model = make_model()
    optimizer = make(model, planner=planner, memory=0.13)
    start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    first = run(model, optimizer, range(WARMUP + 3)), optimizer.plan
    model.load_state_dict(start[0])
    optimizer.load_state_dict(start[1])
    assert (run(model, optimizer, range(WARMUP + 3)), optimizer.plan) == first


def test_a_plan_is_not_of_the_machine_it_is_resumed_on():
    """Constants of a device are facts of the run."""
    model = make_model()
    optimizer = make(model)
    saved = optimizer.state_dict()
    [group] = saved["param_groups"]
    content = json.loads(group["planner"])
    content["model"] |= {"operations_per_byte": 100.0, "device": "cuda"}
    group["planner"] = json.dumps(content)
    optimizer.load_state_dict(saved)
    assert json.loads(optimizer.state_dict()["param_groups"][0]["planner"])["model"]["operations_per_byte"] == 100.0


# ---- all or nothing ----


def damaged(path: tuple[Any, ...], value: Any) -> Any:
    model = make_model()
    optimizer = make(model, planner=PAPER)
    run(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    place = saved
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value(place.get(path[-1])) if callable(value) else value
    return saved


def in_planner(*path: Any) -> Any:
    def edit(text: str) -> str:
        content = place = json.loads(text)
        for key in path[:-2]:
            place = place[key]
        place[path[-2]] = path[-1]
        return json.dumps(content)

    return edit


SAMPLES = ("state", 0, "baoc.samples")
PLANNER = ("param_groups", 0, "planner")
FIRST, SECOND, PREVIOUS = "0", "1", "2"  # in the order of the sampler's slots
DAMAGES = {
    "samples of fewer coordinates": ((*SAMPLES, FIRST), lambda first: first[:-1]),
    "samples that are not finite": ((*SAMPLES, SECOND), lambda second: second * math.nan),
    "a negative square": ((*SAMPLES, SECOND), lambda second: second - 1),
    "samples of another dtype": ((*SAMPLES, FIRST), lambda first: first.float()),
    "no samples": (SAMPLES, lambda _: {}),
    "some samples": (SAMPLES, lambda samples: {FIRST: samples[FIRST]}),
    "samples that are a list": (SAMPLES, lambda _: [1]),
    "no planner's JSON": (PLANNER, "{"),
    "a planner's JSON that is a list": (PLANNER, "[]"),
    "another version": (PLANNER, in_planner("version", 7)),
    "negative steps": (PLANNER, in_planner("progress", "steps", -1)),
    "a budget of nothing": (PLANNER, in_planner("effective", "memory", "some")),
    "a parameter that is not there": (PLANNER, in_planner("planned", ["9.9"])),
    "fewer parameters": (PLANNER, in_planner("planned", ["0.0"])),
    "an unknown role": (PLANNER, in_planner("model", "roles", {"0.0": "tensor"})),
    "an unknown regime": (PLANNER, in_planner("model", "regime", "between")),
    "no session": (PLANNER, in_planner("session", None)),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint_changes_nothing(case):
    saved = damaged(*DAMAGES[case])
    model = make_model()
    optimizer = make(model, planner=PAPER)
    run(model, optimizer, range(3))
    before = snapshot(model, optimizer)
    with pytest.raises(CheckpointError, match=r"checkpoint"):
        optimizer.load_state_dict(saved)
    assert_same(snapshot(model, optimizer), before)
    run(model, optimizer, range(3, WARMUP + 2))
    assert optimizer.plan.settings["warmup_steps"] == WARMUP


@by_planner
@pytest.mark.parametrize("steps_before", [2, WARMUP + 2])
def test_a_load_needs_one_tensor_more_at_most(planner, steps_before):
    model = make_model()
    optimizer = make(model, planner=planner)
    run(model, optimizer, range(steps_before))
    saved = through_file(optimizer.state_dict())
    held = tensors(saved["state"])
    largest = max(param.numel() for param in model.parameters()) * 4
    other = make(make_model(), planner=planner)
    with PeakMemory(held) as memory:
        other.load_state_dict(saved)
    sampler = other.metrics().get("planner_bytes", 0)  # is built before it is filled
    assert memory.peak <= held_bytes(held) + largest + sampler


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors(each)]
    return [value] if isinstance(value, torch.Tensor) else []


def test_without_its_layout_a_distributed_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="there is no plan in"):
        baoc.prepare_for_load(
            BlockOptimizer(nn.Linear(8, 8)), torch.optim.AdamW(nn.Linear(8, 8).parameters()).state_dict()
        )


# ---- nothing fails later that can fail at once ----


@pytest.mark.parametrize(
    ("planner", "settings", "message"),
    [
        (PaperPlanner, {"warmup": 2.5}, "warmup must be a whole number of at least 1, got 2.5"),
        (PaperPlanner, {"warmup": math.nan}, "warmup must be .* got nan"),
        (PaperPlanner, {"warmup": True}, "warmup must be .* got True"),
        (PaperPlanner, {"stable_within": "a"}, "stable_within must be a number above 0, got 'a'"),
        (PaperPlanner, {"stable_within": math.nan}, "stable_within must be .* got nan"),
        (EffectPlanner, {"replan_every": 2.5}, "replan_every must be .* got 2.5"),
        (PaperPlanner, {"seed": 1.5}, "seed must be .* got 1.5"),
        (PaperPlanner, {"seed": -1}, "seed must be .* got -1"),
        (PaperPlanner, {"sample_ratio": "a"}, "sample_ratio must be .* got 'a'"),
        (PaperPlanner, {"sample_ratio": math.nan}, "sample_ratio must be .* got nan"),
        (PaperPlanner, {"forbid": "sgd*"}, "no plan fits memory=0.001"),
        (
            EffectPlanner,
            {"forbid": ["sgd*", "sinkhorn*", "colnorm*", "rownorm*", "spectral*"]},
            "no plan fits memory=0.001",
        ),
        (PaperPlanner, {"forbid": {"nowhere*": "sgd*"}}, "names no block"),
        (PaperPlanner, {"time": 0.1}, "no plan is within time=0.1"),
    ],
)
def test_it_is_refused_when_the_optimizer_is_built(planner, settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        make(make_model(), planner=planner(**settings), memory=0.001)
    assert "-" not in str(caught.value).partition("needs")[2].partition("B,")[0], "no negative sizes"


def test_patterns_hold_however_blocks_are_merged():
    """Units that share a block when gradients are seen are still told apart by name, and never left with nothing."""
    model = make_model()
    rules = {"1": ["adam*", "sgdw*", "adafactor*"], "2": ["sgd*", "adam-*"]}
    optimizer = make(model, planner=paper(forbid=rules, min_share=0.4), memory=1.0)
    run(model, optimizer, range(WARMUP + 1))
    assert optimizer.plan.settings["warmup_steps"] == WARMUP
    first, second = (optimizer.plan.block_of(f"{i}.1.weight").configuration.mechanism_name for i in (1, 2))
    assert first.startswith("sgd") and not second.startswith("sgd")


@pytest.mark.parametrize("memory", [2.0, 1.0, 0.5, 0.0])
@by_planner
def test_a_model_of_any_size_works_at_any_budget_its_smallest_plan_fits(memory, planner):
    settings = {"time": math.inf, "candidates": ("adamw-8", "sgd")}
    planner = dataclasses.replace(planner, **settings)
    for model in (nn.Linear(10, 10), nn.Linear(1, 1), nn.LayerNorm(3)):
        optimizer = make(model, memory=memory, planner=planner)
        for _ in range(WARMUP + 2):
            model(torch.randn(4, next(model.parameters()).shape[-1])).square().mean().backward()
            optimizer.step()
            is_bound = memory and not optimizer.is_warming_up
            assert not is_bound or state_bytes(optimizer) <= memory * optimizer.plan.reference_bytes


@by_planner
@pytest.mark.parametrize("configuration", [None, "adamw-8"])
@pytest.mark.parametrize("steps_before", [0, 2, WARMUP + 1])
def test_parameters_that_join_keep_the_budget(planner, configuration, steps_before):
    model, late = make_model(), nn.Linear(64, 80)
    optimizer = make(model, planner=planner, memory=1.0)
    run(model, optimizer, range(steps_before))
    given = {} if configuration is None else {"configuration": configuration}
    optimizer.add_param_group({"params": list(late.named_parameters()), **given})
    for step in range(steps_before, WARMUP + 4):
        late(torch.ones(2, 64)).square().mean().backward()
        run(model, optimizer, range(step, step + 1))
        assert optimizer.is_warming_up or state_bytes(optimizer) <= optimizer.plan.reference_bytes
    twin, twin_late = copy.deepcopy((model, late))
    other = make(twin, planner=planner, memory=1.0)
    other.add_param_group({"params": list(twin_late.named_parameters()), **given})
    other.load_state_dict(through_file(optimizer.state_dict()))
    assert other.plan == optimizer.plan
    assert planner is PAPER or other.replan().state_bytes == optimizer.replan().state_bytes


@by_planner
@pytest.mark.parametrize("steps_before", [0, 2, WARMUP + 1])
def test_parameters_without_room_are_refused_as_a_whole(planner, steps_before):
    model = make_model()
    optimizer = make(model, memory=0.1, planner=planner)
    run(model, optimizer, range(steps_before))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(PlanError, match=r"no room for the parameters of another group: no plan fits memory=0\.1"):
        late = ("late", nn.Parameter(torch.ones(300, 300)))
        optimizer.add_param_group({"params": [late], "configuration": "adamw-32"})
    assert_same(optimizer.state_dict(), before)
    run(model, optimizer, range(steps_before, steps_before + WARMUP + 1))


def test_a_plan_that_cannot_be_made_is_tried_again(caplog):
    """Here a risk model of the user's fails, as anything may that is computed from gradients."""
    calls = []

    def broken(metrics, configuration, settings):
        if calls and calls[0] == "break":
            raise ArithmeticError("no risk today")
        return {"bits": 32.0 - configuration.switches.bits}

    model = make_model()
    optimizer = make(model, planner=paper(risk=broken, replan_every=3, granularity="tensor"))
    before = optimizer.plan
    calls.append("break")
    with caplog.at_level(logging.WARNING, logger="baoc"):
        run(model, optimizer, range(WARMUP + 1))
    assert "training goes on with the current one" in caplog.text and "no risk today" in caplog.text
    assert optimizer.plan == before
    calls.clear()
    run(model, optimizer, range(WARMUP + 1, WARMUP + 4))
    assert optimizer.plan.settings["warmup_steps"] == WARMUP + 3


@pytest.mark.parametrize("where", [0, 2, -1])
@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize(
    "planner", [None, PaperPlanner(warmup=6), PaperPlanner(warmup=2, replan_every=3)], ids=["effects", "paper", "again"]
)
def test_a_parameter_may_leave_at_any_time(planner, is_named, where):
    """Training goes on, the others keep their state, and checkpoints resume to the bit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 64))
    optimizer = BAOC(model if is_named else model.parameters(), memory=0.8, planner=planner, verbose=False)

    def train(model, optimizer, steps) -> None:
        for step in range(steps):
            model(torch.randn(8, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(model, optimizer, 3)
    group = optimizer.param_groups[0]
    for key in ("params", "param_names") if is_named else ("params",):
        group[key].pop(where)
    held = {
        id(param): optimizer.state[param]["m.age"] for param in group["params"] if "m.age" in optimizer.state[param]
    }
    train(model, optimizer, 1)
    assert held and all(int(optimizer.state[p]["m.age"]) == held[id(p)] + 1 for p in group["params"] if id(p) in held)

    saved = copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(model)
    params = list(twin.named_parameters() if is_named else twin.parameters())
    params.pop(where)
    resumed = BAOC(params, memory=0.8, planner=planner, verbose=False)
    resumed.load_state_dict(saved)
    for one, other in ((model, optimizer), (twin, resumed)):
        train(one, other, 6)
    assert not optimizer.is_warming_up and str(optimizer.plan) == str(resumed.plan)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))

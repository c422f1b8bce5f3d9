"""A run of BAOC that goes on is the run that was never stopped, unless its script asks for something else."""

from __future__ import annotations

import copy
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
from baoc import BAOC, BlockOptimizer, CheckpointError, PlanError, state_bytes
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
by_space = pytest.mark.parametrize("space", ["measured", "paper"])


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2)]
    return nn.Sequential(nn.Embedding(100, 64), *layers, nn.Linear(64, 100)).to(dtype)


def make(model: Any, **settings: Any) -> BAOC:
    return BAOC(model, lr=3e-3, **({"warmup": WARMUP, "memory": 0.5} | settings))


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
        baoc.lay_out_for(other, folder)
        target = {"optimizer": get_optimizer_state_dict(twin, other, **options)}
        dcp.load(target, checkpoint_id=folder, no_dist=True)
        saved = target["optimizer"]
    else:
        saved = copy.deepcopy(saved)
        if way != "nested":
            baoc.lay_out_for(other, saved)
    set_optimizer_state_dict(twin, other, saved, **options)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("steps_before", [0, 2, WARMUP, WARMUP + 3], ids=["fresh", "warm-up", "planned", "later"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "settings",
    [{}, {"space": "paper"}, {"space": "paper", "settle": 1e-3, "replan_every": 2}, {"memory": 0.0, "space": "paper"}],
    ids=["measured", "paper", "replanned", "cheapest"],
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
@by_space
def test_a_warmup_goes_on_under_other_names(saved_as, loaded_as, space):
    """And ends: plan, samples and roles are those of the parameters, whatever they are called."""
    model, settings = make_model(), {"space": space, "granularity": "tensor", "tokens": 24}
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


@by_space
@pytest.mark.parametrize("steps_before", [2, WARMUP + 2])
def test_another_budget_of_the_script_wins(steps_before, space, caplog):
    model = make_model()
    optimizer = make(model, memory=0.5, space=space)
    run(model, optimizer, range(steps_before))
    with caplog.at_level(logging.INFO, logger="baoc"):
        twin, other = resumed(optimizer, model, memory=0.3, space=space)
    assert [record.message for record in caplog.records if "memory=0.3 (it had 0.5)" in record.message]
    run(twin, other, range(steps_before, steps_before + 1))
    assert state_bytes(other) <= 0.3 * other.plan.reference_bytes
    run(twin, other, range(steps_before + 1, steps_before + WARMUP + 2))
    assert state_bytes(other) <= 0.3 * other.plan.reference_bytes


@by_space
def test_a_budget_that_replan_changed_goes_on(space):
    model = make_model()
    optimizer = make(model, memory=0.6, space=space, replan_every=3)
    run(model, optimizer, range(WARMUP))
    optimizer.replan(memory=0.4, time=math.inf, forbid="adamw-16", preference=0.4)
    twin, other = resumed(optimizer, model, memory=0.6, space=space, replan_every=3)
    assert other.plan == optimizer.plan
    rest = range(WARMUP, WARMUP + 7)
    assert run(model, optimizer, rest) == run(twin, other, rest)
    assert other.plan == optimizer.plan and state_bytes(other) <= 0.4 * other.plan.reference_bytes
    assert not [b for b in other.plan.blocks if str(b.configuration) == "adamw[m=bf16,v=bf16]"]


def test_a_shorter_warmup_plans_at_the_next_step_and_a_longer_one_goes_on():
    model = make_model()
    optimizer = make(model, warmup=10, space="paper")
    run(model, optimizer, range(5))
    twin, shorter = resumed(optimizer, model, warmup=3, space="paper")
    assert not shorter.plan.settings["warmup_steps"]
    run(twin, shorter, range(5, 6))
    assert shorter.plan.settings["warmup_steps"] == 6
    twin, longer = resumed(optimizer, model, warmup=12, space="paper")
    run(twin, longer, range(5, 11))
    assert not longer.plan.settings["warmup_steps"]
    run(twin, longer, range(11, 12))
    assert longer.plan.settings["warmup_steps"] == 12


def test_replan_every_may_be_asked_for_later():
    model = make_model()
    optimizer = make(model, space="paper")
    run(model, optimizer, range(WARMUP + 1))
    twin, other = resumed(optimizer, model, space="paper", replan_every=2)
    run(twin, other, range(WARMUP + 1, WARMUP + 4))
    assert other.plan.settings["warmup_steps"] > WARMUP, "sampling has gone on"


def test_settling_goes_on_where_it_was():
    model = make_model()
    settings = {"warmup": 100, "settle": 10.0, "memory": 2.0}
    optimizer = make(model, **settings)
    run(model, optimizer, range(15))
    twin, other = resumed(optimizer, model, **settings)
    for each, mine in ((model, optimizer), (twin, other)):
        run(each, mine, range(15, 20))
        assert mine.plan.settings["warmup_steps"] == 20


@by_space
def test_the_state_dict_of_step_0_starts_a_new_warmup(space):
    model = make_model()
    optimizer = make(model, space=space, memory=0.13)
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
    content["facts"] |= {"operations_per_byte": 100.0, "device": "cuda"}
    group["planner"] = json.dumps(content)
    optimizer.load_state_dict(saved)
    assert optimizer.replan().settings["operations_per_byte"] == 100.0


# ---- all or nothing ----


def damaged(path: tuple[Any, ...], value: Any) -> Any:
    model = make_model()
    optimizer = make(model, space="paper")
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
DAMAGES = {
    "samples of fewer coordinates": ((*SAMPLES, "0", "first"), lambda first: first[:-1]),
    "samples that are not finite": ((*SAMPLES, "0", "second"), lambda second: second * math.nan),
    "a negative square": ((*SAMPLES, "0", "second"), lambda second: second - 1),
    "samples of another dtype": ((*SAMPLES, "0", "first"), lambda first: first.float()),
    "no samples": (SAMPLES, lambda _: {}),
    "samples that are a list": (SAMPLES, lambda _: [1]),
    "no planner's JSON": (PLANNER, "{"),
    "another version": (PLANNER, in_planner("version", 7)),
    "negative steps": (PLANNER, in_planner("progress", "steps", -1)),
    "a budget of nothing": (PLANNER, in_planner("has", "memory", "some")),
    "half a warm-up": (PLANNER, in_planner("has", "warmup", 2.5)),
    "a parameter that is not there": (PLANNER, in_planner("samples", "names", ["9.9"])),
    "an unknown role": (PLANNER, in_planner("facts", "roles", {"0.0": "tensor"})),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint_changes_nothing(case):
    saved = damaged(*DAMAGES[case])
    model = make_model()
    optimizer = make(model, space="paper")
    run(model, optimizer, range(3))
    before = snapshot(model, optimizer)
    with pytest.raises(CheckpointError, match=r"checkpoint"):
        optimizer.load_state_dict(saved)
    assert_same(snapshot(model, optimizer), before)
    run(model, optimizer, range(3, WARMUP + 2))
    assert optimizer.plan.settings["warmup_steps"] == WARMUP


@by_space
@pytest.mark.parametrize("steps_before", [2, WARMUP + 2])
def test_a_load_needs_one_tensor_more_at_most(space, steps_before):
    model = make_model()
    optimizer = make(model, space=space)
    run(model, optimizer, range(steps_before))
    saved = through_file(optimizer.state_dict())
    held = tensors(saved["state"])
    largest = max(param.numel() for param in model.parameters()) * 4
    other = make(make_model(), space=space)
    with PeakMemory(held) as memory:
        other.load_state_dict(saved)
    assert memory.peak <= sum(tensor.numel() * tensor.element_size() for tensor in held) + largest


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [tensor for each in value.values() for tensor in tensors(each)]
    return [value] if isinstance(value, torch.Tensor) else []


def test_without_its_layout_a_distributed_checkpoint_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="there is no plan in"):
        baoc.lay_out_for(BlockOptimizer(nn.Linear(8, 8)), torch.optim.AdamW(nn.Linear(8, 8).parameters()).state_dict())


# ---- nothing fails later that can fail at once ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup": 2.5}, "warmup is 2.5; it must be a whole number"),
        ({"warmup": math.nan}, "warmup is nan"),
        ({"warmup": True}, "warmup is True"),
        ({"settle": "a"}, "settle is 'a'; it must be a number above 0"),
        ({"settle": math.nan}, "settle is nan"),
        ({"replan_every": 2.5}, "replan_every is 2.5"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"sample_ratio": "a"}, "sampling ratio is 'a'"),
        ({"sample_ratio": math.nan}, "sampling ratio is nan"),
        ({"memory": 0.001, "warmup_base": "adamw-16", "forbid": "sgd*", "space": "paper"}, "no plan fits memory=0.001"),
        ({"warmup_base": "adamw-16", "forbid": {"nowhere*": "sgd*"}, "space": "paper"}, "names no block"),
        ({"time": 0.1, "warmup_base": "adamw-16"}, "no plan is within time=0.1"),
    ],
)
def test_it_is_refused_when_the_optimizer_is_built(settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        make(make_model(), **settings)
    assert "-" not in str(caught.value).partition("needs")[2].partition("B,")[0], "no negative sizes"


def test_patterns_hold_however_blocks_are_merged():
    """Units that share a block when gradients are seen are still told apart by name, and never left with nothing."""
    model = make_model()
    rules = {"1": ["adam*", "sgdw*", "adafactor*"], "2": ["sgd*", "adam-*"]}
    optimizer = make(model, space="paper", forbid=rules, memory=1.0, min_share=0.4)
    run(model, optimizer, range(WARMUP + 1))
    assert optimizer.plan.settings["warmup_steps"] == WARMUP
    first, second = (optimizer.plan.block_of(f"{i}.1.weight").configuration.mechanism_name for i in (1, 2))
    assert first.startswith("sgd") and not second.startswith("sgd")


@pytest.mark.parametrize("memory", [2.0, 1.0, 0.5, 0.0])
@by_space
def test_a_model_of_any_size_works_at_any_budget_its_cheapest_plan_fits(memory, space):
    for model in (nn.Linear(10, 10), nn.Linear(1, 1), nn.LayerNorm(3)):
        optimizer = BAOC(model, memory=memory, warmup=2, space=space, time=math.inf, candidates=("adamw-8", "sgd"))
        for _ in range(4):
            model(torch.randn(4, next(model.parameters()).shape[-1])).square().mean().backward()
            optimizer.step()
            assert not memory or state_bytes(optimizer) <= memory * optimizer.plan.reference_bytes


@by_space
@pytest.mark.parametrize("configuration", [None, "adamw-8"])
@pytest.mark.parametrize("steps_before", [0, 2, WARMUP + 1])
def test_parameters_that_join_keep_the_budget(space, configuration, steps_before):
    model, late = make_model(), nn.Linear(64, 80)
    optimizer = make(model, space=space, memory=1.0)
    run(model, optimizer, range(steps_before))
    given = {} if configuration is None else {"configuration": configuration}
    optimizer.add_param_group({"params": list(late.named_parameters()), **given})
    for step in range(steps_before, WARMUP + 4):
        late(torch.ones(2, 64)).square().mean().backward()
        run(model, optimizer, range(step, step + 1))
        assert state_bytes(optimizer) <= optimizer.plan.reference_bytes
    twin, twin_late = copy.deepcopy((model, late))
    other = make(twin, space=space, memory=1.0)
    other.add_param_group({"params": list(twin_late.named_parameters()), **given})
    other.load_state_dict(through_file(optimizer.state_dict()))
    assert other.plan == optimizer.plan and other.replan().state_bytes == optimizer.replan().state_bytes


def test_parameters_without_room_are_refused_as_a_whole():
    model = make_model()
    optimizer = make(model, memory=0.1)
    run(model, optimizer, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(PlanError, match=r"no room for the 1 parameters of another group: no plan fits memory=0\.1"):
        late = ("late", nn.Parameter(torch.ones(300, 300)))
        optimizer.add_param_group({"params": [late], "configuration": "adamw-32"})
    assert_same(optimizer.state_dict(), before)
    run(model, optimizer, range(2, WARMUP + 1))


def test_a_plan_that_cannot_be_made_is_tried_again(caplog):
    """Here a risk model of the user's fails, as anything may that is computed from gradients."""
    calls = []

    def broken(metrics, configuration, settings):
        if calls and calls[0] == "break":
            raise ArithmeticError("no risk today")
        return {"bits": 32.0 - configuration.switches.bits}

    model = make_model()
    optimizer = make(model, space="paper", risk=broken, replan_every=3, granularity="tensor")
    before = optimizer.plan
    calls.append("break")
    with caplog.at_level(logging.WARNING, logger="baoc"):
        run(model, optimizer, range(WARMUP + 1))
    assert "training goes on with the one it has" in caplog.text and "no risk today" in caplog.text
    assert optimizer.plan == before
    calls.clear()
    run(model, optimizer, range(WARMUP + 1, WARMUP + 4))
    assert optimizer.plan.settings["warmup_steps"] == WARMUP + 3


@by_space
def test_what_is_kept_of_a_profile_counts(space):
    model = make_model()
    optimizer = make(model, space=space, memory=0.4)
    for step in range(WARMUP + 3):
        run(model, optimizer, range(step, step + 1))
        assert state_bytes(optimizer) <= 0.4 * optimizer.plan.reference_bytes
    assert (optimizer.profile is None) == (not any("baoc.samples" in held for held in optimizer.state.values()))

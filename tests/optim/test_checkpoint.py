"""A run that is saved and resumed, in any of the usual ways, is the run that was never stopped."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import baoc
from baoc import CATALOG, Block, BlockOptimizer, Plan, parse
from tests.training import (
    REPRESENTATIVE,
    Net,
    ages,
    assert_same,
    assert_same_training,
    mixed_plan,
    shapes,
    snapshot,
    train,
    trained,
)

all_configurations = pytest.mark.parametrize("configuration", CATALOG, ids=str)
some_configurations = pytest.mark.parametrize("configuration", REPRESENTATIVE)


def through_file(state_dict):
    """``torch.save`` and the safe ``torch.load``, which takes no classes but torch's own."""
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_state_dict(model, optimizer):
    twin = copy.deepcopy(model)
    loaded = BlockOptimizer(twin)
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    return twin, loaded


def by_pickle(model, optimizer):
    return pickle.loads(pickle.dumps((model, optimizer)))


def by_deepcopy(model, optimizer):
    return copy.deepcopy((model, optimizer))


# ---- the same training, to the bit ----


@all_configurations
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("way", [by_state_dict, by_pickle, by_deepcopy])
def test_a_resumed_run_is_the_same_run(configuration, dtype, way):
    model, optimizer = trained(configuration, dtype)
    twin, resumed = way(model, optimizer)
    assert_same(resumed.state_dict(), optimizer.state_dict())
    assert resumed.plan == optimizer.plan
    assert_same_training(model, optimizer, twin, resumed)


@some_configurations
def test_what_is_saved_does_not_depend_on_the_instance(configuration):
    (_, one), (_, other) = trained(configuration), trained(configuration)
    assert_same(one.state_dict(), other.state_dict())


@some_configurations
def test_loading_does_not_write_to_the_state_dict(configuration):
    _, optimizer = trained("adamw-8")
    saved = copy.deepcopy(optimizer.state_dict())
    BlockOptimizer(Net(), plan=configuration).load_state_dict(saved)
    assert_same(saved, optimizer.state_dict())


def test_codes_and_exponents_keep_their_dtype_under_bf16_parameters():
    model, optimizer = trained("adamw-8", torch.bfloat16)
    twin, loaded = by_state_dict(model, optimizer)
    held = {
        key: value.dtype for key, value in loaded.state[twin.first.weight].items() if isinstance(value, torch.Tensor)
    }
    assert held == {
        "m.codes": torch.int8,
        "m.exponents": torch.uint8,
        "v.codes": torch.uint8,
        "v.exponents": torch.uint8,
        "w": torch.int8,
    }


@pytest.mark.parametrize("way", [by_pickle, by_deepcopy])
def test_copies_keep_all_public_attributes(way):
    model, optimizer = trained("adamw-8", kernel="eager")
    _, twin = way(model, optimizer)
    assert {name for name in vars(twin) if name[0] != "_"} == {name for name in vars(optimizer) if name[0] != "_"}
    assert (twin.plan, twin.kernel) == (optimizer.plan, optimizer.kernel)


@pytest.mark.parametrize("plan_given", [False, True])
def test_lr_scales_are_resumed_to_the_bit(plan_given):
    """Also scales that the plan leaves open and a migration has set."""
    model = nn.Sequential(nn.Linear(64, 72), nn.Linear(72, 64, bias=False))
    matched = Plan((Block("all", parse("sgdm-8"), shapes(model), lr_scale=0.1),))
    optimizer = BlockOptimizer(model, plan=matched)
    train(model, optimizer, range(3))
    twin = copy.deepcopy(model)
    resumed = BlockOptimizer(twin, plan="sgdm-8" if plan_given else None)
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    assert resumed.plan == optimizer.plan
    assert_same_training(model, optimizer, twin, resumed)


def test_a_mixed_plan_is_resumed_with_or_without_naming_it():
    model = Net()
    optimizer = BlockOptimizer(model, plan=mixed_plan(model, lr_scale=0.5))
    train(model, optimizer, range(3))
    for plan in (None, optimizer.plan):
        twin, (origin, original) = copy.deepcopy(model), copy.deepcopy((model, optimizer))
        resumed = BlockOptimizer(twin, plan=plan)
        resumed.load_state_dict(through_file(optimizer.state_dict()))
        assert resumed.plan == optimizer.plan
        assert_same_training(origin, original, twin, resumed)


# ---- older, named and hooked state dicts ----


def test_a_state_dict_without_newer_group_keys_loads():
    model, optimizer = trained("adamw-8")
    old = copy.deepcopy(optimizer.state_dict())
    for key in ("maximize", "beta2_decay", "adafactor_eps", "clip_threshold", "eps"):
        del old["param_groups"][0][key]
    twin = copy.deepcopy(model)
    loaded = BlockOptimizer(twin, plan="adamw-8")
    loaded.load_state_dict(old)
    assert_same_training(model, optimizer, twin, loaded)


@pytest.mark.parametrize("saved_named", [False, True])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("plan", [None, "adamw-8"])
def test_names_are_optional_on_either_side(saved_named, named, plan):
    model = Net()
    optimizer = BlockOptimizer(model.named_parameters() if saved_named else model.parameters(), plan="adamw-8")
    train(model, optimizer, range(3))
    twin = copy.deepcopy(model)
    loaded = BlockOptimizer(twin.named_parameters() if named else twin.parameters(), plan=plan)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_training(model, optimizer, twin, loaded)
    assert loaded.param_groups[0].get("param_names") == (list(shapes(model)) if named or saved_named else None)


def test_state_dict_hooks_run_around_it():
    _, optimizer = trained()
    calls = []
    optimizer.register_state_dict_pre_hook(lambda optimizer: calls.append("pre"))
    optimizer.register_state_dict_post_hook(lambda optimizer, state_dict: {**state_dict, "run": "a"})
    optimizer.register_state_dict_post_hook(lambda optimizer, state_dict: calls.append(state_dict["run"]))
    assert optimizer.state_dict()["run"] == "a"
    assert calls == ["pre", "a"]


def test_load_hooks_may_replace_the_state_dict_and_see_the_loaded_one():
    _, optimizer = trained(lr=0.1)
    seen = []

    def in_place(optimizer, state_dict):
        state_dict["param_groups"] = [{**group, "lr": group["lr"] * 2} for group in state_dict["param_groups"]]

    def replace(optimizer, state_dict):
        groups = [{**group, "lr": group["lr"] + 1} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    loaded = BlockOptimizer(Net())
    loaded.register_load_state_dict_pre_hook(in_place)
    loaded.register_load_state_dict_pre_hook(replace, prepend=True)
    loaded.register_load_state_dict_post_hook(lambda o: seen.append((o.param_groups[0]["lr"], len(o.state))))
    saved = optimizer.state_dict()
    loaded.load_state_dict(saved)
    assert seen == [(pytest.approx(2.2), 4)]
    assert saved["param_groups"][0]["lr"] == 0.1


def test_entries_of_others_in_state_are_passed_through():
    """Hooks of frameworks keep entries in ``state`` that belong to no parameter."""
    model, optimizer = trained()
    optimizer.state["framework"] = {"seen": 3}
    loaded = BlockOptimizer(Net())
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    assert loaded.state["framework"] == {"seen": 3}
    train(model, loaded, range(2))


# ---- torch.distributed.checkpoint ----

DCP_OPTIONS = {
    "plain": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


@all_configurations
def test_a_fresh_optimizer_can_be_saved_without_a_step(configuration):
    """Without any entry of state, DCP would make a step with zero gradients to create it."""
    model = Net()
    optimizer = BlockOptimizer(model, plan=configuration, lr=torch.tensor(0.01))
    before = copy.deepcopy(snapshot(model, optimizer))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("step"))
    state_dict = get_optimizer_state_dict(model, optimizer)
    assert not calls and not any(ages(optimizer)) and all(param.grad is None for param in model.parameters())
    assert_same(snapshot(model, optimizer), before)
    filled = {name for name, entry in state_dict["state"].items() if entry}
    assert filled == (set(shapes(model)) if configuration.mechanism.slots else set())
    twin = Net()
    assert_same_training(model, optimizer, twin, BlockOptimizer(twin, plan=configuration, lr=torch.tensor(0.01)))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("plan", [*REPRESENTATIVE, "mixed"])
@pytest.mark.parametrize("options", DCP_OPTIONS)
def test_distributed_checkpoints_resume_to_the_bit(plan, options, tmp_path):
    if (plan, options) == ("sgd", "full"):
        pytest.skip("torch cannot set a full state dict without any tensor in it")
    plan = mixed_plan(Net()) if plan == "mixed" else plan
    model, optimizer = trained(plan)
    settings = {"options": DCP_OPTIONS[options]}
    dcp.save(
        {"optimizer": get_optimizer_state_dict(model, optimizer, **settings)}, checkpoint_id=tmp_path, no_dist=True
    )
    twin = copy.deepcopy(model)
    resumed = BlockOptimizer(twin, plan=plan)
    target = {"optimizer": get_optimizer_state_dict(twin, resumed, **settings)}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    set_optimizer_state_dict(twin, resumed, target["optimizer"], **settings)
    assert_same_training(model, optimizer, twin, resumed)


# ---- torch.optim's own checkpoints ----

TORCH = {
    "adamw-32": (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.8, 0.99)}, "adamw"),
    "adam-32": (torch.optim.Adam, {"weight_decay": 0.1, "eps": 1e-6}, "adam"),
    "sgdm-32": (torch.optim.SGD, {"momentum": 0.7, "weight_decay": 0.1}, "sgd"),
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}, None),
    "adafactor": (torch.optim.Adafactor, {"weight_decay": 0.1, "d": 1.5, "beta2_decay": -0.7}, "adafactor"),
}


@pytest.mark.parametrize("configuration", TORCH)
def test_a_run_of_torchs_optimizer_is_continued(configuration):
    """State and settings come from the checkpoint."""
    cls, settings, _ = TORCH[configuration]
    model = Net()
    theirs = cls(model.parameters(), lr=0.01, **settings)
    train(model, theirs, range(3))
    twin = copy.deepcopy(model)
    ours = BlockOptimizer(twin, plan=configuration)
    ours.load_state_dict(through_file(theirs.state_dict()))
    train(model, theirs, range(3, 8))
    train(twin, ours, range(3, 8))
    torch.testing.assert_close(dict(twin.named_parameters()), dict(model.named_parameters()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("configuration", [name for name in TORCH if TORCH[name][2]])
def test_to_torch_gives_back_what_was_loaded(configuration, dtype):
    cls, settings, kind = TORCH[configuration]
    if cls is torch.optim.Adafactor and dtype.is_complex:
        pytest.skip("torch's Adafactor takes no complex parameters")
    params = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((72, 64), (7,), (4, 3, 2))]
    theirs = cls(params, lr=0.01, **settings)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn_like(param)
        theirs.step()
    ours = BlockOptimizer(params, plan=configuration)
    ours.load_state_dict(theirs.state_dict())
    again = cls(params)
    again.load_state_dict(baoc.to_torch(ours, kind))
    assert_same(again.state_dict(), theirs.state_dict())


def test_torchs_checkpoint_is_migrated_into_any_plan():
    model = Net()
    theirs = torch.optim.AdamW(model.parameters())
    train(model, theirs, range(3))
    for configuration in CATALOG:
        twin = copy.deepcopy(model)
        ours = BlockOptimizer(twin, plan=configuration)
        ours.load_state_dict(theirs.state_dict())
        train(twin, ours, range(3, 5))
        assert {block.configuration for block in ours.plan.blocks} == {configuration}
        assert baoc.state_bytes(ours) == ours.plan.state_bytes


def test_torchs_state_is_laid_out_as_ours():
    """State from torch has the parameter's strides; compiled kernels see every buffer as one flat row."""
    weight = nn.Parameter(torch.randn(64, 72).t())
    theirs = torch.optim.AdamW([weight])
    weight.grad = torch.randn(72, 64)
    theirs.step()
    ours = BlockOptimizer([weight])
    ours.load_state_dict(theirs.state_dict())
    assert ours.state[weight]["m"].is_contiguous()
    assert_same(ours.state[weight]["m"], theirs.state[weight]["exp_avg"])


# ---- another plan ----


@pytest.mark.parametrize("saved", REPRESENTATIVE)
@some_configurations
def test_a_checkpoint_of_another_plan_is_migrated(saved, configuration):
    model, optimizer = trained(saved)
    loaded = BlockOptimizer(model, plan=configuration)
    loaded.load_state_dict(through_file(optimizer.state_dict()))
    train(model, loaded, range(3, 5))
    assert {block.configuration for block in loaded.plan.blocks} == {parse(configuration)}
    assert baoc.state_bytes(loaded) == loaded.plan.state_bytes
    assert all(param.isfinite().all() for param in model.parameters())


def test_without_a_plan_the_checkpoints_own_is_taken_over():
    model, optimizer = trained("adamw-8")
    loaded = BlockOptimizer(model)
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.plan == optimizer.plan


def test_a_plan_is_in_a_checkpoint_once():
    """However many parameters there are."""
    params = [(f"layer.{i}.weight", nn.Parameter(torch.ones(2, 2))) for i in range(300)]
    plan = Plan(tuple(Block(f"b{i}", parse("sgd"), {n: (2, 2)}, why="w" * 50) for i, (n, _) in enumerate(params)))
    state_dict = BlockOptimizer(params, plan=plan).state_dict()
    file = io.BytesIO()
    torch.save(state_dict, file)
    assert file.getvalue().count(b"w" * 50) == 300
    assert Plan.from_json(state_dict["param_groups"][0]["plan"]).blocks[7].name == "b7"


# ---- checkpoints that do not fit ----


class Other(nn.Module):
    """``Net`` with some of its parameters replaced, or in another order."""

    def __init__(self, **replaced: nn.Parameter) -> None:
        super().__init__()
        for name, param in {**{k.replace(".", "_"): v for k, v in Net().named_parameters()}, **replaced}.items():
            self.register_parameter(name, param)


def saved_by(params) -> dict:
    params = list(params)
    optimizer = BlockOptimizer(params, plan="adamw-8")
    for _, param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer.state_dict()


def saved_plan() -> str:
    return saved_by(Net().named_parameters())["param_groups"][0]["plan"]


def edited(path, value):
    """A right checkpoint with one thing in it replaced, or dropped if ``value`` is ``None``."""
    state_dict = copy.deepcopy(saved_by(Net().named_parameters()))
    place = state_dict
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return state_dict


def torch_state(cls, **settings):
    model = Net()
    optimizer = cls(model.parameters(), **settings)
    train(model, optimizer, range(1))
    return optimizer.state_dict()


BAD_CHECKPOINTS = {
    "more parameters": (
        "size of optimizer's group",
        lambda: saved_by(Other(new=nn.Parameter(torch.ones(2))).named_parameters()),
    ),
    "more groups": (
        "different number of parameter groups",
        lambda: edited(["param_groups"], saved_by(Net().named_parameters())["param_groups"] * 2),
    ),
    "another shape": (
        "'second.weight' has shape",
        lambda: saved_by(Other(second_weight=nn.Parameter(torch.ones(64, 80))).named_parameters()),
    ),
    "another order": ("another order", lambda: saved_by(reversed(list(Net().named_parameters())))),
    "codes as floats": ("'first.weight'.*torch.int8", lambda: edited(["state", 1, "m.codes"], torch.zeros(72, 64))),
    "no exponents": ("'first.weight'.*'m.exponents'.*nothing", lambda: edited(["state", 1, "m.exponents"], None)),
    "no ages": ("'first.weight'.*'m.age'", lambda: edited(["state", 1, "m.age"], None)),
    "a foreign state": ("'step', 'square_avg'", lambda: torch_state(torch.optim.RMSprop)),
    "a bad lr": ("invalid lr: nan", lambda: edited(["param_groups", 0, "lr"], math.nan)),
    "bad betas": (r"invalid betas\[0\]", lambda: edited(["param_groups", 0, "betas"], (1.5, 0.9))),
    "an unknown configuration": (
        "unknown update rule 'adamz'",
        lambda: edited(["param_groups", 0, "plan"], saved_plan().replace("adamw[", "adamz[")),
    ),
    "no groups": ("no 'param_groups'", lambda: edited(["param_groups"], None)),
    "no state": ("no 'state'", lambda: edited(["state"], None)),
    "a group without params": ("param group 0 has no 'params'", lambda: edited(["param_groups", 0, "params"], None)),
    "a missing parameter": ("no state of parameter 'first.weight'", lambda: edited(["state", 1], None)),
    "no dict for a parameter": ("'first.weight' is a list", lambda: edited(["state", 1], [3])),
    "a name too few": (
        "4 parameters and 3 names",
        lambda: edited(["param_groups", 0, "param_names"], ["gain", "first.weight", "first.bias"]),
    ),
    "exponents of no number": (
        "'v' of parameter 'first.weight' has exponents above 221",
        lambda: edited(["state", 1, "v.exponents"], torch.full((72, 1), 222, dtype=torch.uint8)),
    ),
    "a negative second moment": (
        "'v' of parameter 'gain' has negative numbers",
        lambda: edited(["state", 0, "v"], torch.tensor(-1.0)),
    ),
    "a negative age": ("'first.weight' has -3 for its 'm.age'", lambda: edited(["state", 1, "m.age"], -3)),
    "half an age": ("'first.weight' has 1.5 for its 'm.age'", lambda: edited(["state", 1, "m.age"], 1.5)),
    "a plan that is no plan": ("plan is damaged", lambda: edited(["param_groups", 0, "plan"], "{")),
    "a plan of fewer parameters": (
        "says nothing about parameter 'second.weight'",
        lambda: edited(["param_groups", 0, "plan"], saved_plan().replace('"0.3"', '"0.9"')),
    ),
    "a plan of more parameters": (
        "speaks of parameter '0.9'",
        lambda: edited(["param_groups", 0, "plan"], saved_plan().replace('"0.3"', '"0.9": [2], "0.3"')),
    ),
    "amsgrad": ("amsgrad", lambda: torch_state(torch.optim.AdamW, amsgrad=True)),
    "nesterov": ("nesterov", lambda: torch_state(torch.optim.SGD, momentum=0.9, nesterov=True)),
}


@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
@pytest.mark.parametrize("plan", ["adamw-8", "sgdm-8"])
def test_a_checkpoint_that_does_not_fit_changes_nothing(case, plan):
    message, state_dict = BAD_CHECKPOINTS[case]
    model, optimizer = trained(plan)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict())
    assert_same(snapshot(model, optimizer), before)

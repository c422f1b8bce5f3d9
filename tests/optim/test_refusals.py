"""Wrong input is refused with an error that says what is wrong, and a step that fails leaves everything as it was."""

from __future__ import annotations

import copy
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import baoc.optim.kernels
from baoc import BAOC, Block, BlockOptimizer, CheckpointError, ConfigurationError, Plan, PlanError
from tests.training import Net, assert_same, backward, mixed_plan, snapshot, train, trained

# ---- arguments ----


BAD_SETTINGS = [
    ({"lr": -1e-3}, "invalid lr: -0.001"),
    ({"lr": math.nan}, "invalid lr: nan"),
    ({"lr": math.inf}, "invalid lr: inf"),
    ({"lr": torch.tensor(-1.0)}, "invalid lr"),
    ({"lr": torch.tensor([1e-3, 1e-3])}, "Tensor lr must be 1-element"),
    ({"betas": (1.0, 0.9)}, r"invalid betas\[0\]: 1.0"),
    ({"betas": (0.9, -0.1)}, r"invalid betas\[1\]: -0.1"),
    ({"betas": (0.9,)}, "invalid betas"),
    ({"betas": (0.9, math.nan)}, r"invalid betas\[1\]: nan"),
    ({"eps": -1e-8}, "invalid eps: -1e-08"),
    ({"eps": math.nan}, "invalid eps: nan"),
    ({"weight_decay": -1}, "invalid weight_decay: -1"),
    ({"weight_decay": math.inf}, "invalid weight_decay: inf"),
    ({"lr": None}, "invalid lr: None"),
    ({"lr": 10**400}, "invalid lr: an integer of 1329 bits"),
    ({"betas": (10**400, 0.9)}, r"invalid betas\[0\]: an integer of 1329 bits"),
    ({"weight_decay": 10**400}, "invalid weight_decay: an integer of 1329 bits"),
    *(
        ({"maximize": value}, "invalid maximize: .*True or False")
        for value in (Decimal(0), Fraction(0), 0, 1.0, "no", None, np.int64(1), torch.tensor(True))
    ),
    ({"betas": 0.9}, "invalid betas: 0.9. It must be two numbers"),
    ({"betas": (0.9, None)}, r"invalid betas\[1\]: None"),
    ({"betas": ("0.9", 0.99)}, r"invalid betas\[0\]: '0.9'. It must be a number in"),
    ({"betas": (0.9, torch.tensor(0.99))}, r"invalid betas\[1\]: tensor\(0.99"),
    ({"eps": Decimal("1e-8")}, r"invalid eps: Decimal\('1E-8'\)"),
    ({"weight_decay": Fraction(1, 10)}, r"invalid weight_decay: Fraction\(1, 10\)"),
    ({"clip_threshold": None}, "invalid clip_threshold: None"),
    ({"adafactor_eps": 1e-3}, "invalid adafactor_eps: 0.001"),
    ({"beta2_decay": 0.5}, "invalid beta2_decay: 0.5"),
    ({"clip_threshold": 0.5}, "invalid clip_threshold: 0.5"),
    ({"adafactor_eps": (-1.0, 1e-3)}, "invalid adafactor_eps"),
    ({"update_rms": 0.0}, "invalid update_rms: 0.0"),
    ({"update_rms": 10**400}, "invalid update_rms: an integer of 1329 bits"),
    ({"nesterov_momentum": 1.0}, "invalid nesterov_momentum: 1.0"),
    ({"newton_schulz": (3.4445, -4.775, 2.0315)}, "invalid newton_schulz.*triples"),
    ({"newton_schulz": ()}, "invalid newton_schulz"),
    ({"lion_beta2": 1.0}, "invalid lion_beta2: 1.0"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        BlockOptimizer(Net(), **settings)
    optimizer = BlockOptimizer(Net().parameters())
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=f"param group 1: .*{message}|{message}"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], **settings})
    assert_same(optimizer.state_dict(), before)


def test_bad_defaults_are_refused_though_no_group_uses_them():
    """As torch does: a later group would."""
    with pytest.raises(ValueError, match="invalid lr: -1"):
        BlockOptimizer([{"params": Net().parameters(), "lr": 0.1}], lr=-1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fused": True}, r"BlockOptimizer has no argument 'fused'.*Known: adafactor_eps"),
        ({"weigth_decay": 0.1}, r"no argument 'weigth_decay'. Did you mean 'weight_decay'\?"),
        ({"plan": 5}, "5 is not a configuration. Write one as text"),
        ({"plan": ["adamw-8"]}, "is not a configuration"),
    ],
)
def test_what_is_not_an_argument_is_said_in_one_line(arguments, message):
    with pytest.raises((TypeError, ConfigurationError), match=message) as caught:
        BlockOptimizer(Net(), **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: {"memory": 1e308}, "memory"),
        (lambda: {"memory": f"1{'0' * 400}GiB"}, "memory"),
        (lambda: {"planner": baoc.EffectPlanner(time="fast")}, "time must be a positive ratio .* got 'fast'"),
        (lambda: {"planner": baoc.PaperPlanner(time=-1.0)}, "time must be a positive ratio .* got -1.0"),
        (lambda: {"planner": baoc.EffectPlanner(candidates=())}, "candidates must name at least one configuration"),
        (lambda: {"planner": baoc.PaperPlanner(candidates=(5,))}, "5 is not a configuration"),
    ],
)
def test_a_bad_budget_or_candidate_is_said_in_one_line(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        baoc.BAOC(Net(), **arguments())
    assert "\n" not in str(caught.value)


def test_candidates_may_be_spelled():
    for candidates in ("adamw-8", ("adamw-8",), [baoc.parse("adamw-8")]):
        planner = baoc.EffectPlanner(time=math.inf, candidates=candidates)
        optimizer = baoc.BAOC(Net(), memory=1.0, planner=planner, verbose=False)
        assert {block.configuration for block in optimizer.plan.blocks} == {baoc.parse("adamw-8")}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_double_precision_is_refused_when_it_is_offered(dtype):
    """fp32 state would lose its range: a gradient of 1e39 became NaN."""
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    with pytest.raises(TypeError, match=r"'weight' is torch\..*model.float\(\)"):
        BlockOptimizer([("weight", weight)])
    optimizer = BlockOptimizer([("other", nn.Parameter(torch.ones(4)))])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(TypeError, match="'weight'"):
        optimizer.add_param_group({"params": [("weight", weight)]})
    assert_same(optimizer.state_dict(), before)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe{}", b"[" * 100_000, b'{"format": "baoc.plan", "version": 1, "blocks": 3}']
)
def test_a_file_that_is_no_plan_is_said_in_one_line(content, tmp_path):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(PlanError, match=r"not a plan file|damaged") as caught:
        Plan.load(tmp_path / "plan.json")
    assert "\n" not in str(caught.value)


def test_a_mechanism_that_no_parameter_suits_is_said():
    vectors = nn.Sequential(nn.LayerNorm(8), nn.BatchNorm1d(8))
    with pytest.raises(
        PlanError, match=r"muon does not suit any of the 4 parameters.*vector.*'muon.m=int8. else adamw-8'"
    ):
        BlockOptimizer(vectors, plan="muon-8")
    optimizer = BlockOptimizer(vectors, plan="muon-8 else adamw-16")
    with pytest.raises(PlanError, match="spectral does not suit any"):
        optimizer.set_plan("spectral")
    assert {str(block.configuration) for block in optimizer.plan.blocks} == {"adamw[m=bf16,v=bf16]"}


def test_a_setting_that_the_plan_has_no_use_for_is_said():
    with pytest.raises(ValueError, match=r"update_rms=0.2 would do nothing: .*setting of .*muon.*has adamw"):
        BlockOptimizer(Net(), plan="adamw-8", update_rms=0.2)
    assert BlockOptimizer(Net(), plan="muon-8", update_rms=0.2).param_groups[0]["update_rms"] == 0.2


def test_an_unknown_configuration_or_kernel_is_refused():
    with pytest.raises(ConfigurationError, match=r"unknown update rule 'adamv'.*Did you mean"):
        BlockOptimizer(Net(), plan="adamv-8")
    optimizer = BlockOptimizer([nn.Parameter(torch.ones(2))])
    with pytest.raises(ConfigurationError, match="unknown codec 'int9'"):
        optimizer.add_param_group({"params": Net().parameters(), "configuration": "sgdm[m=int9]"})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="unknown kernel 'cuda'"):
        BlockOptimizer(Net(), kernel="cuda")


WEIGHT = nn.Parameter(torch.ones(2))
BAD_PARAMS = {
    "iterable of Tensors or dicts": WEIGHT,
    "ordered collections": [{"params": {WEIGHT}}],
    "empty parameter list": [],
    "can only optimize Tensors": [1.0],
    "non-leaf": [WEIGHT * 2],
    "Some param names are missing": [("weight", WEIGHT), nn.Parameter(torch.ones(2))],
    "cannot add param group without names": [
        {"params": [("weight", WEIGHT)]},
        {"params": [nn.Parameter(torch.ones(2))]},
    ],
    "no trainable parameters": Net().requires_grad_(False),
}


@pytest.mark.parametrize("message", BAD_PARAMS)
def test_params_must_be_what_torch_takes(message):
    with pytest.raises((TypeError, ValueError), match=message):
        BlockOptimizer(BAD_PARAMS[message])


# ---- steps ----


def write_nan(model, optimizer):
    optimizer.param_groups[-1]["lr"] = math.nan


def write_two_numbers(model, optimizer):
    optimizer.param_groups[-1]["lr"] = torch.tensor([0.1, 0.1])


def write_bad_betas(model, optimizer):
    optimizer.param_groups[-1]["betas"] = (math.nan, 0.999)


def make_sparse(model, optimizer):
    model.second.weight.grad = model.second.weight.grad.to_sparse()


def leave_a_stale_gradient(model, optimizer):
    model.second.weight.data = torch.ones(64, 71)


def change_shape(model, optimizer):
    model.second.weight.data = torch.ones(32, 144)
    model.second.weight.grad = torch.ones(32, 144)


def move_state(model, optimizer):
    state = optimizer.state[model.second.weight]
    for key, held in state.items():
        state[key] = held.to("meta") if isinstance(held, torch.Tensor) else held


def free_the_parameter(model, optimizer):
    model.second.weight.untyped_storage().resize_(0)


def free_the_state(model, optimizer):
    optimizer.state[model.second.weight]["v.codes"].untyped_storage().resize_(0)


def free_the_gradient(model, optimizer):
    model.second.weight.grad.untyped_storage().resize_(0)


SABOTAGES = {
    write_nan: "param group 1: invalid lr: nan",
    write_two_numbers: "param group 1: .*lr",
    write_bad_betas: r"param group 1: invalid betas\[0\]: nan",
    make_sparse: "'second.weight' has a sparse gradient",
    leave_a_stale_gradient: "'second.weight'",
    change_shape: r"'second.weight' has shape \(32, 144\)",
}
# what C code would have followed to a bad address
FATAL = {
    move_state: "'second.weight' .* keeps its state on cpu, but its 'm.codes' is on meta",
    free_the_parameter: "'second.weight' cannot be updated: the memory of it was freed",
    free_the_state: "'second.weight' cannot be updated: the memory of its 'v.codes' was freed",
    free_the_gradient: "'second.weight' cannot be updated: the memory of its gradient was freed",
}


@pytest.mark.parametrize("configuration", ["adamw-8", "adafactor", "sgd"])
@pytest.mark.parametrize("sabotage", SABOTAGES)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_step_that_fails_changes_nothing(configuration, sabotage, steps_before):
    if sabotage is change_shape and (configuration == "sgd" or not steps_before):
        pytest.skip("without state any shape is right")
    model = Net()
    groups = [[("gain", model.gain)], [item for item in model.named_parameters() if item[0] != "gain"]]
    optimizer = BlockOptimizer([{"params": group} for group in groups], plan=configuration)
    train(model, optimizer, range(steps_before))
    backward(model, 3)
    weight = model.second.weight
    data, grad, settings = weight.data, weight.grad, dict(optimizer.param_groups[-1])
    before = snapshot(model, optimizer)
    sabotage(model, optimizer)
    with pytest.raises((RuntimeError, ValueError), match=SABOTAGES[sabotage]):
        optimizer.step()
    weight.grad = None
    weight.data, weight.grad = data, grad
    optimizer.param_groups[-1].update(settings)
    assert_same(snapshot(model, optimizer), before)


@pytest.mark.parametrize("sabotage", FATAL)
@pytest.mark.parametrize("kernel", ["native", "eager"])
def test_bad_addresses_are_refused_by_name(sabotage, kernel):
    model, optimizer = trained("adamw-8", kernel=kernel)
    backward(model, 3)
    before = copy.deepcopy(model.first.weight)
    sabotage(model, optimizer)
    with pytest.raises(RuntimeError, match=FATAL[sabotage]):
        optimizer.step()
    assert torch.equal(model.first.weight, before)


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_kernel_that_cannot_run_changes_nothing(monkeypatch, steps_before):
    model = Net()
    optimizer = BlockOptimizer(model, plan="adamw-8")
    train(model, optimizer, range(steps_before))
    backward(model, 3)
    before = snapshot(model, optimizer)

    def choose(request, device):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(baoc.optim.kernels, "choose", choose)
    with pytest.raises(RuntimeError, match="no compiler"):
        optimizer.step()
    assert_same(snapshot(model, optimizer), before)


# ---- plans ----


def without(plan: Plan, name: str) -> Plan:
    keep = (Block(b.name, b.configuration, {k: v for k, v in b.parameters.items() if k != name}) for b in plan.blocks)
    return Plan(tuple(keep))


BAD_PLANS = {
    "does not cover 'first.bias'": lambda plan: without(plan, "first.bias"),
    "the plan has 'extra'": lambda plan: Plan((*plan.blocks, Block("more", baoc.parse("sgd"), {"extra": (3,)}))),
    r"'gain' has shape \(\)": lambda plan: Plan(
        (*without(plan, "gain").blocks, Block("g", baoc.parse("sgd"), {"gain": (1,)}))
    ),
    "'gain' is in two blocks": lambda plan: Plan((*plan.blocks, Block("g", baoc.parse("sgd"), {"gain": ()}))),
}


@pytest.mark.parametrize("message", BAD_PLANS)
def test_a_plan_must_cover_every_parameter_once(message):
    model, optimizer = trained("adamw-8")
    before = snapshot(model, optimizer)
    with pytest.raises(PlanError, match=message):
        BlockOptimizer(Net(), plan=BAD_PLANS[message](mixed_plan(model)))
    with pytest.raises(PlanError, match=message):
        optimizer.set_plan(BAD_PLANS[message](mixed_plan(model)))
    assert_same(snapshot(model, optimizer), before)


def test_a_plan_and_a_groups_configuration_are_two_answers():
    model = Net()
    with pytest.raises(PlanError, match="Drop one of them"):
        BlockOptimizer([{"params": model.named_parameters(), "configuration": "sgd"}], plan=mixed_plan(model))


@pytest.mark.parametrize("configuration", ["adamw-32", "adamw-8"])
@pytest.mark.parametrize("module", [slice(None), slice(1, None)], ids=["all", "a part"])
def test_a_model_in_double_precision_is_refused_before_anything_changes(module, configuration):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = BlockOptimizer(model, plan=configuration)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    model[module].double()
    before = copy.deepcopy((model.state_dict(), list(optimizer.state.values())))
    with pytest.raises(TypeError, match=r"torch\.float64"):
        optimizer.step()
    assert all(map(torch.equal, model.state_dict().values(), before[0].values()))
    for held, seen in zip(optimizer.state.values(), before[1]):
        assert all(torch.equal(torch.as_tensor(held[key]), torch.as_tensor(seen[key])) for key in seen)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("slot", ["m", "v"])
@pytest.mark.parametrize("configuration", ["adamw-32", "adamw-16"])
def test_state_that_is_not_finite_is_refused(configuration, slot, number):
    param = nn.Parameter(torch.zeros(70, 80))
    optimizer = BlockOptimizer([param], plan=configuration)
    param.grad = torch.ones_like(param)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0][slot][3, 4] = number
    with pytest.raises(CheckpointError, match=f"{slot!r} of parameter '0.0' has numbers that are not finite"):
        optimizer.load_state_dict(saved)


def test_budgets_and_multipliers_beyond_all_bounds_are_refused_in_one_line():
    with pytest.raises(PlanError, match="memory is too large, got an integer of more than 30 digits"):
        BAOC([nn.Parameter(torch.zeros(70, 80))], memory=10**400)
    text = Plan.uniform("adamw-8", {"w": (64, 64)}).to_json()
    with pytest.raises(PlanError, match="lr_scale of block 'all' must be a number from 1e-30 to 1e"):
        Plan.from_json(text.replace('"lr_scale": null', '"lr_scale": 1e300'))

"""State is allocated with the plan, follows its parameters until it has content, and is counted to the byte."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import baoc
from baoc import CATALOG, BlockOptimizer, parse, state_bytes
from tests.training import (
    REPRESENTATIVE,
    Net,
    ages,
    assert_same,
    backward,
    mixed_plan,
    shapes,
    snapshot,
    train,
    trained,
)

some_configurations = pytest.mark.parametrize("configuration", REPRESENTATIVE)


# ---- when state is allocated ----


def assert_complete(optimizer: BlockOptimizer) -> None:
    """Every trainable parameter has an entry, and what is held is what the plan says."""
    assert {id(param) for param in optimizer.state} == {id(m.param) for m in optimizer.members() if m.is_trained}
    assert state_bytes(optimizer) == optimizer.plan.state_bytes


@pytest.mark.parametrize("configuration", CATALOG, ids=str)
def test_state_is_there_with_the_plan(configuration):
    model, other = Net(), Net()
    optimizer = BlockOptimizer(model, plan=configuration)
    assert_complete(optimizer)
    optimizer.add_param_group({"params": list(other.named_parameters()), "configuration": configuration})
    assert_complete(optimizer)
    optimizer.set_plan("adamw-8")
    assert_complete(optimizer)
    optimizer.set_plan(configuration, inherit=False)
    assert_complete(optimizer)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    assert_complete(optimizer)
    assert not any(ages(optimizer)) and optimizer._steps == 0


def test_a_frozen_parameter_gets_state_with_its_first_gradient():
    model = Net()
    model.second.requires_grad_(False)
    optimizer = BlockOptimizer(model.named_parameters(), plan="adamw-8")
    assert model.second.weight not in optimizer.state
    train(model, optimizer, range(2))
    optimizer.set_plan("adamw-16")
    assert model.second.weight not in optimizer.state
    model.second.requires_grad_(True)
    train(model, optimizer, range(2, 3))
    assert optimizer.state[model.second.weight]["m.age"] == 1 and optimizer.state[model.first.weight]["m.age"] == 3


def new_objects(model: Net, optimizer: BlockOptimizer) -> None:
    """What sharding frameworks do: new parameters in the model, and in the groups of the optimizer."""
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(param.detach().clone()))
    optimizer.param_groups[0]["params"] = list(model.parameters())


def other_shapes(model: Net, optimizer: BlockOptimizer) -> None:
    for param in model.parameters():
        param.data = param.data.repeat(2, *[1] * (param.dim() - 1)) if param.dim() == 1 else param.data
    model.first.weight.data = model.first.weight.data.repeat(2, 1)
    model.second.weight.data = model.second.weight.data.repeat(1, 2)


CHANGES: dict[str, Callable[[Net, BlockOptimizer], object]] = {
    "half": lambda model, _: model.half(),
    "bfloat16": lambda model, _: model.bfloat16(),
    "other memory": lambda model, _: [setattr(param, "data", param.data.clone()) for param in model.parameters()],
    "new objects": new_objects,
    "other shapes": other_shapes,
}


@some_configurations
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_may_change_before_it_trains(configuration, change):
    model = Net()
    optimizer = BlockOptimizer(model, lr=0.01, plan=configuration)
    CHANGES[change](model, optimizer)
    twin = copy.deepcopy(model)
    fresh = BlockOptimizer(twin, lr=0.01, plan=configuration)
    train(model, optimizer, range(3))
    train(twin, fresh, range(3))
    assert_same(dict(model.named_parameters()), dict(twin.named_parameters()))
    assert state_bytes(optimizer) == state_bytes(fresh)
    assert len(optimizer.state_dict()["state"]) == len(fresh.state_dict()["state"])


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("is_set_later", [False, True])
@pytest.mark.parametrize(
    "given",
    [None, "adamw-8", "sgd", baoc.Plan.uniform("adamw-8", shapes(Net()))],
    ids=["default", "adamw-8", "sgd", "plan"],
)
def test_low_bits_of_a_cast_are_those_of_a_model_in_16_bits(given, is_set_later, steps):
    """A configuration then has ``w=8``, and a ``Plan`` keeps its bytes. A cast in training starts with none of them."""
    model = Net()
    other = "sgdm-8" if isinstance(given, baoc.Plan) else baoc.Plan.uniform("sgdm-8", shapes(model))
    optimizer = BlockOptimizer(model, plan=other if is_set_later else given)
    if is_set_later:
        optimizer.set_plan(given or "adamw-32")
    train(model, optimizer, range(steps))
    assert not any(block.configuration.weight for block in optimizer.plan.blocks)
    model, optimizer = copy.deepcopy((model, optimizer))
    model.bfloat16()
    train(model, optimizer, range(2))
    expected = "sr" if isinstance(given, baoc.Plan) else "8"
    assert {block.configuration.weight for block in optimizer.plan.blocks} == {expected}
    assert state_bytes(optimizer) == optimizer.plan.state_bytes
    assert {state["w.age"] for state in optimizer.state.values()} == {2}


def test_a_model_on_meta_may_move_to_a_device():
    with torch.device("meta"):
        model = Net()
    optimizer = BlockOptimizer(model, plan="adamw-8")
    assert all(tensor.is_meta for entry in optimizer.state.values() for tensor in entry.values() if is_tensor(tensor))
    model.to_empty(device="cpu")  # makes new parameters
    optimizer.param_groups[0]["params"] = list(model.parameters())
    for param in model.parameters():
        nn.init.constant_(param, 0.01)
    train(model, optimizer, range(2))
    assert all(tensor.is_cpu for entry in optimizer.state.values() for tensor in entry.values() if is_tensor(tensor))


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def test_state_with_content_is_not_dropped_when_it_does_not_fit():
    model, optimizer = trained("adamw-8")
    other_shapes(model, optimizer)
    backward(model, 3)
    with pytest.raises(RuntimeError, match=r"has shape .* Did the parameter or its state change its shape or device"):
        optimizer.step()


@some_configurations
def test_frameworks_may_replace_tensors_between_steps(configuration):
    """Offloading of state replaces its tensors, and sharding the memory of parameters, in the middle of a run."""
    (model, optimizer), (twin, reference) = trained(configuration), trained(configuration)
    for step in range(3, 6):
        for entry in optimizer.state.values():
            entry.update({key: value.clone() for key, value in entry.items() if is_tensor(value)})
        for param in model.parameters():
            param.data = param.data.clone()
        if step == 4:
            optimizer.state = type(optimizer.state)(dict, {key: dict(value) for key, value in optimizer.state.items()})
        train(model, optimizer, range(step, step + 1))
        train(twin, reference, range(step, step + 1))
    assert_same(snapshot(model, optimizer), snapshot(twin, reference))


def test_a_parameter_that_is_listed_twice_is_updated_once():
    weight, twin = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = BlockOptimizer([weight, weight], lr=0.1)
    reference = BlockOptimizer([twin], lr=0.1)
    for param, each in ((weight, optimizer), (twin, reference)):
        param.grad = torch.ones(4)
        each.step()
    assert_same(optimizer.state_dict(), reference.state_dict())
    assert_same(weight.detach(), twin.detach())


@pytest.fixture(params=["bfloat16", "meta"])
def odd_defaults(request):
    """Defaults of torch that must not matter: none of our tensors may rely on them."""
    if request.param == "meta":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.parametrize("kernel", ["native", "eager"])
@pytest.mark.parametrize("policy", ["step", "skip"])
@pytest.mark.parametrize("configuration", [*REPRESENTATIVE, "muon-8", "sinkhorn-8"])
def test_torchs_defaults_do_not_matter(configuration, kernel, policy, odd_defaults):
    runs = []
    for is_odd in (True, False):
        if not is_odd:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        generator = torch.Generator("cpu").manual_seed(0)
        settings = {"dtype": torch.float32, "device": "cpu", "generator": generator}
        params = [nn.Parameter(torch.randn(shape, **settings)) for shape in ((72, 64), (64,))]
        optimizer = BlockOptimizer(params, plan=f"{configuration}", kernel=kernel, on_nonfinite=policy)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, **settings)
            optimizer.step()
        optimizer.set_plan("adamw[m=int8,v=factored]")
        theirs = baoc.to_torch(optimizer)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
        runs.append((params, optimizer.state_dict()["state"], theirs["state"], optimizer.metrics()))
    assert_same(*runs)


# ---- interrupts ----


COMMITS = {
    *("_change_plan", "change", "run", "plan_so_far", "finish_change", "_current_members", "allocate", "_join_group"),
    *("add_param_group", "renamed", "follow", "extended"),
}
"""The functions that install what others compute: an interrupt below them is one at the line that called."""


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line of :data:`COMMITS`."""

    def __init__(self, line: int) -> None:
        self.left = line

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if "baoc/optim" not in frame.f_code.co_filename or frame.f_code.co_name not in COMMITS:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace

    def __enter__(self) -> Interrupt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)


def interrupted_at_each_line(make: Callable[[], BlockOptimizer], act: Callable[[BlockOptimizer], object]):
    """Yield an optimizer for every line at which an act can be interrupted."""
    line = 0
    while True:
        line += 1
        optimizer = make()
        try:
            with Interrupt(line):
                act(optimizer)
        except KeyboardInterrupt:
            yield optimizer
        else:
            return


def is_same(left: Any, right: Any) -> bool:
    try:
        assert_same(left, right)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("inherit", [True, False])
@pytest.mark.parametrize(("old", "new"), [("mixed", "adamw-8"), ("adamw-8", "sgdm-8"), ("adamw-8", "mixed")])
def test_a_change_of_plans_may_be_interrupted_at_any_line(old, new, inherit):
    plans = {"mixed": mixed_plan(Net())}
    old, new = (plans.get(name, name) for name in (old, new))
    before, after = trained(old)[1], trained(old)[1]
    after.set_plan(new, inherit=inherit)
    either = [
        {m.name: (m.configuration, optimizer.state[m.param]) for m in optimizer.members()}
        for optimizer in (before, after)
    ]
    found = set()
    models: list[Net] = []

    def make() -> BlockOptimizer:
        model, optimizer = trained(old)
        models[:] = [model]
        return optimizer

    for optimizer in interrupted_at_each_line(make, lambda each: each.set_plan(new, inherit=inherit)):
        for member in optimizer.members():
            is_new = is_same(optimizer.state[member.param], either[1][member.name][1])
            configuration, state = either[is_new][member.name]
            assert member.configuration == configuration
            assert_same(optimizer.state[member.param], state)
            found.add(is_new)
        assert optimizer.plan.state_bytes == state_bytes(optimizer)
        other = BlockOptimizer(Net())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert other.plan == optimizer.plan
        train(models[0], optimizer, range(3, 4))
    assert found == {False, True}


def test_a_new_group_may_be_interrupted_at_any_line():
    new = nn.Parameter(torch.ones(80, 80))
    model = Net()

    def act(optimizer: BlockOptimizer) -> None:
        optimizer.add_param_group({"params": [("new", new)], "configuration": "adamw-8"})

    for optimizer in interrupted_at_each_line(lambda: BlockOptimizer(model, plan="adamw-16"), act):
        is_there = len(optimizer.param_groups) == 2
        assert set(optimizer.plan.blocks[0].parameters) == set(shapes(model))
        assert len(optimizer.plan.blocks) == 1 + is_there
        assert_complete(optimizer)
        train(model, optimizer, range(1))
        if not is_there:
            act(optimizer)
        assert optimizer.members()[-1].configuration == parse("adamw-8")
        optimizer.state_dict()


# ---- whether a step was made ----


def test_a_step_says_whether_it_was_made():
    param = nn.Parameter(torch.ones(8))
    optimizer = BlockOptimizer([param], on_nonfinite="skip")
    assert optimizer._make_step() is False
    param.grad = torch.ones(8)
    assert optimizer._make_step() is True
    param.grad = torch.full((8,), torch.nan)
    assert optimizer._make_step(must_know=True) is False
    assert (optimizer._steps, ages(optimizer)) == (1, [1, 1])
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer._steps == 0


def test_underflow_is_warned_about_once(caplog):
    param = nn.Parameter(torch.ones(8, 1024))
    optimizer = BlockOptimizer([param], plan="adamw[m=int4,v=factored]")
    for _ in range(2):
        param.grad = torch.full((8, 1024), 1e-6)
        param.grad[:, ::32] = 1.0
        optimizer.step()
    with caplog.at_level(logging.WARNING, "baoc"):
        assert [optimizer.metrics()["underflow/all"] >= 0.5 for _ in range(2)] == [True, True]
    assert [record.getMessage() for record in caplog.records if "underflow" in record.getMessage()] == [
        caplog.records[0].getMessage()
    ]
    assert "'all'" in caplog.records[0].getMessage()


# ---- bytes ----


def holding(**state: Any) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight].update(state)
    return optimizer


class Projector:
    def __init__(self, basis: Tensor) -> None:
        self.rank = 2
        self.basis = basis
        self.itself = self


def test_tensors_in_dicts_and_lists() -> None:
    assert state_bytes(holding(step=3, m=torch.zeros(10), more={"rows": [torch.zeros(5, dtype=torch.int8)]})) == 45


def test_one_storage_counts_once() -> None:
    m = torch.zeros(10)
    assert state_bytes(holding(m=m, same=m, flat=m.view(2, 5))) == 40


def test_a_view_counts_with_what_it_keeps_alive() -> None:
    assert state_bytes(holding(basis=torch.zeros(10, 10)[:, :2])) == 400


def test_tensors_inside_of_tensor_subclasses() -> None:
    assert state_bytes(holding(v=TwoTensor(torch.zeros(10), torch.ones(10)))) == 80


def test_tensors_inside_of_objects() -> None:
    assert state_bytes(holding(projector=Projector(torch.zeros(6)))) == 24


def test_values_without_tensors_count_nothing() -> None:
    assert state_bytes(holding(step=1, name="adam", kind=Projector, nothing=None, rule=state_bytes)) == 0

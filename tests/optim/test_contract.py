"""``BlockOptimizer`` keeps the habits of ``torch.optim``: what users, schedulers, scalers and frameworks rely on."""

from __future__ import annotations

import copy
import math
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import baoc
from baoc import CATALOG, BlockOptimizer
from baoc.optim.kernels.eager import EagerKernel
from baoc.optim.kernels.native import NativeKernel
from tests.cases import gradients
from tests.training import REPRESENTATIVE, Net, ages, assert_same, backward, snapshot, train, trained

all_configurations = pytest.mark.parametrize("configuration", CATALOG, ids=str)
some_configurations = pytest.mark.parametrize("configuration", REPRESENTATIVE)

SCHEDULES = {
    "none": None,
    "step": partial(lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "warm-up from zero": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: min(1.0, step / 4)),
    "exponential": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "warm restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=4),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.02, total_steps=12),
    "cyclic": partial(lr_scheduler.CyclicLR, base_lr=0.001, max_lr=0.02, step_size_up=3, cycle_momentum=True),
}
WRITE_BETAS = ("one cycle", "cyclic")


def stepped(params, grads, optimizer) -> None:
    for param, grad in zip(params, grads):
        param.grad = grad
    optimizer.step()


# ---- the direction of a step ----


@some_configurations
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("maximize", [False, True])
def test_the_loss_goes_where_it_should(configuration, schedule, maximize):
    model = Net()
    optimizer = BlockOptimizer(model, lr=0.01, plan=configuration, maximize=maximize)
    scheduler = SCHEDULES[schedule](optimizer) if SCHEDULES[schedule] else None
    betas = optimizer.param_groups[0]["betas"]
    before = backward(model, 0)
    for _ in range(10):
        loss = backward(model, 0)
        optimizer.step()
        if scheduler is not None:
            scheduler.step(*([loss] if schedule == "plateau" else []))
    assert (backward(model, 0) > before) == maximize
    assert (optimizer.param_groups[0]["betas"] != betas) == (schedule in WRITE_BETAS)


@some_configurations
def test_groups_are_like_optimizers_of_their_own(configuration):
    """lr, decay, betas and direction of a group are its own."""
    settings = [
        {"lr": 0.01, "weight_decay": 0.1},
        {"lr": 0.002, "weight_decay": 0.0, "betas": (0.8, 0.99)},
        {"lr": 0.005, "maximize": True},
    ]
    together = [nn.Parameter(torch.randn(72, 64)) for _ in settings]
    alone = copy.deepcopy(together)
    grouped = BlockOptimizer([{"params": [p], **s} for p, s in zip(together, settings)], plan=configuration)
    single = [BlockOptimizer([p], plan=configuration, **s) for p, s in zip(alone, settings)]
    for grad in gradients((72, 64), 3):
        stepped(together, [grad] * 3, grouped)
        for param, optimizer in zip(alone, single):
            stepped([param], [grad], optimizer)
    assert_same(together, alone)


@some_configurations
@pytest.mark.parametrize("dims", [0, 1, 2])
def test_lr_may_be_a_tensor_that_is_written_to(configuration, dims):
    lr = torch.tensor(2**-7).reshape([1] * dims)
    model, twin = Net(), Net()
    optimizer, reference = BlockOptimizer(model, lr=lr, plan=configuration), BlockOptimizer(twin, plan=configuration)
    for step, value in enumerate((2**-7, 2**-9, 2**-8)):
        lr.fill_(value)
        reference.param_groups[0]["lr"] = value
        train(model, optimizer, range(step, step + 1))
        train(twin, reference, range(step, step + 1))
    assert_same(dict(model.named_parameters()), dict(twin.named_parameters()))
    assert optimizer.param_groups[0]["lr"] is lr


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "none"])
def test_schedulers_may_write_to_a_tensor_lr(schedule):
    """A tensor lr that a scheduler fills in place is the float it would have set."""
    params = []
    for lr in (0.01, torch.tensor(0.01, dtype=torch.float64)):
        model = Net()
        optimizer = BlockOptimizer(model, lr=lr, plan="adamw-8")
        scheduler = SCHEDULES[schedule](optimizer)
        for step in range(6):
            train(model, optimizer, range(step, step + 1))
            scheduler.step(*([1.0] if schedule == "plateau" else []))
        params.append(dict(model.named_parameters()))
    torch.testing.assert_close(*params)


def test_a_warm_up_that_starts_at_zero_counts_its_first_step():
    """Half of LoRA's first gradients are zero, and schedules start at lr 0: torch counts that step too."""
    params = {cls: [nn.Parameter(torch.ones(8)) for _ in range(2)] for cls in (BlockOptimizer, torch.optim.AdamW)}
    for cls, (zero_at_first, other) in params.items():
        optimizer = cls([zero_at_first, other], lr=0.01, weight_decay=0.0)
        scheduler = SCHEDULES["warm-up from zero"](optimizer)
        for step in range(4):
            stepped([zero_at_first, other], [torch.full((8,), float(step > 0)), torch.ones(8)], optimizer)
            scheduler.step()
    torch.testing.assert_close(*params.values())


@pytest.mark.parametrize("kernel", ["native", "eager"])
def test_a_first_step_with_lr_and_gradients_of_zero_counts(kernel):
    """As in torch."""
    params = [nn.Parameter(torch.ones(8)) for _ in range(2)]
    ours = BlockOptimizer(params[:1], lr=0.0, weight_decay=0.0, kernel=kernel)
    theirs = torch.optim.AdamW(params[1:], lr=0.0, weight_decay=0.0)
    for lr, grad in ((0.0, 0.0), (0.0, 0.0), (0.1, 1.0), (0.1, 0.5)):
        for param, optimizer in zip(params, (ours, theirs)):
            optimizer.param_groups[0]["lr"] = lr
            stepped([param], [torch.full((8,), grad)], optimizer)
    assert ages(ours) == [4, 4]
    torch.testing.assert_close(*params)


@pytest.mark.parametrize("beta", [1.0, 5.0, -0.1])
def test_a_schedule_may_pass_through_betas_that_nothing_could_step_with(beta):
    """As in torch: settings are judged when they are given. A step that needs them says what is wrong."""
    param = nn.Parameter(torch.ones(8))
    optimizer = BlockOptimizer([param], plan="adamw-32")
    optimizer.param_groups[0]["betas"] = (beta, 0.99)
    optimizer.step()
    assert ages(optimizer) == [0, 0]
    if beta >= 1:
        with pytest.raises(ValueError, match=r"betas of adamw must be in \[0, 1\).*Check what the schedule"):
            stepped([param], [torch.ones(8)], optimizer)
        assert torch.equal(param, torch.ones(8)) and not any(ages(optimizer))
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    stepped([param], [torch.ones(8)], optimizer)
    assert ages(optimizer) == [1, 1]


def test_ages_advance_after_the_kernel_has_returned(monkeypatch):
    model, optimizer = trained("adamw-8")
    before = ages(optimizer)
    backward(model, 3)

    def fails(self, jobs):
        list(jobs)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(NativeKernel, "run", fails)
        patched.setattr(EagerKernel, "run", fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step()
    assert ages(optimizer) == before
    optimizer.step()
    assert ages(optimizer) == [age + 1 for age in before]


def test_groups_may_come_and_go_without_our_being_asked():
    """Frameworks edit ``param_groups``: the plan follows."""
    model = Net()
    optimizer = BlockOptimizer(model.first.named_parameters(), plan="adamw-8")
    late = {**optimizer.param_groups[0], "params": [model.second.weight], "param_names": ["late"]}
    optimizer.param_groups.append(late)
    train(model, optimizer, range(2))
    assert optimizer.plan.block_of("late").configuration == baoc.parse("adamw-8")
    optimizer.param_groups.pop(0)
    assert [name for block in optimizer.plan.blocks for name in block.parameters] == ["late"]


# ---- every kind of parameter ----


@all_configurations
def test_complex_parameters_match_their_real_twins(configuration):
    params = [nn.Parameter(torch.randn(shape, dtype=torch.complex64)) for shape in ((40, 64), (5,), ())]
    twins = [nn.Parameter(torch.view_as_real(p.detach().clone())) for p in params]
    optimizer, reference = BlockOptimizer(params, plan=configuration), BlockOptimizer(twins, plan=configuration)
    for _ in range(3):
        grads = [torch.randn_like(p) for p in params]
        stepped(params, grads, optimizer)
        stepped(twins, [torch.view_as_real(g) for g in grads], reference)
    assert_same([torch.view_as_real(p.detach()) for p in params], [p.detach() for p in twins])


@all_configurations
def test_dtypes_may_be_mixed(configuration):
    """Each parameter goes where it would go alone, in its own dtype, and near where it would go in fp32."""
    start, stream = torch.randn(72, 64), list(gradients((72, 64), 3))
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    params = [nn.Parameter(start.to(dtype)) for dtype in dtypes]
    alone = copy.deepcopy(params)
    optimizer = BlockOptimizer(params, lr=0.01, plan=configuration)
    single = [BlockOptimizer([p], lr=0.01, plan=configuration) for p in alone]
    for grad in stream:
        stepped(params, [grad.to(dtype) for dtype in dtypes], optimizer)
        for param, one in zip(alone, single):
            stepped([param], [grad.to(param.dtype)], one)
    assert_same(params, alone)
    for param in params:
        tolerance = 8 * torch.finfo(param.dtype).eps
        near = torch.isclose(param.float(), params[0], rtol=tolerance, atol=tolerance)
        assert (~near).sum() <= param.numel() // 1000  # whose state took the next code


@all_configurations
@pytest.mark.parametrize(
    "view",
    [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t.view(6, 8, 6, 32).contiguous(memory_format=torch.channels_last)],
    ids=["transposed", "strided", "channels last"],
)
def test_strides_do_not_matter(configuration, view):
    param = nn.Parameter(view(torch.randn(72, 128)))
    twin = nn.Parameter(param.detach().contiguous().clone(memory_format=torch.contiguous_format))
    optimizer, reference = BlockOptimizer([param], plan=configuration), BlockOptimizer([twin], plan=configuration)
    for _ in range(3):
        grad = view(torch.randn(72, 128))
        stepped([param], [grad], optimizer)
        stepped([twin], [grad.contiguous()], reference)
    torch.testing.assert_close(param, twin, rtol=1e-6, atol=1e-7)


@all_configurations
def test_scalars_and_empty_parameters_are_parameters(configuration):
    params = [nn.Parameter(torch.ones(shape)) for shape in ((), (0,), (0, 8), (8, 0), (3,))]
    optimizer = BlockOptimizer(params, lr=0.1, plan=configuration)
    for _ in range(3):
        stepped(params, [torch.ones_like(p) for p in params], optimizer)
    assert params[0] < 1
    assert (params[-1] < 1).all()


def test_frozen_parameters_stay_and_can_be_unfrozen():
    model = Net()
    model.first.requires_grad_(False)
    optimizer = BlockOptimizer(model.named_parameters(), plan="adamw-8")
    frozen = copy.deepcopy(model.first)
    train(model, optimizer, range(3))
    assert_same(list(model.first.parameters()), list(frozen.parameters()))
    assert set(optimizer.state) == {model.second.weight, model.gain}
    model.first.requires_grad_(True)
    train(model, optimizer, range(3, 5))
    assert optimizer.state[model.first.weight]["m.age"] == 2
    assert optimizer.state[model.second.weight]["m.age"] == 5


@all_configurations
def test_a_parameter_without_a_gradient_stands_still(configuration):
    """And goes on later as if the steps it missed had not been."""
    params = [nn.Parameter(torch.randn(72, 64)) for _ in range(2)]
    alone = copy.deepcopy(params[0])
    optimizer, single = BlockOptimizer(params, plan=configuration), BlockOptimizer([alone], plan=configuration)
    for step, grad in enumerate(gradients((72, 64), 5)):
        missed = step in (0, 2)
        stepped(params, [None if missed else grad, grad], optimizer)
        if not missed:
            stepped([alone], [grad], single)
        assert_same(params[0], alone)


@some_configurations
def test_a_step_without_gradients_does_nothing(configuration):
    model = Net()
    optimizer = BlockOptimizer(model, plan=configuration)
    before = snapshot(model, optimizer)
    assert optimizer.step(lambda: 1.5) == 1.5
    assert_same(snapshot(model, optimizer), before)


@all_configurations
def test_zero_gradients_without_decay_change_no_parameter(configuration):
    model = Net()
    optimizer = BlockOptimizer(model, plan=configuration, weight_decay=0.0)
    before = copy.deepcopy(dict(model.named_parameters()))
    stepped(model.parameters(), [torch.zeros_like(p) for p in model.parameters()], optimizer)
    assert_same(dict(model.named_parameters()), before)


@all_configurations
@pytest.mark.parametrize("maximize", [False, True])
def test_gradients_are_never_written_to(configuration, maximize):
    model = Net()
    optimizer = BlockOptimizer(model, plan=configuration, maximize=maximize, weight_decay=0.1)
    backward(model, 0)
    grads = [(p.grad, p.grad.clone(), p.grad._version) for p in model.parameters()]
    for _ in range(2):
        optimizer.step()
    for param, (grad, value, version) in zip(model.parameters(), grads):
        assert param.grad is grad
        assert grad._version == version
        assert_same(grad, value)


@all_configurations
def test_parameters_are_updated_in_place_and_autograd_can_tell(configuration):
    model = Net()
    optimizer = BlockOptimizer(model, plan=configuration)
    before = [(p.data_ptr(), p._version) for p in model.parameters()]
    train(model, optimizer, range(1))
    for param, (address, version) in zip(model.parameters(), before):
        assert param.data_ptr() == address
        assert param._version > version


# ---- what is called around a step ----


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.enable_grad])
def test_the_closure_runs_first_and_with_gradients(grad_mode):
    model = Net()
    optimizer = BlockOptimizer(model)
    before = copy.deepcopy(dict(model.named_parameters()))
    losses = []

    def closure():
        assert torch.is_grad_enabled()
        assert_same(dict(model.named_parameters()), before)
        optimizer.param_groups[0]["lr"] = 0.0 if losses else 0.1
        losses.append(backward(model, 0))
        return losses[-1]

    with grad_mode():
        assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1
    before = copy.deepcopy(dict(model.named_parameters()))
    optimizer.step(closure)
    assert_same(dict(model.named_parameters()), before)


def test_step_hooks_run_in_order_and_can_be_removed():
    calls: list[str] = []

    def hook(name):
        return lambda optimizer, args, kwargs: calls.append(name)

    optimizer = BlockOptimizer(Net())
    handles = [
        register_optimizer_step_pre_hook(hook("global pre")),
        register_optimizer_step_post_hook(hook("global post")),
        optimizer.register_step_pre_hook(hook("pre")),
        optimizer.register_step_post_hook(hook("post")),
    ]
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert calls == ["global pre", "pre", "post", "global post"]


def test_schedulers_may_wrap_step():
    """An LR scheduler hides ``step`` behind one of the instance, which copies must not inherit."""
    model, optimizer = trained("adamw-8")
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if it did not see a step between two of the scheduler
        for step in range(3, 5):
            train(model, optimizer, range(step, step + 1))
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-5)
    assert twin_optimizer.param_groups[0]["lr"] == 1e-3
    train(twin, twin_optimizer, range(3, 4))


def test_grad_scaler_skips_a_step_as_a_whole():
    model, optimizer = trained("adamw-8")
    twin, reference = copy.deepcopy((model, optimizer))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = snapshot(model, optimizer)
    backward(model, 3)
    model.gain.grad.fill_(math.inf)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert_same(snapshot(model, optimizer), before)
    backward(model, 4)
    for param in model.parameters():
        param.grad.mul_(scaler.get_scale())
    scaler.step(optimizer)
    train(twin, reference, range(4, 5))
    assert_same(snapshot(model, optimizer), snapshot(twin, reference))


@some_configurations
def test_accumulated_and_clipped_gradients_are_plain_gradients(configuration):
    model, optimizer = trained(configuration)
    twin, reference = copy.deepcopy((model, optimizer))
    parts = []
    for step in (3, 4):
        backward(model, step)
        parts.append([p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    for grads in parts:
        for param, grad in zip(model.parameters(), grads):
            param.grad = grad.clone() if param.grad is None else param.grad.add_(grad)
    total = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert total > 1e-3
    optimizer.step()
    sums = [one + other for one, other in zip(*parts)]
    stepped(twin.parameters(), [s * (1e-3 / (total + 1e-6)).clamp(max=1.0) for s in sums], reference)
    assert_same(snapshot(model, optimizer), snapshot(twin, reference))


# ---- param groups ----


@some_configurations
def test_a_late_group_brings_its_own_configuration(configuration):
    model, optimizer = trained("adamw-16")
    twin, reference = copy.deepcopy((model, optimizer))
    late = nn.Parameter(torch.randn(72, 64))
    alone = copy.deepcopy(late)
    optimizer.add_param_group({"params": [("late", late)], "lr": 0.1, "configuration": configuration})
    single = BlockOptimizer([alone], lr=0.1, plan=configuration)
    for step, grad in enumerate(gradients((72, 64), 3), start=3):
        late.grad = alone.grad = grad
        train(model, optimizer, range(step, step + 1))
        train(twin, reference, range(step, step + 1))
        single.step()
    assert_same(late, alone)
    assert_same(dict(model.named_parameters()), dict(twin.named_parameters()))
    assert optimizer.plan.block_of("late").configuration == baoc.parse(configuration)
    assert optimizer.plan.state_bytes == baoc.state_bytes(optimizer)


def test_groups_may_be_empty():
    model = Net()
    optimizer = BlockOptimizer([{"params": []}, {"params": model.parameters()}, {"params": []}], plan="adamw-8")
    train(model, optimizer, range(2))
    again = BlockOptimizer([{"params": []}, {"params": Net().parameters()}, {"params": []}], plan="adamw-8")
    again.load_state_dict(optimizer.state_dict())
    assert_same(again.state_dict(), optimizer.state_dict())
    assert optimizer.plan.state_bytes == baoc.state_bytes(optimizer)
    assert "Parameter Group 2" in repr(optimizer)


def test_unknown_keys_of_groups_survive():
    model = Net()
    optimizer = BlockOptimizer([{"params": model.parameters(), "layer": "body"}])
    optimizer.param_groups[0]["initial_lr"] = 0.5
    train(model, optimizer, range(2))
    loaded = BlockOptimizer(Net())
    loaded.load_state_dict(optimizer.state_dict())
    for survivor in (optimizer, loaded, copy.deepcopy(optimizer)):
        assert (survivor.param_groups[0]["layer"], survivor.param_groups[0]["initial_lr"]) == ("body", 0.5)


def test_a_parameter_belongs_to_one_group_once():
    weight = nn.Parameter(torch.randn(3))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        BlockOptimizer([weight, weight])
    with pytest.raises(ValueError, match="more than one parameter group"):
        BlockOptimizer([{"params": [weight]}, {"params": [weight]}])
    optimizer = BlockOptimizer([weight])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [weight]})
    assert_same(optimizer.state_dict(), before)


@pytest.mark.parametrize("plan", ["adamw-8", None])
def test_two_models_may_have_the_same_names(plan):
    """As a GAN's halves do, each in a group of its own."""
    halves = [Net(seed=0), Net(seed=1)]
    optimizer = BlockOptimizer([{"params": half.named_parameters()} for half in halves], plan=plan)
    for half in halves:
        backward(half, 0)
    optimizer.step()
    assert "Parameter Group 1" in repr(optimizer)
    assert optimizer.plan.state_bytes == baoc.state_bytes(optimizer)


@pytest.mark.parametrize("plan", [*REPRESENTATIVE, None])
def test_it_can_be_printed(plan):
    model = Net()
    optimizer = BlockOptimizer([{"params": model.parameters(), "lr": torch.tensor(0.25)}, {"params": []}], plan=plan)
    text = repr(optimizer)
    assert text.startswith("BlockOptimizer (")
    assert "lr: 0.25" in text
    train(model, optimizer, range(1))
    assert repr(optimizer) == text

"""Released gradients: the same updates as ordinary steps, less memory, and clipping."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from baoc import BAOC, BlockOptimizer, CheckpointError, Configuration, PaperPlanner, PlanError, release_gradients
from baoc.core.spec import Reach
from tests.cases import by_configuration
from tests.memory import PeakMemory
from tests.ranks import together

Loss = Callable[[nn.Module, int], Tensor]


def small_model(width: int = 72) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(80, width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 65))


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(80, (16,), generator=generator)
    return model(tokens).square().mean() * 30 * (1 + step % 3)


def ordinary(model: nn.Module, optimizer: BlockOptimizer, steps: int, max_norm: float | None = None) -> None:
    for step in range(steps):
        loss_of(model, step).backward()
        if max_norm is not None:
            clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()


def released(model: nn.Module, optimizer: BlockOptimizer, steps: int, first: int = 0) -> None:
    assert optimizer._release is not None
    for step in range(first, first + steps):
        optimizer._release.backward(loss_of(model, step))
        assert all(param.grad is None for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


@pytest.mark.parametrize(**by_configuration)
def test_without_clipping_it_is_an_ordinary_step(configuration: Configuration) -> None:
    models = small_model(), small_model()
    plan = f"{configuration} else adamw-32"
    optimizers = [BlockOptimizer(model, lr=1e-2, plan=plan) for model in models]
    release_gradients(optimizers[1], max_norm=None)
    ordinary(models[0], optimizers[0], 3)
    released(models[1], optimizers[1], 3)
    if configuration.mechanism.reach is Reach.MATRIX:  # batches of other sizes round differently
        for one, other in zip(models[0].parameters(), models[1].parameters()):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)
    else:
        assert same(*models)
        for one, other in zip(optimizers[0].state.values(), optimizers[1].state.values()):
            assert all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(other[key])) for key in one)


@pytest.mark.parametrize("plan", ["adamw-8", "sgdm-32", "adamw[m=int8,v=factored]"])
def test_exact_clipping_is_that_of_torch(plan: str) -> None:
    models = small_model(), small_model()
    optimizers = [BlockOptimizer(model, lr=1e-2, plan=plan) for model in models]
    release = release_gradients(optimizers[1], max_norm=0.5, mode="exact")
    ordinary(models[0], optimizers[0], 4, max_norm=0.5)
    released(models[1], optimizers[1], 4)
    assert same(*models)
    assert release.norm is not None and release.norm > 0.5


def test_lagged_clipping_follows_its_formula() -> None:
    models = small_model(), small_model()
    optimizers = [BlockOptimizer(model, lr=1e-2, plan="sgdm-32") for model in models]
    release_gradients(optimizers[1], max_norm=0.5)
    last: list[float] = []
    factors = []
    for step in range(4):
        loss_of(models[0], step).backward()
        params = list(models[0].parameters())
        grads = [param.grad for param in params if param.grad is not None]
        squares = [float(grad.double().square().sum()) for grad in grads]
        numel = sum(param.numel() for param in params)
        for index, (grad, square) in enumerate(zip(grads, squares)):
            others = sum(last) - last[index] if last else square * (numel / grad.numel() - 1)
            factors.append(min(1.0, 0.5 / (math.sqrt(others + square) + 1e-6)))
            grad.mul_(factors[-1])
        optimizers[0].step()
        optimizers[0].zero_grad()
        last = squares
    released(models[1], optimizers[1], 4)
    assert min(factors) < 0.5
    for one, other in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(one, other)


def test_a_gradient_that_explodes_is_clipped_at_once() -> None:
    param, other = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
    optimizer = BlockOptimizer([param, other], lr=1.0, weight_decay=0.0, betas=(0.0, 0.9), plan="sgdm-32")
    release_gradients(optimizer, max_norm=1.0)
    for scale in (0.1, 0.1, 1e6):
        before = param.detach().clone()
        (param * scale).sum().backward()
        other.sum().mul(0.01).backward()
        optimizer.step()
    assert float((param - before).detach().norm()) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("mode", ["lagged", "exact"])
def test_gradients_take_the_memory_of_the_largest(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(12)])
    largest, all_of_them = 4 * 128 * 128, sum(4 * param.numel() for param in model.parameters())
    optimizer = BlockOptimizer(model, plan="adamw-8")
    peaks = []
    for is_released in (True, False):
        release = release_gradients(optimizer, mode=mode) if is_released else None
        loss = model(torch.ones(4, 128)).square().mean()
        with PeakMemory() as memory:
            loss.backward() if release is None else release.backward(loss)
            optimizer.step()
        optimizer.zero_grad()
        peaks.append(memory.peak)
        if release is not None:
            release.remove()
    activations = 8 * 4 * 4 * 128
    assert peaks[0] <= largest + activations < all_of_them <= peaks[1]


def test_micro_batches_are_held() -> None:
    models = small_model(), small_model()
    optimizers = [BlockOptimizer(model, lr=1e-2, plan="adamw-8") for model in models]
    release = release_gradients(optimizers[1], max_norm=None)
    for _ in range(2):
        for step in range(3):
            loss_of(models[0], step).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        with release.hold():
            loss_of(models[1], 0).backward()
            loss_of(models[1], 1).backward()
        loss_of(models[1], 2).backward()
        optimizers[1].step()
    assert same(*models)


def test_a_second_backward_pass_is_refused() -> None:
    model = small_model()
    optimizer = BlockOptimizer(model)
    with release_gradients(optimizer):
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match=r"'3.\w+' has a second gradient .*hold\(\)"):
            loss_of(model, 0).backward()


def test_a_backward_pass_that_failed_can_be_left_behind() -> None:
    """As loops do that skip a batch for which there is no memory."""
    model = small_model()
    optimizer = BlockOptimizer(model, lr=1e-2, plan="adamw-8")
    release_gradients(optimizer)
    released(model, optimizer, 2)
    first = next(model.parameters())
    handle = first.register_hook(_out_of_memory)  # the last gradient: all others were taken
    with pytest.raises(MemoryError):
        loss_of(model, 2).backward()
    handle.remove()
    optimizer.zero_grad()
    released(model, optimizer, 2, first=2)
    assert all(param.grad is None and bool(param.isfinite().all()) for param in model.parameters())


def _out_of_memory(grad: Tensor) -> None:
    raise MemoryError


def test_backward_passes_of_several_threads_make_one_step() -> None:
    """As on several devices, each of which has a thread of autograd."""
    models = [small_model() for _ in range(4)]
    alone = copy.deepcopy(models)
    for each, in_threads in ((models, True), (alone, False)):
        optimizer = BlockOptimizer(nn.ModuleList(each), lr=1e-2, plan="adamw-8", kernel="eager")
        release_gradients(optimizer, None)
        for step in range(5):
            losses = [loss_of(model, step) for model in each]
            with ThreadPoolExecutor(len(each) if in_threads else 1) as pool:
                list(pool.map(torch.Tensor.backward, losses))
            optimizer.step()
        assert optimizer._steps == 5
    for one, other in zip(models, alone):
        assert same(one, other)


@pytest.mark.parametrize("text", ["x", "{}", "[null]", "3", "[-1.0]", "[NaN]", "[1e300]", 5, [1.0]], ids=str)
def test_damaged_norms_are_refused_and_change_nothing(text: object) -> None:
    model = small_model()
    optimizer = BlockOptimizer(model, lr=1e-2, plan="adamw-8")
    release_gradients(optimizer)
    released(model, optimizer, 2)
    norm = optimizer._release.norm
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["gradient_norms"] = text
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict(saved)
    assert optimizer._release.norm == norm
    released(model, optimizer, 1, first=2)
    assert all(bool(param.isfinite().all()) for param in model.parameters())


def test_removing_it_gives_ordinary_steps() -> None:
    model = small_model()
    optimizer = BlockOptimizer(model)
    release = release_gradients(optimizer)
    with pytest.raises(RuntimeError, match="released already"):
        release_gradients(optimizer)
    release.remove()
    loss_of(model, 0).backward()
    assert all(param.grad is not None for param in model.parameters())
    before = copy.deepcopy(model)
    optimizer.step()
    assert not same(model, before)


def test_a_resumed_run_clips_as_the_first_would() -> None:
    model = small_model()
    optimizer = BlockOptimizer(model, lr=1e-2, plan="adamw-8")
    release_gradients(optimizer, max_norm=0.3)
    released(model, optimizer, 3)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    released(model, optimizer, 2, first=3)
    for loads_first in (True, False):
        other = small_model()
        other.load_state_dict(weights)
        resumed = BlockOptimizer(other, lr=1e-2, plan="adamw-8")
        if loads_first:
            resumed.load_state_dict(copy.deepcopy(saved))
        release_gradients(resumed, max_norm=0.3)
        if not loads_first:
            resumed.load_state_dict(copy.deepcopy(saved))
        released(other, resumed, 2, first=3)
        assert same(model, other)
    plain = BlockOptimizer(small_model(), lr=1e-2, plan="adamw-8")
    plain.load_state_dict(saved)  # without a release, nothing of it stays
    assert not any("gradient_norms" in group for group in plain.param_groups)


def test_schedulers_closures_and_new_groups() -> None:
    models = small_model(), small_model()
    late = [nn.Parameter(torch.ones(65)) for _ in models]
    optimizers = [BlockOptimizer(model, lr=1e-2, plan="adamw-8") for model in models]
    release_gradients(optimizers[1], max_norm=None)
    for model, optimizer, extra in zip(models, optimizers, late):
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [("late", extra)]})

            def closure() -> Tensor:
                optimizer.zero_grad()  # noqa: B023
                loss = loss_of(model, step) + extra.square().sum()  # noqa: B023
                loss.backward()
                return loss

            assert optimizer.step(closure).detach() > 0
            extra.grad = None
            scheduler.step()
    assert same(*models) and torch.equal(*late)
    assert not torch.equal(late[0], torch.ones(65))


def test_gradients_that_are_given_by_hand_are_used() -> None:
    param = nn.Parameter(torch.ones(8))
    optimizer = BlockOptimizer([param], lr=0.1, weight_decay=0.0, plan="sgdm-32")
    release_gradients(optimizer, max_norm=None)
    param.grad = torch.ones(8)
    optimizer.step()
    assert param.grad is None and torch.allclose(param, torch.full((8,), 0.9))


def test_nonfinite_gradients(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    optimizer = BlockOptimizer(model, plan="adamw-8")
    release = release_gradients(optimizer)
    released(model, optimizer, 2)
    norm = release.norm
    model[3].bias.register_hook(lambda grad: grad * math.nan)
    released(model, optimizer, 1)
    assert optimizer.metrics()["nonfinite_steps"] == 1
    assert "'3.bias'" in caplog.text
    assert release.norm != norm and math.isfinite(release.norm or math.nan)
    assert all(bool(param.isfinite().all()) for name, param in model.named_parameters() if name != "3.bias")


def test_exact_mode_skips_and_raises() -> None:
    for policy in ("skip", "raise"):
        model = small_model()
        optimizer = BlockOptimizer(model, plan="adamw-8", on_nonfinite=policy)
        with pytest.raises(RuntimeError, match="mode='exact'"):
            release_gradients(optimizer)
        release = release_gradients(optimizer, mode="exact")
        released(model, optimizer, 1)
        hook = model[3].bias.register_hook(lambda grad: grad * math.inf)
        before = copy.deepcopy(model)
        if policy == "raise":
            with pytest.raises(FloatingPointError, match=r"'3.bias'. Nothing was changed"):
                release.backward(loss_of(model, 0))
        else:
            released(model, optimizer, 1)
            assert optimizer.metrics()["skipped_steps"] == 1
        assert same(model, before)
        hook.remove()
        if policy == "skip":
            released(model, optimizer, 1)
            assert not same(model, before)


def test_metrics_see_released_updates() -> None:
    model = small_model()
    optimizer = BlockOptimizer(model, lr=1e-2, plan="adamw-8")
    release_gradients(optimizer)
    optimizer.metrics()
    released(model, optimizer, 1)
    assert 1e-3 < optimizer.metrics()["update_rms/all"] < 2e-2


def test_what_is_refused() -> None:
    model = small_model()
    for value, said in ((0.0, "max_norm"), (-1.0, "max_norm"), (math.nan, "max_norm")):
        with pytest.raises(ValueError, match=said):
            release_gradients(BlockOptimizer(model), max_norm=value)
    with pytest.raises(ValueError, match="'lagged', 'exact'"):
        release_gradients(BlockOptimizer(model), mode="late")
    with pytest.raises(TypeError, match="BlockOptimizer or BAOC, got a AdamW"):
        release_gradients(torch.optim.AdamW(model.parameters()))  # type: ignore[arg-type]
    unused: list[object] = [torch.amp.GradScaler("cpu")]
    unused.append(unused)
    del unused  # garbage, but only a collection finds the cycle
    with release_gradients(BlockOptimizer(model)):
        pass
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(RuntimeError, match="GradScaler"):
        release_gradients(BlockOptimizer(model))
    del scaler
    paper = BAOC(model, planner=PaperPlanner(), memory=0.5, verbose=False)
    with pytest.raises(RuntimeError, match="PaperPlanner samples them"):
        release_gradients(paper)
    optimizer = BlockOptimizer(model)
    with release_gradients(optimizer, mode="exact") as release:
        with pytest.raises(RuntimeError, match="two backward passes"):
            loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match="mode='lagged'"), release.hold():
            pass


def test_baoc_plans_before_the_first_update() -> None:
    model = small_model(128)
    optimizer = BAOC(model, lr=1e-3, memory=0.5, verbose=False)
    release_gradients(optimizer)
    released(model, optimizer, 3)
    assert optimizer.metrics()["steps"] == 3
    with pytest.raises(PlanError, match="released"):
        optimizer.replan(planner=PaperPlanner())
    optimizer.replan(0.3)
    released(model, optimizer, 1)


# ---- ranks ----


def _sharded(rank: int, plan: str, max_norm: float | None, mode: str) -> dict[str, Tensor]:
    """Weights after ordinary steps and after released ones, and the largest difference between ranks' norms."""
    mesh = init_device_mesh("cpu", (2,))
    results = {}
    for kind in ("ordinary", "released"):
        model = fully_shard(small_model(), mesh=mesh)
        optimizer = BlockOptimizer(model, lr=1e-2, plan=plan)
        if kind == "ordinary":
            ordinary(model, optimizer, 3, None if mode == "lagged" else max_norm)
        else:
            release = release_gradients(optimizer, max_norm, mode=mode)
            released(model, optimizer, 3)
            results["norm"] = torch.tensor(release.norm or 0.0)
        for name, param in model.named_parameters():
            results[f"{kind} {name}"] = param.full_tensor().detach()
    return results


@pytest.mark.parametrize(
    ("plan", "max_norm", "mode"),
    [("adamw-8", None, "lagged"), ("adamw-8", 0.5, "exact"), ("muon-8 else adamw-8", 0.5, "lagged")],
)
def test_shards(tmp_path: Path, plan: str, max_norm: float | None, mode: str) -> None:
    first, second = together(_sharded, 2, tmp_path, plan, max_norm, mode)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
        assert bool(value.isfinite().all())
        if key.startswith("ordinary") and (max_norm is None or mode == "exact"):
            torch.testing.assert_close(value, first[key.replace("ordinary", "released")])
    assert bool(first["norm"] > 0) is (max_norm is not None)


def _replicated(rank: int) -> str:
    model = nn.parallel.DistributedDataParallel(small_model())
    try:
        release_gradients(BlockOptimizer(model))
    except RuntimeError as error:
        return str(error)
    return ""


def test_ddp_is_refused(tmp_path: Path) -> None:
    assert all("DDP" in said and "fully_shard" in said for said in together(_replicated, 2, tmp_path))

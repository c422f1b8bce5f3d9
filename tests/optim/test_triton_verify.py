"""Families verify themselves: in Triton's interpreter, with device functions that are broken on purpose.

See ``test_triton.py`` for how these run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baoc import BlockOptimizer, parse
from baoc.core.spec import Reach
from baoc.optim import kernels
from baoc.optim.kernels import graphs
from baoc.optim.kernels.triton import verify
from baoc.optim.kernels.triton.families import Family, Form, form
from baoc.optim.kernels.triton.verify import ExactRoots, Verifier
from baoc.tools import selfcheck
from tests.cases import gradients
from tests.optim.triton_cases import CPU, need_interpreter

need_interpreter()

from baoc.optim.kernels.triton import launch as launches  # noqa: E402  these import triton
from baoc.optim.kernels.triton.device import sums, update  # noqa: E402

# The interpreter divides where it does not use the quotient.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SHAPES = [(64, 80), (61, 83), (80,)]
PLANS = ["adamw-8", "sgd", "lion-4", "adamw[m=int8,v=factored]", "adamw[m=int4,v=col-mean]", "adafactor"]
PLANS += ["sinkhorn else adamw-8", "colnorm-8 else adamw-8", "muon-8 else adamw-8", "normuon-4 else adamw-8"]
# module, device function, plan, and the rules of the families that it breaks
BROKEN = [
    (update, "direction_of", "adamw-8", {"adam"}),
    (update, "noise_at", "adamw-8", {"adam"}),
    (update, "store_weight", "sgd", {"sgd"}),
    (update, "store_nearest", "muon-8 else sgd", {"ahead"}),
    (update, "mean_of_cols", "adamw[m=int8,v=factored]", {"adam"}),
    (sums, "_total", "colnorm-8 else adamw-8", {"ahead"}),
    (sums, "load_dense", "adafactor", {"adafactor"}),
    (update, "advanced_m", "muon-8 else sgd", {"ahead"}),
    (update, "load_dense", "muon-8 else adamw-8", {"move"}),
    (update, "load_param", "muon-8 else adamw-8", {"move", "adam"}),
]


by_broken = pytest.mark.parametrize(
    ("module", "function", "plan", "rules"), BROKEN, ids=[f"{function}, {plan}" for _, function, plan, _ in BROKEN]
)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch) -> Iterator[None]:
    """Nothing is verified yet, and ``kernel="auto"`` chooses Triton on a CPU as it does on a GPU."""
    monkeypatch.setattr(verify, "_problems", {})
    monkeypatch.setattr(verify, "_warned", set())
    monkeypatch.setattr(kernels, "_native", kernels._triton)
    kernels.choose.cache_clear()
    yield
    kernels.choose.cache_clear()


@pytest.fixture
def verified(monkeypatch) -> list[Family]:
    """The families that are verified, in order."""
    families: list[Family] = []
    compare = verify.compare_family
    monkeypatch.setattr(verify, "compare_family", lambda *given: families.append(given[0]) or compare(*given))
    return families


def break_function(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Make a device function wrong: by 0.1%, or by a small amount of noise where it rounds."""
    function = getattr(module, name)

    def wrong(*arguments: Any) -> Any:
        if name in ("store_nearest", "store_weight"):
            value_at = 4 if name == "store_weight" else 3
            return function(*arguments[:value_at], arguments[value_at] * 1.001, *arguments[value_at + 1 :])
        result = function(*arguments)
        return result + 64 if name == "noise_at" else result * 1.001

    monkeypatch.setattr(module, name, wrong)


def train(
    plan: str,
    kernel: str = "auto",
    shapes: Iterable[tuple[int, ...]] = SHAPES,
    bad_step: int | None = None,
    **settings: Any,
) -> tuple[BlockOptimizer, list[Tensor]]:
    """Return the optimizer after three steps, and the parameters with all state."""
    params = [nn.Parameter(grad) for shape in shapes for grad in gradients(shape, 1, seed=1)]
    optimizer = BlockOptimizer(params, lr=0.1, plan=plan, kernel=kernel, **settings)
    by_param = [list(gradients(tuple(param.shape), 3)) for param in params]
    for step, grads in enumerate(zip(*by_param)):
        for param, grad in zip(params, grads):
            param.grad = grad
        if step == bad_step:
            grads[0][3, 7] = math.nan
        with ExactRoots():
            optimizer.step()
    states = optimizer.state_dict()["state"].values()
    held = [torch.as_tensor(value) for state in states for value in state.values()]
    return optimizer, [*(param.detach() for param in params), *held]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("plan", PLANS)
def test_families_that_match_are_launched_and_verified_once(plan, verified, monkeypatch, caplog):
    launched: list[Family] = []
    chosen: Any = kernels.choose("auto", CPU).kernel
    launch = chosen._launch
    monkeypatch.setattr(chosen, "_launch", lambda family, *rest: launched.append(family) or launch(family, *rest))
    for _ in range(2):  # the second optimizer verifies nothing
        optimizer, _ = train(plan)
    assert set(launched) == set(verified) and len(set(verified)) == len(verified)
    assert not warnings(caplog) and optimizer.kernel == "triton on cpu: one launch for all tensors of a kind"


@pytest.mark.parametrize("spelling", ["adamw[m=int4a,v=factored]", "muon[m=int4a]", "adamw-8"])
@pytest.mark.parametrize("aligned", [True, False])
def test_the_family_that_is_asked_for_is_the_one_that_runs(spelling, aligned, monkeypatch):
    """Also if only memory that is not aligned can be of the family: the rows of int4a are multiples of 64."""
    launched: list[Family] = []
    launch = launches.launch
    monkeypatch.setattr(launches, "launch", lambda family, *rest: launched.append(family) or launch(family, *rest))
    configuration, shape = parse(spelling), (64, 64)
    layout = configuration.layout(shape)
    for use in ("direction", "move") if layout.reach is Reach.MATRIX else ("step",):
        found = form(layout, torch.Size(shape), torch.float32, torch.float32, use)
        assert isinstance(found, Form)
        family = found.family._replace(aligned=aligned)
        launched.clear()
        assert not verify.compare_family(family, configuration, (torch.float32, torch.float32), use, CPU)
        assert set(launched) == {family}


@by_broken
def test_a_broken_family_falls_back_to_the_eager_update_with_one_warning(
    module, function, plan, rules, verified, monkeypatch, caplog
):
    _, expected = train(plan, "eager")
    break_function(monkeypatch, module, function)
    optimizer, found = train(plan)
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))
    mismatches = Verifier(CPU, strict=False).mismatches
    assert {family.mechanism for family in mismatches} == rules
    [warning] = warnings(caplog)
    for part in (str(mismatches[0]), "on cpu (", "largest difference", "baoc selfcheck", f"torch {torch.__version__}"):
        assert part in warning
    assert str(mismatches[0]) in optimizer.kernel

    verified.clear()
    _, again = train(plan)
    assert all(map(torch.equal, expected, again))
    assert not verified and len(warnings(caplog)) == 1, "the second optimizer neither verifies nor warns again"


@by_broken
def test_by_name_a_broken_family_is_an_error_and_nothing_changes(module, function, plan, rules, monkeypatch, caplog):
    params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = BlockOptimizer(params, plan=plan, kernel="triton")
    for param in params:
        param.grad = torch.ones_like(param)
    break_function(monkeypatch, module, function)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"does not match the eager update on cpu .*kernel='auto'.*baoc selfcheck"
        ):
            optimizer.step()
    assert all(bool((param == 1).all()) for param in params) and not warnings(caplog)
    ages = [value for state in optimizer.state.values() for key, value in state.items() if key.endswith(".age")]
    assert not any(map(float, ages))


@pytest.mark.parametrize("function", ["advanced_m", "load_dense"])
@pytest.mark.parametrize("plan", ["adamw-8", "muon-8 else sgd"])
def test_skipped_steps_leave_no_trace_in_families_that_fall_back(plan, function, monkeypatch):
    """The kernel that they fall back to cannot read the flag of the step on the device."""
    _, expected = train(plan, "eager", bad_step=1, on_nonfinite="skip")
    break_function(monkeypatch, update, function)
    _, found = train(plan, bad_step=1, on_nonfinite="skip")
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))


def test_verification_uses_no_global_random_numbers_and_few_launches(monkeypatch):
    """Two steps of a family, beside those of the optimizer."""
    launched: list[Family] = []
    launch = launches.launch
    monkeypatch.setattr(launches, "launch", lambda family, *rest: launched.append(family) or launch(family, *rest))
    before = torch.get_rng_state()
    train("adamw-8", shapes=[(64, 80)])
    assert torch.equal(torch.get_rng_state(), before)
    assert len(launched) == 2 + 3 and len(set(launched)) == 1


def test_a_capture_needs_families_that_are_verified(monkeypatch):
    param = nn.Parameter(torch.ones(64, 80))
    param.grad = torch.ones(64, 80)
    for plan in ("adamw-8", "muon-8"):
        optimizer = BlockOptimizer([param], plan=plan)
        with monkeypatch.context() as patch:
            patch.setattr(graphs, "is_capturing", lambda device: True)
            with pytest.raises(RuntimeError, match=r"not been verified on cpu yet.*ordinary step.*before the capture"):
                optimizer.step()
            patch.undo()
            optimizer.step()
        with monkeypatch.context() as patch:
            patch.setattr(graphs, "is_capturing", lambda device: True)
            patch.setattr(kernels.choose("auto", CPU).kernel, "_launch", lambda *arguments: None)
            optimizer.step()


@pytest.mark.parametrize("plan", ["adamw-8", "muon-8 else adamw-8"])
def test_a_family_that_fell_back_cannot_be_captured(plan, monkeypatch):
    break_function(monkeypatch, update, "advanced_m")
    optimizer, _ = train(plan)
    monkeypatch.setattr(graphs, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match=r"cannot be updated in a CUDA graph.*other operations than Triton's"):
        optimizer.step()


def test_code_that_does_not_run_falls_back(monkeypatch, caplog):
    """Whatever the compiler or the driver raises. Too little memory says nothing about the code."""
    _, expected = train("adamw-8", "eager")

    def fails_with(error: Exception) -> None:
        def fail(*arguments: Any) -> None:
            raise error

        monkeypatch.setattr(update, "advanced_m", fail)
        monkeypatch.setattr(launches, "launch", fail)

    fails_with(torch.OutOfMemoryError("out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        train("adamw-8")
    assert not verify._problems
    fails_with(RuntimeError("PTX was compiled\nwith an unsupported toolchain"))
    _, found = train("adamw-8")
    assert all(map(torch.equal, expected, found))
    [warning] = warnings(caplog)
    assert "it fails with RuntimeError: PTX was compiled. Another kernel" in warning


@pytest.mark.parametrize("how", ["wrong", "failing"])
def test_the_self_check_reports_broken_kernels_to_the_end(how, monkeypatch):
    """It is what the warning asks users to run, so it must not stop at what the warning is about."""
    if how == "wrong":
        break_function(monkeypatch, update, "advanced_m")
    else:
        monkeypatch.setattr(launches, "launch", lambda *arguments: 1 / 0)
    report = selfcheck.check(CPU, tiny=True)
    equalities = {each.configuration: each.passed for each in report.equalities}
    assert set(selfcheck.TINY_CONFIGURATIONS) < set(equalities) and not any(equalities.values())
    assert {each.optimizer: each.failed for each in report.timings} == {
        "torch AdamW fused": False, "adamw-16": True, "adamw-8": True,
    }  # fmt: skip
    assert not report.passed and "7 of 7 comparisons FAILED" in str(report)

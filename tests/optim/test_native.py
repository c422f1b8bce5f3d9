"""The native kernel does what the eager one does, whatever the instruction set and the number of threads."""

from __future__ import annotations

import logging
import math
import shutil

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from baoc import BlockOptimizer, Configuration, parse
from baoc.core.spec import Hyper, Reach
from baoc.optim import kernels
from baoc.optim.kernels.eager import EagerKernel
from baoc.optim.kernels.job import Job, advance_ages
from baoc.optim.kernels.native import NativeKernel, words
from baoc.optim.state import new_state
from tests.cases import CONFIGURATIONS, SHAPES, by_configuration, by_native_configuration, gradients

HAS_COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))
DTYPES = [
    *((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)),
    (torch.float32, torch.bfloat16),
]
LARGE = [(300, 700), (70_001,), (6, 90, 130), (3, 40_000), (48, 40, 3, 3)]  # more than one thread's worth

needs_native = pytest.mark.skipif(words.obstacle() is not None, reason="the native kernels are not built")
by_isa = {"argnames": "isa", "argvalues": NativeKernel.isas()}


class Trained:
    """A parameter with its state, advanced by any kernel."""

    def __init__(
        self, configuration: Configuration, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> None:
        self.configuration, self.shape = configuration, shape
        values = torch.randn(shape or (1,), generator=torch.Generator().manual_seed(1))
        self.param = values.to(dtype)
        self.state = new_state(configuration.layout(shape), torch.device("cpu"))

    def copy(self) -> Trained:
        other = Trained(self.configuration, self.shape, self.param.dtype)
        other.param = self.param.clone()
        other.state = {key: held.clone() if isinstance(held, Tensor) else held for key, held in self.state.items()}
        return other

    def step(self, kernel: kernels.Kernel, grad: Tensor, **settings: float) -> Trained:
        layout = self.configuration.layout(self.shape)
        hyper = Hyper(**{"lr": 1e-2, "weight_decay": 0.1} | settings)
        job = Job.of(layout, self.param, grad, self.state, hyper)
        kernel.run([job])
        advance_ages([job])
        return self

    def buffers(self) -> dict[str, Tensor]:
        return {"param": self.param} | {key: held for key, held in self.state.items() if isinstance(held, Tensor)}


def assert_same_bits(one: Trained, other: Trained) -> None:
    for key, held in one.buffers().items():
        assert torch.equal(other.buffers()[key].nan_to_num(), held.nan_to_num()), key


def assert_same_to_rounding(reference: Trained, other: Trained) -> None:
    """Sums may differ in their order, products in being fused; so a value on the edge may take the next code."""
    for key, held in reference.buffers().items():
        found = other.buffers()[key]
        assert found.dtype == held.dtype
        if held.dtype in (torch.int8, torch.uint8):
            apart = (found.int() - held.int()).abs()
            assert apart.max() <= 1, key
            assert (apart > 0).sum() <= max(1, held.numel() // 1000), key
            continue
        span = held.float().abs().max() * 1e-6
        if held.dtype in (torch.bfloat16, torch.float16):
            code = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[held.dtype] * held.float().abs() + span
            assert ((found.float() - held.float()).abs() > code).sum() <= _signs_of_nothing(reference), key
            assert (found != held).sum() <= max(1, held.numel() // 100), key
        else:
            apart = ~torch.isclose(found, held, rtol=1e-5, atol=float(span))
            assert apart.sum() <= (_signs_of_nothing(reference) if key == "param" else 0), key


def _signs_of_nothing(trained: Trained) -> int:
    """Elements of Lion's whose momentum and gradient cancel: the sign of what is left is rounding's."""
    return max(1, trained.param.numel() // 1000) if trained.configuration.mechanism_name == "lion" else 0


@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler")
def test_an_install_with_a_compiler_has_the_native_kernel():
    assert words.obstacle() is None
    assert "plain" in NativeKernel.isas()


@needs_native
@pytest.mark.parametrize(**by_isa)
@pytest.mark.parametrize(**by_configuration)
def test_native_equals_eager(configuration, isa):
    for shape in [shape for shape in SHAPES.values() if math.prod(shape)]:
        for param_dtype, grad_dtype in DTYPES:
            trained = Trained(configuration, shape, param_dtype)
            for step, grad in enumerate(gradients(shape or (1,), 3, dtype=grad_dtype)):
                grad.view(-1)[step::7] = 0  # elements that rest, with a momentum and without
                expected = trained.copy().step(EagerKernel(), grad)
                trained.step(NativeKernel(isa), grad)
                if not _edge_of_a_factor(expected, trained):
                    assert_same_to_rounding(expected, trained)


def _edge_of_a_factor(expected: Trained, found: Trained) -> bool:
    """A low-precision factor that took the next code moves a whole row or column; the next step starts from there."""
    pairs = [
        (held, found.buffers()[key])
        for key, held in expected.buffers().items()
        if (".row" in key or ".col" in key) and held.dtype != torch.float32
    ]
    moved = [(int((one != other).sum()), one.numel()) for one, other in pairs]
    return any(count for count, _ in moved) and all(count <= max(1, numel // 8) for count, numel in moved)


def is_torchs_own(configuration: Configuration, shape: tuple[int, ...]) -> bool:
    """Its sums are torch's, in an order that is torch's business: matrix products, and groups that run over lines."""
    layout = configuration.layout(shape)
    return layout.reach is Reach.MATRIX or bool(layout.mechanism.norms and layout.formats and len(shape) == 3)


@needs_native
@pytest.mark.parametrize(**by_native_configuration)
def test_results_do_not_depend_on_the_number_of_threads(configuration):
    before = torch.get_num_threads()
    try:
        for shape in LARGE:
            trained: dict[int, Trained] = {}
            for threads in (1, 2, 3, 8):
                torch.set_num_threads(threads)
                trained[threads] = Trained(configuration, shape)
                for grad in gradients(shape, 2):
                    trained[threads].step(NativeKernel(), grad)
                if is_torchs_own(configuration, shape):
                    torch.testing.assert_close(trained[1].param, trained[threads].param, rtol=1e-4, atol=1e-5)
                else:
                    assert_same_bits(trained[1], trained[threads])
    finally:
        torch.set_num_threads(before)


@needs_native
@pytest.mark.skipif({"avx2", "avx512"} - set(NativeKernel.isas()) != set(), reason="needs AVX2 and AVX-512")
@pytest.mark.parametrize(**by_configuration)
def test_results_do_not_depend_on_the_width_of_vectors(configuration):
    for shape in (*LARGE, (61, 83), (9, 700), (16, 12, 5, 5)):
        trained = [Trained(configuration, shape), Trained(configuration, shape)]
        for grad in gradients(shape, 3):
            for each, isa in zip(trained, ("avx2", "avx512")):
                each.step(NativeKernel(isa), grad)
        assert_same_bits(*trained)


@needs_native
@pytest.mark.parametrize(**by_isa)
@pytest.mark.parametrize(**by_configuration)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_gradient_shows_where_the_eager_kernel_shows_it(configuration, isa, broken):
    for shape in ((40, 300), (4, 40, 50)):
        trained = Trained(configuration, shape)
        grads = list(gradients(shape, 3))
        grads[1].view(-1)[777] = broken
        for grad in grads:
            expected = trained.copy().step(EagerKernel(), grad)
            trained.step(NativeKernel(isa), grad)
        assert torch.equal(expected.param.isfinite(), trained.param.isfinite())
        assert not trained.param.isfinite().all()


@needs_native
@pytest.mark.parametrize(**by_configuration)
def test_tiny_and_huge_gradients_stay_finite(configuration):
    for scale in (1e-30, 1e-18, 1e15):
        trained = Trained(configuration, (40, 300))
        for grad in gradients((40, 300), 3):
            expected = trained.copy().step(EagerKernel(), grad * scale, lr=1e-3 / scale if scale > 1 else 1e-3)
            trained.step(NativeKernel(), grad * scale, lr=1e-3 / scale if scale > 1 else 1e-3)
        assert trained.param.isfinite().all()
        torch.testing.assert_close(trained.param, expected.param, rtol=1e-4, atol=1e-5)


@needs_native
@pytest.mark.parametrize(**by_isa)
@pytest.mark.parametrize(**by_configuration)
def test_a_learning_rate_of_zero_moves_nothing(configuration, isa):
    """Also where a second moment has overflowed, and where there is none."""
    trained = Trained(configuration, (40, 300))
    for step, grad in enumerate(gradients((40, 300), 3)):
        grad.view(-1)[::7] = 0
        grad.view(-1)[5] = 1e30 if step == 1 else 0.0
        before = trained.param.clone()
        trained.step(NativeKernel(isa), grad, lr=0.0)
        assert torch.equal(trained.param, before)


@needs_native
def test_what_it_does_not_serve_runs_eagerly():
    dtype = torch.float64
    for configuration in CONFIGURATIONS:
        trained = Trained(configuration, (70, 80), dtype)
        other = trained.copy()
        for grad in gradients((70, 80), 2, dtype=dtype):
            trained.step(NativeKernel(), grad)
            other.step(EagerKernel(), grad)
        assert_same_bits(trained, other)


@needs_native
def test_strided_parameters_and_gradients_are_updated_in_place():
    for layout in (lambda x: x.t(), lambda x: x[:, ::2]):
        results = []
        for kernel in ("native", "eager"):
            param = nn.Parameter(layout(torch.ones(80, 160)))
            optimizer = BlockOptimizer([param], plan="adamw-8", kernel=kernel)
            param.grad = layout(torch.linspace(-1, 1, 80 * 160).view(80, 160))
            optimizer.step()
            results.append(param.detach())
        assert torch.equal(*results)
    expanded = nn.Parameter(torch.ones(80, 160))
    optimizer = BlockOptimizer([expanded], lr=0.1, plan="sgd", kernel="native", weight_decay=0)
    expanded.grad = torch.ones(1, 1).expand(80, 160)
    optimizer.step()
    assert torch.allclose(expanded, torch.full((80, 160), 0.9))


@needs_native
@pytest.mark.parametrize(**by_isa)
@pytest.mark.parametrize(**by_native_configuration)
def test_channels_last_is_updated_to_the_same_bits(configuration, isa, monkeypatch):
    """Whether the parameter, the gradient or both lie in memory that way, and with nothing left to slower code."""

    def refused(self, jobs):
        raise AssertionError(f"the native kernel left {list(jobs)}")

    monkeypatch.setattr(EagerKernel, "run", refused)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}
    for shape in ((24, 20, 3, 3), (5, 130, 4, 4), (7, 67, 2, 3, 2), (3, 9, 13, 17)):
        for param_dtype, grad_dtype in DTYPES:
            plain = Trained(configuration, shape, param_dtype)
            turned = [plain.copy() for _ in range(3)]
            for each in turned[:2]:
                each.param = each.param.to(memory_format=last[len(shape)])
            for grad in gradients(shape, 2, dtype=grad_dtype):
                grad.view(-1)[::7] = 0
                plain.step(NativeKernel(isa), grad)
                turned[0].step(NativeKernel(isa), grad)
                for each in turned[1:]:
                    each.step(NativeKernel(isa), grad.to(memory_format=last[len(shape)]))
            for each in turned:
                assert_same_bits(plain, each)


class Tagged(Tensor):
    """A subclass that changes nothing."""


@needs_native
@pytest.mark.parametrize("configuration", ["adamw-8", "adafactor", "sgd"])
@pytest.mark.parametrize("where", ["parameter", "gradient", "both"])
@pytest.mark.parametrize("kind", ["plain subclass", "wrapper"])
def test_tensor_subclasses_are_never_read_by_their_address(configuration, where, kind):
    """A wrapper has its numbers in other tensors, and its own address leads nowhere."""

    def wrapped(tensor: Tensor) -> Tensor:
        return tensor.as_subclass(Tagged) if kind == "plain subclass" else TwoTensor(tensor, tensor.clone())

    start, grads = torch.randn(72, 64), list(gradients((72, 64), 3))
    results = []
    for special in (True, False):
        value = start.clone()
        param = nn.Parameter(wrapped(value) if special and where != "gradient" else value)
        optimizer = BlockOptimizer([param], lr=1e-2, plan=configuration, kernel="native" if special else "eager")
        for grad in grads:
            param.grad = wrapped(grad) if special and where != "parameter" else grad
            optimizer.step()
        found = param.detach()
        results.append(found.a if isinstance(found, TwoTensor) else found.as_subclass(Tensor))
    assert torch.equal(*results)


@needs_native
@pytest.mark.parametrize("configuration", ["adamw-32", "adamw-8", "sgd"])
def test_negated_views_have_their_sign(configuration):
    """The imaginary part of a conjugate is the same memory with a bit that says: minus."""
    for view in (lambda x: x.to(torch.complex64).mul(1j).conj().imag, torch._neg_view):
        results = []
        for resolved in (False, True):
            param = nn.Parameter(torch.zeros(64, 64))
            optimizer = BlockOptimizer([param], plan=configuration, weight_decay=0.0)
            grad = view(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
            assert grad.is_neg()
            param.grad = grad.resolve_neg() if resolved else grad
            optimizer.step()
            results.append(param.detach())
        torch.testing.assert_close(*results)
    negated = nn.Parameter(torch.ones(64, 64, dtype=torch.complex64).conj().imag.detach())
    plain = nn.Parameter(negated.detach().resolve_neg().clone())
    assert negated.is_neg() and not plain.is_neg()
    for param in (negated, plain):
        param.grad = torch.ones(64, 64)
        BlockOptimizer([param], plan=configuration).step()
    torch.testing.assert_close(negated.detach().resolve_neg(), plain.detach())


@needs_native
def test_many_tensors_in_one_call_equal_one_by_one():
    shapes = [shape for shape in (*SHAPES.values(), *LARGE) if math.prod(shape)]
    steps = {}
    for together in (True, False):
        params = [nn.Parameter(torch.ones(shape)) for shape in shapes for _ in CONFIGURATIONS]
        each = [
            {"params": [param], "configuration": CONFIGURATIONS[i % len(CONFIGURATIONS)]}
            for i, param in enumerate(params)
        ]
        optimizers = [BlockOptimizer(each)] if together else [BlockOptimizer([group]) for group in each]
        for step in range(2):
            for i, param in enumerate(params):
                param.grad = next(gradients(tuple(param.shape), 1, seed=step + i))
            for optimizer in optimizers:
                optimizer.step()
        steps[together] = params
    for one, other in zip(steps[True], steps[False]):
        assert torch.equal(one, other)


@needs_native
def test_the_c_structs_are_as_long_as_python_thinks():
    library = words.load_library()
    assert len(words.field_places()) * 8 == library.JOB_BYTES
    assert len(library.JOB_SCALARS) * 8 == library.SCALAR_BYTES


@needs_native
def test_an_unknown_instruction_set_is_refused():
    with pytest.raises(ValueError, match="no kernels for sse9"):
        Trained(parse("sgd"), (4,)).step(NativeKernel("sse9"), torch.ones(4))


def test_without_the_library_auto_falls_back_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(words, "load_library", lambda: "the native kernels were not built")
    kernels.choose.cache_clear()
    with caplog.at_level(logging.WARNING, logger="baoc"):
        for _ in range(2):
            param = nn.Parameter(torch.ones(4))
            optimizer = BlockOptimizer([param])
            param.grad = torch.ones(4)
            optimizer.step()
    assert optimizer.kernel == "eager on cpu: the native kernels were not built"
    assert len(caplog.records) == 1
    assert "several times slower on cpu: the native kernels were not built" in caplog.text
    with pytest.raises(RuntimeError, match=r"kernel='native' cannot run on cpu: .* Use kernel='auto'"):
        kernels.choose("native", torch.device("cpu"))
    kernels.choose.cache_clear()

"""Newton-Schulz iterations: as exact as the textbook's, within their memory, and with the operations they promise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from baoc import BlockOptimizer
from baoc.core.mechanisms import newton_schulz
from baoc.core.mechanisms.newton_schulz import (
    MUON,
    YOU_JIACHENG,
    Coefficients,
    operations,
    orthogonalised,
    takes_gram,
    workspace,
)

SHAPES = [(3, 16, 64), (3, 64, 16), (3, 32, 32), (2, 5, 9), (2, 15, 10), (1, 9, 5), (1, 1, 7), (1, 7, 1)]
LARGE = [(1, 385, 600), (2, 400, 390), (1, 500, 384), (1, 1024, 1030)]
"""Sides from which on symmetric products are computed in strips, even ones and others."""


def textbook(x: Tensor, coefficients: Coefficients) -> Tensor:
    """The iteration as it is written down, on the short side."""
    if x.shape[1] > x.shape[2]:
        return textbook(x.mT, coefficients).mT
    x = x / torch.linalg.matrix_norm(x.float(), keepdim=True).to(x.dtype)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def with_spectrum(values: Tensor, length: int) -> Tensor:
    """A matrix with these singular values and random singular vectors."""
    generator, side = torch.Generator().manual_seed(0), len(values)
    left = torch.linalg.qr(torch.randn(side, side, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(length, side, generator=generator, dtype=torch.float64))[0]
    return ((left * values) @ right.mT).unsqueeze(0)


def spectra(side: int) -> Iterator[Tensor]:
    index = torch.arange(1, side + 1, dtype=torch.float64)
    for power in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0):
        yield index**-power
    yield torch.where(index <= 8, 1.0, 1e-4)


@pytest.mark.parametrize("coefficients", [YOU_JIACHENG, MUON, YOU_JIACHENG[:1], YOU_JIACHENG[:3]], ids=len)
@pytest.mark.parametrize("shape", SHAPES + LARGE, ids=str)
def test_it_is_the_textbooks_iteration(shape, coefficients):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = textbook(x.double(), coefficients)
    found = orthogonalised(x.clone(), coefficients)
    assert found.shape == shape and found.is_contiguous() and found.dtype == torch.float32
    assert error(found, exact) < 2e-5


@pytest.mark.parametrize("length", [128, 192, 256, 512])
def test_errors_are_as_small_as_those_of_the_textbooks_iteration(length):
    """With fp32 products, whatever the spectrum."""
    for values in spectra(128):
        x = with_spectrum(values, length)
        exact = textbook(x, YOU_JIACHENG)
        usual = error(textbook(x.float(), YOU_JIACHENG), exact)
        assert error(orthogonalised(x.float(), YOU_JIACHENG), exact) < 3 * usual + 1e-6


def test_the_restart_keeps_errors_small(monkeypatch):
    x = with_spectrum(torch.arange(1, 129, dtype=torch.float64) ** -1.5, 512)
    exact = textbook(x, YOU_JIACHENG)
    restarted = error(orthogonalised(x.float(), YOU_JIACHENG), exact)
    monkeypatch.setattr(newton_schulz, "RESTART", len(YOU_JIACHENG))
    assert error(orthogonalised(x.float(), YOU_JIACHENG), exact) > 10 * restarted


@pytest.mark.parametrize("length", [64, 256])
def test_errors_in_half_precision_are_smaller_than_muons_usual_ones(length):
    """fp16 products, which GPUs get, against the usual bf16 ones; emulated here."""
    for values in spectra(64):
        x = with_spectrum(values, length)
        exact = textbook(x, YOU_JIACHENG)
        usual = error(textbook(x.bfloat16(), YOU_JIACHENG), exact)
        assert error(orthogonalised(x.float(), YOU_JIACHENG, dtype=torch.float16), exact) < 0.7 * usual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_iterations_make_singular_values_one(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    found = orthogonalised(x.clone(), YOU_JIACHENG, dtype=dtype)
    assert found.shape == shape and found.is_contiguous() and found.dtype == torch.float32
    assert (torch.linalg.svdvals(found) - 1).abs().square().mean().sqrt() < 0.25
    assert (found * (left @ right)).sum() / found.norm() / math.sqrt(shape[0] * min(shape[1:])) > 0.98


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES + LARGE[:1], ids=str)
def test_its_memory_is_enough_and_is_not_left(shape, dtype):
    matrices, rows, cols = shape
    needed, beyond = matrices * (workspace(rows, cols) - rows * cols), 64
    scratch = torch.full((needed + beyond,), torch.nan)  # what was in it must not matter
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert orthogonalised(x.clone(), YOU_JIACHENG, scratch[:needed], dtype).isfinite().all()
    assert scratch[needed:].isnan().all()


def test_long_matrices_take_the_gram_form():
    assert [takes_gram(100, length) for length in (100, 149, 150, 400)] == [False, False, True, True]
    assert takes_gram(400, 100)


@pytest.mark.parametrize("shape", [(2, 8, 9), (2, 8, 30)], ids=str)
def test_nothing_comes_of_nothing(shape):
    assert (orthogonalised(torch.zeros(shape), YOU_JIACHENG) == 0).all()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_size_of_gradients_does_not_matter(scale, dtype):
    x = torch.randn(1, 24, 60, generator=torch.Generator().manual_seed(0))
    usual = orthogonalised(x.clone(), YOU_JIACHENG, dtype=dtype)
    torch.testing.assert_close(orthogonalised(x * scale, YOU_JIACHENG, dtype=dtype), usual, rtol=1e-2, atol=1e-3)


class Products(TorchDispatchMode):
    """Counts the operations of matrix products, and notes their dtypes and numbers of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.kinds = 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "bmm" in str(function):
            left, right = args[-2:]
            self.operations += 2 * left.numel() * right.shape[-1]
            self.kinds.add((left.dtype, len(left)))
        return function(*args, **(kwargs or {}))


def counted(shape: Sequence[int], coefficients: Coefficients) -> int:
    with Products() as products:
        orthogonalised(torch.randn(shape), coefficients)
    return products.operations


@pytest.mark.parametrize("iterations", [1, 2, 5, 7])
@pytest.mark.parametrize("shape", SHAPES + LARGE, ids=str)
def test_it_does_the_operations_that_it_promises(shape, iterations, monkeypatch):
    coefficients = (YOU_JIACHENG * 2)[:iterations]
    assert counted(shape, coefficients) == shape[0] * operations(*shape[1:], iterations)
    monkeypatch.setattr(newton_schulz, "_STRIPS", ((0, 1),))  # as on a GPU
    assert counted(shape, coefficients) == shape[0] * operations(*shape[1:], iterations, "cuda")


def test_on_gpus_matrices_of_one_shape_are_multiplied_together_in_fp16(monkeypatch):
    """As the device is told, for want of one."""
    monkeypatch.setattr(newton_schulz, "products_dtype", lambda device: torch.float16)
    params = [nn.Parameter(torch.randn(shape)) for shape in [(48, 96)] * 4 + [(96, 48)] * 3 + [(64, 64)] * 2]
    for param in params:
        param.grad = torch.randn(param.shape)
    with Products() as products:
        BlockOptimizer(params, plan="muon-8", kernel="eager").step()
    assert products.kinds == {(torch.float16, count) for count in (4, 3, 2)}

"""The Triton kernels in Triton's interpreter, on CPU tensors: they do what the eager kernel does, bit for bit.

Triton reads its environment when it is imported, so these run in a process of their own: see ``test_triton.py``, or
``TRITON_INTERPRET=1 python -m pytest tests/test_triton_interpreted.py``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from baoc import BlockOptimizer, Configuration, parse
from baoc.core.spec import Hyper, Reach
from baoc.optim.kernels import triton as triton_kernels
from baoc.optim.kernels.eager import EagerKernel
from baoc.optim.kernels.job import Job, advance_ages
from baoc.optim.place import Whole
from baoc.optim.state import new_state
from tests.cases import CONFIGURATIONS, gradients

if not triton_kernels.is_interpreted():
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
# Rows of whole vectors with a group that is not full, and of none; a convolution; vectors, large and small.
SHAPES = [(17, 272), (16, 301), (12, 4, 9, 9), (4100,), (7,)]
LEFT = ("adafactor",)  # mechanisms without Triton code

# The interpreter divides where it does not use the quotient.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class ExactRoots(TorchFunctionMode):
    """Square roots as IEEE has them; torch's on a CPU are wrong in the last bit now and then."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.sqrt:
            return torch.from_numpy(np.sqrt(args[0].numpy()))
        return function(*args, **(kwargs or {}))


class Refusing:
    """A kernel that nothing may be left to."""

    name = "refusing"

    def run(self, jobs: Iterable[Job]) -> None:
        raise AssertionError(f"left: {[(str(job.layout.configuration), job.layout.shape) for job in jobs]}")


class Shard(Whole):
    """Rows from one on of a parameter."""

    def __init__(self, first_row: int, rows: int) -> None:
        self.first_row, self.rows = first_row, rows


class Trained:
    """Parameters of one configuration with their state, advanced together by any kernel."""

    def __init__(
        self, configuration: Configuration, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = FP32
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.layouts = [configuration.layout(shape) for shape in shapes]
        self.params = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        self.states = [new_state(layout, CPU) for layout in self.layouts]

    def step(self, kernel: Any, grads: Sequence[Tensor], maximize: bool = False, **settings: float) -> None:
        hyper = Hyper(**{"lr": 1e-2, "weight_decay": 0.1} | settings)
        known: dict[object, Any] = {}
        jobs = [
            Job.of(layout, param, grad, state, hyper, maximize=maximize, name=str(tuple(param.shape)), known=known)
            for layout, param, grad, state in zip(self.layouts, self.params, grads, self.states)
        ]
        kernel.run(jobs)
        advance_ages(jobs)

    def buffers(self) -> dict[str, Tensor]:
        held = {f"{index}.param": param for index, param in enumerate(self.params)}
        for index, state in enumerate(self.states):
            held |= {f"{index}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        return held


def kernel(other: Any = Refusing) -> triton_kernels.TritonKernel:
    return triton_kernels.TritonKernel(CPU, other)


def streams(steps: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[list[Tensor]]:
    """The gradients of each step, in which every seventh element rests."""
    by_shape = [list(gradients(shape, steps, dtype=dtype)) for shape in shapes]
    for grad in (grad for stream in by_shape for grad in stream):
        grad.view(-1)[::7] = 0
    return [[stream[step] for stream in by_shape] for step in range(steps)]


def assert_equal(expected: Trained, found: Trained, exact: bool) -> None:
    for key, held in expected.buffers().items():
        other = found.buffers()[key]
        if exact:
            assert torch.equal(other, held), key
        elif held.is_floating_point():  # sums are of another order, and a number at an edge may take the next code
            coarse = 2.0**-7 if held.dtype == BF16 else 2e-6
            apart = ~torch.isclose(other.float(), held.float(), rtol=coarse, atol=1e-6)
            assert apart.sum() <= held.numel() // 1000, key
        else:
            apart = (other.int() - held.int()).abs()
            assert apart.max() <= 1 and (apart > 0).sum() <= max(1, held.numel() // 1000), key


def is_exact(configuration: Configuration) -> bool:
    """Its operations are IEEE's, each by itself, or torch's in both kernels, as products of matrices are: no sums."""
    return configuration.layout((64, 64)).reach is not Reach.SUMS


SERVED = [configuration for configuration in CONFIGURATIONS if configuration.mechanism_name not in LEFT]


@pytest.mark.parametrize("configuration", SERVED, ids=str)
def test_it_equals_eager(configuration):
    """All tensors at once, and nothing is left to another kernel; Sinkhorn's many turns in one dtype only."""
    pairs = [(FP32, FP32), (BF16, BF16), (FP32, BF16)]
    for param_dtype, grad_dtype in pairs[: 1 if configuration.mechanism_name == "sinkhorn" else None]:
        expected, found = (Trained(configuration, SHAPES, param_dtype) for _ in range(2))
        for grads in streams(2, grad_dtype):
            with ExactRoots():
                expected.step(EagerKernel(), grads)
            found.step(kernel(), grads)
            assert_equal(expected, found, is_exact(configuration))

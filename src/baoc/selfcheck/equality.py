"""The Triton kernel on a device beside the eager kernel on the CPU: the same bits, where the operations are IEEE's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from baoc.core.configuration import Configuration, parse
from baoc.core.spec import Hyper, Reach
from baoc.optim.kernels.eager import EagerKernel
from baoc.optim.kernels.job import Job, advance_ages
from baoc.optim.kernels.triton import TritonKernel
from baoc.optim.state import new_state

Promise = Literal["bits", "rounding", "products"]
SHAPES = [(17, 272), (16, 301), (12, 4, 9, 9), (4100,), (7,)]
"""Rows of whole vectors with a group that is not full, and of none; a convolution; vectors, large and small."""
DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16))
_STEPS = 3
_APART = 1e-3  # share of elements that may be a code apart where sums have another order
_PRODUCTS = 0.05  # of the norm of what a matrix has moved: GPUs multiply in bf16
_CPU = torch.device("cpu")


class ExactRoots(TorchFunctionMode):
    """Square roots as IEEE has them; torch's on a CPU are wrong in the last bit now and then.

    >>> with ExactRoots():
    ...     torch.tensor(2.0).sqrt()
    tensor(1.4142)
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.sqrt and args[0].device == _CPU:
            return torch.from_numpy(np.asarray(np.sqrt(args[0].numpy())))
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Equality:
    """How far the two kernels are apart after some steps."""

    configuration: str
    dtypes: str  # of parameters and gradients
    promised: Promise
    """The same bits; or sums in another order, and so a last bit, or a code, here and there; or products in bf16."""
    found: str
    passed: bool


class Trained:
    """Parameters of one configuration with their state, advanced together by any kernel."""

    def __init__(
        self,
        configuration: Configuration,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        device: torch.device = _CPU,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.layouts = [configuration.layout(shape) for shape in shapes]
        self.params = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
        self.states = [new_state(layout, device) for layout in self.layouts]

    def step(self, kernel: Any, grads: Sequence[Tensor], maximize: bool = False) -> None:
        hyper, known = Hyper(lr=1e-2, weight_decay=0.1), dict[object, Any]()
        jobs = [
            Job.of(layout, param, grad, state, hyper, maximize=maximize, name=str(tuple(param.shape)), known=known)
            for layout, param, grad, state in zip(self.layouts, self.params, grads, self.states)
        ]
        kernel.run(jobs)
        advance_ages(jobs)

    def buffers(self) -> dict[str, Tensor]:
        """Everything that a step changes."""
        held = {f"{index}.param": param for index, param in enumerate(self.params)}
        for index, state in enumerate(self.states):
            held |= {f"{index}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        return held


class _Left:
    """Remembers what there is no Triton code for."""

    name = "no"

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def run(self, jobs: Iterable[Job]) -> None:
        self.jobs += jobs


def shapes_for(configuration: Configuration) -> list[tuple[int, ...]]:
    """Those of :data:`SHAPES` that there is Triton code for.

    Adafactor's factors are of the last two dims, as torch's are: a convolution is a stack of matrices to it.
    """
    return [shape for shape in SHAPES if configuration.mechanism_name != "adafactor" or len(shape) < 3]


def compare(spelling: str, device: torch.device, *, every_dtype: bool = True) -> list[Equality]:
    """Step both kernels over tensors of every kind, many in one launch."""
    results = []
    for param_dtype, grad_dtype in DTYPES if every_dtype else DTYPES[:1]:
        configuration, left = parse(spelling), _Left()
        shapes = shapes_for(configuration)
        start = Trained(configuration, shapes, param_dtype)
        expected = Trained(configuration, shapes, param_dtype)
        found = Trained(configuration, shapes, param_dtype, device)
        kernel = TritonKernel(device, lambda left=left: left)  # type: ignore[misc]
        for step in range(_STEPS):
            grads = [gradient(shape, step).to(grad_dtype) for shape in shapes]
            with ExactRoots():
                expected.step(EagerKernel(), grads)
                found.step(kernel, [grad.to(device) for grad in grads])
        promised = promise(configuration)
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in (param_dtype, grad_dtype))
        if left.jobs:
            results.append(Equality(spelling, dtypes, promised, "left to another kernel", True))
            continue
        problems = differences(expected, found, promised, start)
        results.append(Equality(spelling, dtypes, promised, "; ".join(problems) or "as promised", not problems))
    return results


def promise(configuration: Configuration) -> Promise:
    """What a configuration's results on a GPU have in common with those on a CPU."""
    promises: dict[Reach, Promise] = {Reach.ROWS: "bits", Reach.SUMS: "rounding", Reach.MATRIX: "products"}
    return promises[configuration.layout((64, 64)).reach]


def differences(expected: Trained, found: Trained, promised: Promise, start: Trained) -> list[str]:
    """What is further apart than promised; empty: nothing."""
    problems = []
    before = start.buffers()
    for key, held in expected.buffers().items():
        other = found.buffers()[key].cpu()
        if torch.equal(other, held):
            continue
        if promised == "bits":
            problems.append(f"{key}: {int((other != held).sum())} of {held.numel()} differ")
        elif promised == "products" and key.endswith("param"):
            apart = (other.float() - held.float()).norm() / (held.float() - before[key].float()).norm()
            if apart > _PRODUCTS:
                problems.append(f"{key}: {apart:.1%} of the way apart")
        elif held.is_floating_point():
            coarse = 2.0**-7 if held.dtype == torch.bfloat16 else 1e-5
            far = ~torch.isclose(other.float(), held.float(), rtol=coarse, atol=1e-6)
            if far.sum() > _APART * held.numel():
                problems.append(f"{key}: {int(far.sum())} of {held.numel()} are far apart")
        else:
            codes = (other.int() - held.int()).abs()
            if codes.max() > 1 or (codes > 0).sum() > max(1, _APART * held.numel()):
                problems.append(f"{key}: {int((codes > 0).sum())} of {held.numel()} codes differ")
    return problems


def gradient(shape: tuple[int, ...], step: int) -> Tensor:
    """Over four orders of magnitude, and every seventh element rests."""
    generator = torch.Generator().manual_seed(step)
    grad = torch.randn(shape, generator=generator) * torch.logspace(-3, 1, shape[-1])
    grad.view(-1)[::7] = 0
    return grad

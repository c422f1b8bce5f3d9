"""What the tests in Triton's interpreter share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from baoc import Configuration
from baoc.core.sharding import Whole
from baoc.core.spec import Reach
from baoc.optim.kernels import triton as triton_kernels
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.triton.verify import Trial
from baoc.tools.selfcheck import SHAPES, shapes_for
from tests.cases import CONFIGURATIONS, gradients

CPU = torch.device("cpu")
WITH_CODE = tuple(each for each in CONFIGURATIONS if "log4" not in dict(each.codec_names).values())
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def need_interpreter() -> None:
    """Skip a module unless Triton runs in its interpreter, which it decides when it is imported."""
    if not triton_kernels.is_interpreted():
        pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
    pytest.importorskip("triton")


class Refusing:
    """Fails if a job has no Triton code."""

    name = "refusing"

    def run(self, jobs: Iterable[Job]) -> None:
        raise AssertionError(f"left: {[(str(job.layout.configuration), job.layout.shape) for job in jobs]}")


class Shard(Whole):
    """Some rows of a parameter."""

    def __init__(self, first_row: int, rows: int) -> None:
        self.first_row, self.rows = first_row, rows


def shapes_with_code(configuration: Configuration) -> list[tuple[int, ...]]:
    """Shapes with Triton code, all of them. Formats of small models have it where they are int8, int4 or bf16."""
    codecs = {codec for _, codec in configuration.codec_names}
    if "fp8" in codecs:
        return [shape for shape in SHAPES if len(shape) == 2]
    return [(17, 320), (4100,), (7,)] if "int4a" in codecs else shapes_for(configuration)


def kernel(other: Any = Refusing) -> triton_kernels.TritonKernel:
    return triton_kernels.TritonKernel(CPU, other)


def streams(steps: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[list[Tensor]]:
    """Return the gradients of each step, in which every seventh element is zero, another one in each step."""
    by_shape = [list(gradients(shape, steps, dtype=dtype)) for shape in shapes]
    for step, grad in ((step, grad) for stream in by_shape for step, grad in enumerate(stream)):
        grad.view(-1)[step % 7 :: 7] = 0
    return [[stream[step] for stream in by_shape] for step in range(steps)]


def assert_equal(expected: Trial, found: Trial, exact: bool) -> None:
    for key, held in expected.buffers().items():
        other = found.buffers()[key]
        if exact:
            assert torch.equal(other, held), key
        elif held.is_floating_point():  # sums have another order, and a value at the edge of two codes may take either
            coarse = max(torch.finfo(held.dtype).eps, 2e-6)
            apart = ~torch.isclose(other.float(), held.float(), rtol=coarse, atol=1e-6)
            assert apart.sum() <= held.numel() // 1000, key
        else:
            apart = (other.int() - held.int()).abs()
            assert apart.max() <= 1 and (apart > 0).sum() <= max(1, held.numel() // 1000), key


def is_exact(configuration: Configuration) -> bool:
    """Return whether both kernels give the same bits: there are no sums, and matrix products are torch's in both."""
    return configuration.layout((64, 64)).reach is not Reach.SUMS

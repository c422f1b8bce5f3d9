"""The parameters that optimizers are timed on. All optimizers share one set: only their states differ."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import Parameter

from baoc.core.spec import Shape
from baoc.tools.estimate import trainable_shapes
from baoc.tools.models import MODELS

Shapes = dict[str, Shape]

GPT2, SMALL, LARGE = "gpt2", "small", "large"
_WIDTH = 1024


def _gpt2() -> Shapes:
    with torch.device("meta"):
        return trainable_shapes(MODELS["gpt2-small"]())


WORKLOADS: dict[str, tuple[str, Callable[[], Shapes]]] = {
    GPT2: ("GPT2-small", _gpt2),
    SMALL: ("many small tensors", lambda: {f"{i}.weight": (1_000,) for i in range(1_000)}),
    LARGE: ("one large tensor", lambda: {"weight": (10_000, 10_000)}),
}


def matrices(parameters: int) -> Shapes:
    """Matrices of 1,024 x 1,024 and a last one with fewer rows, about so many parameters in all.

    >>> matrices(2_000_000)
    {'0.weight': (1024, 1024), '1.weight': (929, 1024)}
    """
    rows = max(1, round(parameters / _WIDTH))
    return {f"{i}.weight": (min(_WIDTH, rows - start), _WIDTH) for i, start in enumerate(range(0, rows, _WIDTH))}


def parameters(shapes: Shapes) -> dict[str, Parameter]:
    """fp32 parameters with gradients, of sizes as in training."""
    generator = torch.Generator().manual_seed(0)
    params = {}
    for name, shape in shapes.items():
        param = Parameter(torch.randn(shape, generator=generator).mul_(0.02))
        param.grad = torch.randn(shape, generator=generator).mul_(1e-3)
        params[name] = param
    return params

"""The one table that the laws are tested over: every configuration, and shapes that have broken optimizers before."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from baoc import CATALOG, EXTENDED, BlockOptimizer, Configuration, parse

CONFIGURATIONS: tuple[Configuration, ...] = (
    *CATALOG,
    *EXTENDED,
    parse("adamw[m=bf16,v=int8]"),
    parse("adamw[m=int8,v=fp32]"),
    parse("adamw[m=int8,v=factored-bf16]"),
    parse("adamw[m=int8,v=factored-int8]"),
    parse("adamw[m=int8a,v=int8a]"),
    parse("adamw[m=int8a,v=factored]"),
    parse("adamw[m=bf16a,v=bf16a]"),
    parse("adamw[m=fp8,v=fp8]"),
    parse("adamw[m=int4a,v=factored]"),
    parse("adamw[m=int4a,v=log4]"),
    parse("adamw[m=int4a,v=int8a]"),
    parse("muon[m=int4a]"),
)

NATIVE: tuple[Configuration, ...] = tuple(
    each for each in CONFIGURATIONS if not {"fp8", "int4a", "log4"} & {codec for _, codec in each.codec_names}
)
"""Those that C code runs in full."""

WEIGHTS = ("16", "8", "sr", "none")
"""Every codec of slot ``w``, the low bits of 16-bit parameters. Laws about it are over these and the table above."""

SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "empty": (0,),
    "no rows": (0, 8),
    "no columns": (8, 0),
    "vector": (7,),
    "long vector": (5003,),
    "just small": (63, 65),
    "just large": (64, 64),
    "odd matrix": (61, 83),
    "rows of several groups": (9, 700),
    "one row": (1, 4500),
    "thin": (2100, 2),
    "short rows": (600, 9),
    "stack": (5, 31, 33),
    "convolution": (16, 12, 5, 5),
    "pointwise convolution": (80, 60, 1, 1),
    "one image": (1, 3, 40, 50),
}

by_configuration = {"argnames": "configuration", "argvalues": CONFIGURATIONS, "ids": str}
by_native_configuration = {"argnames": "configuration", "argvalues": NATIVE, "ids": str}
by_shape = {"argnames": "shape", "argvalues": list(SHAPES.values()), "ids": list(SHAPES)}


def gradients(
    shape: tuple[int, ...], steps: int, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Iterator[Tensor]:
    """A stream with a constant part, noise, and scales that differ by row and column over four orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.ones(shape)
    for dim, size in enumerate(shape):
        spread = torch.logspace(-1, 1, max(size, 1))[:size][torch.randperm(size, generator=generator)]
        scale = scale * spread.view([-1 if d == dim else 1 for d in range(len(shape))])
    signal = torch.randn(shape, generator=generator)
    for _ in range(steps):
        yield (scale * (0.5 * signal + torch.randn(shape, generator=generator))).to(dtype)


def train(optimizer: torch.optim.Optimizer, param: Tensor, stream: Iterator[Tensor]) -> None:
    for grad in stream:
        param.grad = grad
        optimizer.step()


def trained(
    configuration: Configuration | str, shape: tuple[int, ...], steps: int, **settings: object
) -> tuple[BlockOptimizer, nn.Parameter]:
    param = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    optimizer = BlockOptimizer([param], plan=f"{configuration} else adamw-32", **settings)  # type: ignore[arg-type]
    train(optimizer, param, gradients(shape, steps))
    return optimizer, param

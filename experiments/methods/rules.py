"""How much state each method holds, by rule and from shapes alone: models of any size cost nothing.

``tests/experiments/test_methods.py`` checks each rule against the tensors that the real optimizer holds. BAOC has no
rule: its plan says what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import ceil, prod

from torch import nn

import baoc
from baoc.core.spec import Shape
from experiments.methods import budgeted, cosmos, galore
from experiments.methods.adam_mini import DENSE, ONE_SCALAR, PER_HEAD, word
from experiments.methods.base import MethodError
from experiments.methods.roles import Part, parts

STEP = 4  # torch counts steps in a tensor
TABLE = 4 * 256  # from codes to numbers
GROUP = 256
SMALL = 4096  # elements: smaller tensors are not quantized by anyone

Rule = Callable[[Part], int]


def state_bytes(method: str, model: nn.Module) -> int:
    """What the method holds for the model, which may be on the meta device.

    >>> state_bytes("adamw32", nn.Linear(10, 5))
    448
    """
    family, _, share = method.partition("@")
    if share and family in PLANS:
        return PLANS[family](model, float(share)).state_bytes
    if method not in RULES:
        raise MethodError(f"there is no rule for {method!r}. Known: {', '.join([*RULES, *PLANS])}.")
    return total(method, parts(model))


def total(method: str, members: Iterable[Part]) -> int:
    return sum(map(RULES[method], members)) + SHARED.get(method, 0)


def adamw32(part: Part) -> int:
    return 8 * part.param.numel() + STEP


def torchao8(part: Part) -> int:
    size = part.param.numel()
    quantized = size >= SMALL and size % GROUP == 0
    return STEP + (2 * (size + 4 * (size // GROUP) + TABLE) if quantized else 8 * size)


def bitsandbytes8(part: Part) -> int:
    return _eight_bit(part.param.numel())


def adafactor(part: Part) -> int:
    return factored(tuple(part.param.shape)) + STEP


def adam_mini(part: Part) -> int:
    shape, kind = part.param.shape, word(part)
    if kind == DENSE:
        return 8 * prod(shape)
    if kind == PER_HEAD:
        scalars = shape[0] // (part.head_rows or 1)
    elif kind == ONE_SCALAR or part.role == "kernel":
        scalars = 1
    else:
        scalars = shape[0]
    return 4 * prod(shape) + 4 * scalars


def galore_adamw8(part: Part) -> int:
    return _eight_bit(prod(_projected(part))) + _basis(part)


def galore_adamw32(part: Part) -> int:
    return 8 * prod(_projected(part)) + _basis(part)


def galore_adafactor(part: Part) -> int:
    return factored(_projected(part)) + _basis(part) + 4  # and the RMS of the weights


def spam(part: Part) -> int:
    return (9 if part.param.ndim == 2 else 8) * part.param.numel()  # with a mask


def muon(part: Part) -> int:
    return 4 * part.param.numel() if part.role == "matrix" else adamw32(part)


def cosmos_(part: Part) -> int:
    if part.role != "matrix":
        return adamw32(part)
    rows, cols = part.param.shape
    rank = cosmos.rank((rows, cols))
    return 4 * (rows * cols + cols * rank + rank * rank + rows * rank)  # m, basis, gram, v


def factored(shape: Shape) -> int:
    """Row and column means over the last two dims in fp32; for fewer dims, all of it."""
    if len(shape) < 2:
        return 4 * prod(shape)
    return 4 * (prod(shape[:-1]) + prod(shape[:-2]) * shape[-1])


def _uniform(configuration: str) -> Rule:
    parsed = baoc.parse(configuration)
    return lambda part: parsed.state_bytes(tuple(part.param.shape))


def _eight_bit(size: int) -> int:
    return 8 * size if size < SMALL else 2 * (size + 4 * ceil(size / GROUP))


def _projected(part: Part) -> Shape:
    if part.role != "matrix":
        return tuple(part.param.shape)
    rows, cols = part.param.shape
    rank = galore.rank((rows, cols))
    return (rows, rank) if rows >= cols else (rank, cols)


def _basis(part: Part) -> int:
    shape = tuple(part.param.shape)
    return 4 * min(shape) * galore.rank(shape) if part.role == "matrix" else 0


RULES: Mapping[str, Rule] = {
    "adamw32": adamw32,
    "adamw16": _uniform("adamw-16"),
    "adamw8": _uniform("adamw-8"),
    "adamw8-torchao": torchao8,
    "adamw8-bitsandbytes": bitsandbytes8,
    "adafactor": adafactor,
    "adam-mini": adam_mini,
    "galore-adamw8": galore_adamw8,
    "galore-adamw32": galore_adamw32,
    "galore-adafactor": galore_adafactor,
    "spam": spam,
    "muon": muon,
    "cosmos": cosmos_,
}
PLANS = {"by-type": budgeted.by_type, "by-size": budgeted.by_size}
SHARED = {"adamw8-bitsandbytes": 2 * TABLE, "galore-adamw8": 2 * TABLE}
"""Bytes that all parameters have in common."""

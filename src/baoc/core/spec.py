"""The vocabulary of the package: shapes, slots, buffers, hyper-parameters, and how far a computation reaches.

A *mechanism* (:mod:`baoc.core.mechanisms`) says what is remembered about a parameter and holds the update in plain fp32
math. A *codec* (:mod:`baoc.core.codecs`) says how one remembered tensor, a *slot*, is stored. A configuration is a
mechanism with one codec per slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Union

import torch
from torch import Tensor

Shape = tuple[int, ...]
Scalar = Union[float, Tensor]  # a Python float in the eager kernel, a 0-d tensor in the compiled one
Scalars = Mapping[str, Scalar]

DEFAULT_BETAS = (0.9, 0.999)

FP32_TINY = torch.finfo(torch.float32).tiny

SMALL_NUMEL = 4096
"""Parameters with fewer elements (by their global shape) keep fp32 state in every configuration."""

SPIKE = 2.0**56
"""A gradient as large as this is an accident, and sums of a few such squares overflow fp32. Where elements share
numbers (a group's scale, a row's mean, a norm), it would spoil them all: there it is left out of the state."""


def real_shape(tensor: Tensor) -> Shape:
    """A parameter's shape as layouts see it: a complex one is a real one with a last dim of 2."""
    return (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)


class Reach(IntEnum):
    """How much of a parameter must be seen at once. Kernels and sharding read it."""

    ROWS = 0  # any rows by themselves
    SUMS = 1  # sums over the tensor (factors, norms, an RMS) come first, then any rows
    MATRIX = 2  # a whole matrix


@dataclass(frozen=True)
class Buffer:
    """One stored tensor: what a format will hold, known from a shape alone.

    >>> Buffer("codes", (768, 3072), torch.int8).nbytes
    2359296
    """

    name: str
    shape: Shape  # of what is held here
    dtype: torch.dtype
    by_rows: bool = True
    """Dim 0 is the parameter's, and cut where that is; else it is of all rows, and whole on every rank."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Slot:
    """One thing a mechanism remembers per parameter element, for example Adam's first moment ``m``."""

    name: str
    signed: bool
    """A signed slot averages gradients, an unsigned one their squares."""
    age_is_state: bool = False
    """The age decides the decay for the whole run (not only the bias correction at its start), so it is held as a
    tensor and its bytes are counted, as ``torch.optim.Adafactor`` does with ``step``."""
    optional: bool = False
    """A spelling that leaves it out does without it: nothing is held, and the mechanism sees no such slot."""
    of_direction: bool = False
    """It averages the finished direction of a matrix, not the gradient."""
    codecs: tuple[str, ...] = ()
    """The only ones that can store it; empty: those that do not refuse it."""
    torch_dims: bool = False
    """Factors are of the last two dims, as in ``torch.optim.Adafactor``, not of the tensor as matrices."""
    divides: str | None = None
    """The slot that is divided by the root of this one: what of this one is lost in rounding, that one may not keep
    for an element without gradient, which would move further otherwise than exact state takes it."""


@dataclass(frozen=True)
class Setting:
    """A hyper-parameter that belongs to a mechanism. It is a key of every param group, with this default."""

    name: str
    default: Any
    wanted: str  # what a right value is, for errors
    accepts: Callable[[Any], bool] = field(compare=False, repr=False)
    help: str = ""

    def of(self, hyper: Hyper) -> Any:
        return hyper.settings.get(self.name, self.default)


@dataclass(frozen=True)
class Hyper:
    """The hyper-parameters of one param group at one step."""

    lr: float
    beta1: float = DEFAULT_BETAS[0]
    beta2: float = DEFAULT_BETAS[1]
    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_scale: float = 1.0
    """Matches a block's mechanism to the one the user's lr was tuned for. Decoupled decay uses the unscaled lr."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Those that belong to mechanisms; read one with :meth:`Setting.of`."""

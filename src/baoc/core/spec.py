"""Shared vocabulary: shapes, state slots, buffers, hyper-parameters and reach.

A *mechanism* (:mod:`baoc.core.mechanisms`) is an update rule: it defines which state is kept per parameter and computes
the update in fp32. A *codec* (:mod:`baoc.core.codecs`) defines how one state tensor, a *slot*, is stored. A
configuration is a mechanism with one codec per slot.
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
"""Parameters with fewer elements (of their global shape) keep fp32 state, unless their codec is ``int8a``."""

SPIKE = 2.0**56
"""The smallest gradient that is treated as a spike. The squares of a few such elements overflow fp32. Where elements
share numbers (a group's scale, a row's mean, a norm), one spike would spoil them all, so the state leaves it out."""

BATCH_NUMEL = 15 << 20
"""Update rules that need whole matrices work on batches of them: so many elements at once, with all that is made of
them on the way, 60 MiB of fp32; or one matrix."""


def real_shape(tensor: Tensor) -> Shape:
    """Return a parameter's shape as layouts see it.

    Args:
        tensor: the parameter.

    Returns:
        Its shape. A complex parameter counts as a real one with a last dim of 2.
    """
    return (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)


class Reach(IntEnum):
    """How much of a parameter a computation needs at once. Kernels and sharding depend on it."""

    ROWS = 0  # any rows by themselves
    SUMS = 1  # first sums over the tensor (factors, norms, an RMS), then any rows
    MATRIX = 2  # a whole matrix


@dataclass(frozen=True)
class Buffer:
    """One stored tensor, known before it is allocated.

    Args:
        name: the name within its format.
        shape: the shape on this rank.
        dtype: the dtype.
        by_rows: dim 0 is dim 0 of the parameter and is sharded with it. Otherwise every rank holds all of the buffer.

    Example:
        >>> Buffer("codes", (768, 3072), torch.int8).nbytes
        2359296
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    by_rows: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Slot:
    """One state tensor of an update rule, for example Adam's first moment ``m``.

    Args:
        name: the name in spellings and in the optimizer's state.
        signed: a signed slot averages gradients, an unsigned one their squares.
        age_is_state: the age sets the decay during the whole run, not only the bias correction at its start. It is then
            held as a tensor and counted, as ``step`` in ``torch.optim.Adafactor``.
        optional: a spelling that leaves the slot out runs without it.
        of_direction: the slot averages the finished direction of a matrix instead of the gradient.
        sets_length: the slot has one number per matrix, which sets the length of its update: see
            :meth:`~baoc.core.mechanisms.Mechanism.length`.
        codecs: the only codecs that can store it. Empty: all that do not refuse it.
        torch_dims: factors are taken over the last two dims, as in ``torch.optim.Adafactor``, instead of over the
            tensor as matrices.
        of_weight: the slot keeps what rounding removed from the parameter itself; no gradient is averaged into it.
    """

    name: str
    signed: bool
    age_is_state: bool = False
    optional: bool = False
    of_direction: bool = False
    sets_length: bool = False
    codecs: tuple[str, ...] = ()
    torch_dims: bool = False
    of_weight: bool = False

    @property
    def is_average(self) -> bool:
        """Whether kernels advance the slot row by row, as an average of gradients."""
        return not (self.is_of_matrix or self.of_weight)

    @property
    def is_of_matrix(self) -> bool:
        """Whether kernels advance the slot once a whole matrix is known, instead of row by row."""
        return self.of_direction or self.sets_length


WEIGHT = Slot("w", signed=True, optional=True, codecs=("16", "8", "sr", "none"), of_weight=True)
"""The low bits of a 16-bit parameter: a slot that every update rule has. See :mod:`baoc.core.codecs.weights`."""

DEFAULT_WEIGHT, SMALLEST_WEIGHT = "8", "sr"
"""Its format where nothing else is asked for, and where no byte may be spent on it."""

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Dtypes of parameters that have the slot."""


@dataclass(frozen=True)
class Setting:
    """A hyper-parameter of one update rule. Every param group has it as a key.

    Args:
        name: the key.
        default: the value of groups that do not set it.
        wanted: what a valid value is, for errors.
        accepts: whether a value is valid.
        help: what it does, in one line.
    """

    name: str
    default: Any
    wanted: str
    accepts: Callable[[Any], bool] = field(compare=False, repr=False)
    help: str = ""

    def of(self, hyper: Hyper) -> Any:
        """Return the value of a param group.

        Args:
            hyper: the group's hyper-parameters.

        Returns:
            The group's value, or the default.
        """
        return hyper.settings.get(self.name, self.default)


@dataclass(frozen=True)
class Hyper:
    """The hyper-parameters of one param group at one step.

    Args:
        lr: the learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: weight decay. Decoupled decay uses ``lr`` without ``lr_scale``.
        lr_scale: the learning-rate multiplier of a block.
        settings: settings of update rules, by name. Read one with :meth:`Setting.of`.
    """

    lr: float
    beta1: float = DEFAULT_BETAS[0]
    beta2: float = DEFAULT_BETAS[1]
    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_scale: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)

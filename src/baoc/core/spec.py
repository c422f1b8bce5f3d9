"""The vocabulary of the package: slots, buffers, and the two protocols that every optimizer here is composed from.

A :class:`Mechanism` says what is remembered about a parameter and holds the update in plain fp32 math. A :class:`Codec`
says how one remembered tensor (a *slot*) is stored. A configuration is a mechanism with one codec per slot.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Union

import torch
from torch import Tensor

Shape = tuple[int, ...]
Scalar = Union[float, Tensor]  # a Python float in the eager kernel, a 0-d tensor in the compiled one
Scalars = Mapping[str, Scalar]

DEFAULT_BETAS = (0.9, 0.999)

FP32_TINY = torch.finfo(torch.float32).tiny

SMALL_NUMEL = 4096
"""Parameters with fewer elements (by their global shape) keep fp32 state in every configuration."""


def real_shape(tensor: Tensor) -> Shape:
    """A parameter's shape as layouts see it: a complex one is a real one with a last dim of 2."""
    return (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)


@dataclass(frozen=True)
class Buffer:
    """One stored tensor: what a codec will hold, known from a shape alone.

    >>> Buffer("codes", (768, 3072), torch.int8).nbytes
    2359296
    """

    name: str
    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Slot:
    """One thing a mechanism remembers per parameter element, for example Adam's first moment ``m``."""

    name: str
    signed: bool
    age_is_state: bool = False
    """The age decides the decay for the whole run (not only the bias correction at its start), so it is held as a
    tensor and its bytes are counted, as ``torch.optim.Adafactor`` does with ``step``."""


@dataclass(frozen=True)
class Hyper:
    """The hyper-parameters of one param group at one step, as plain floats."""

    lr: float
    beta1: float = DEFAULT_BETAS[0]
    beta2: float = DEFAULT_BETAS[1]
    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_scale: float = 1.0
    """Matches a block's mechanism to the one the user's lr was tuned for. Decoupled decay uses the unscaled lr."""
    beta2_decay: float = -0.8
    adafactor_eps: tuple[float, float] = (torch.finfo(torch.float32).eps, 1e-3)
    clip_threshold: float = 1.0


class Reach(Enum):
    """How much of a parameter a mechanism must see at once. Kernels and sharding read it."""

    ELEMENT = "element"
    MATRIX = "matrix"


# Additive recurrences with the "plastic number" ratios: (index, age) -> phase is a two-dimensional low-discrepancy
# sequence, so every element rounds up in the right share of steps, and every step in the right share of elements.
# 23 bits, which native code can read as the mantissa of a float without shifting them.
_PHASE_PER_ELEMENT = 0x609FD5
_PHASE_PER_STEP = 0x48F087
_PHASE_PER_SLOT = 0x4F1BBD
_PHASE_BITS = 23
_PHASE_MASK = (1 << _PHASE_BITS) - 1

NOISE_ONE = 1 << 16
NOISE_MARGIN = 8
"""Noise has 12 bits and lies half a step away from 0 and 1, so that a value which is representable up to fp32 rounding
stays where it is."""


def rounding_phase(age: int, slot_index: int) -> int:
    """Where the rounding sequence of a slot stands at an age. Depends on nothing else, so a resumed run repeats it."""
    return (age * _PHASE_PER_STEP + slot_index * _PHASE_PER_SLOT) & _PHASE_MASK


@dataclass(frozen=True)
class Rounding:
    """How a codec rounds: to nearest, or dithered by a reproducible low-discrepancy sequence.

    Rounding to nearest would freeze a second moment in a low-precision format: at beta2 = 0.999 a step changes it by
    0.1%, less than half a code. Dithering is right on average, needs no generator state, and does not depend on tiles,
    threads or shards.
    """

    phase: int | Tensor | None = None
    """``None`` rounds to nearest."""
    toward_zero: Tensor | None = None  # bool, shape of the tile: elements that must not grow
    away_from_zero: Tensor | None = None  # bool, shape of the tile: elements that must not shrink

    def noise(self, first_row: int, shape: Shape, device: torch.device) -> Tensor:
        """int32 noise in [0, 65536): a fraction f of a code is rounded up if ``f * 65536 + noise >= 65536``.

        ``first_row`` is the tile's first row in the whole tensor, whose rows have ``prod(shape[1:])`` elements.
        """
        if self.phase is None:
            noise = torch.full(shape, NOISE_ONE // 2, dtype=torch.int32, device=device)
        else:
            row_numel = math.prod(shape[1:])
            index = torch.arange(shape[0] * row_numel, device=device) + first_row * row_numel
            phase = (index * _PHASE_PER_ELEMENT + self.phase) & _PHASE_MASK
            noise = ((phase >> _PHASE_BITS - 16) & -2 * NOISE_MARGIN | NOISE_MARGIN).to(torch.int32).view(shape)
        if self.toward_zero is not None:
            noise = noise.masked_fill(self.toward_zero.view(shape), NOISE_MARGIN)
        if self.away_from_zero is not None:
            noise = noise.masked_fill(self.away_from_zero.view(shape), NOISE_ONE - NOISE_MARGIN)
        return noise


NEAREST = Rounding()


class Codec(ABC):
    """How one slot is stored.

    Laws, each tested for every codec and many shapes: the buffers that are allocated are exactly those of
    :meth:`layout`; ``encode(decode(state))`` changes no byte.
    """

    name: ClassVar[str]
    bits: ClassVar[int]
    pointwise: ClassVar[bool] = True
    """A row's state depends on that row alone. A codec that is not is a :class:`WholeCodec`."""
    view_dims: ClassVar[int | None] = None
    """1: any shape will do. 2: only rows matter. ``None``: needs the parameter's own shape."""

    def __eq__(self, other: object) -> bool:  # codecs have no settings: two of one kind are the same
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def resolve(self, shape: Shape) -> Codec:
        """The codec that is really used for a parameter of this *global* shape: itself, or what it falls back to."""
        return self

    @abstractmethod
    def layout(self, shape: Shape, slot: Slot) -> tuple[Buffer, ...]:
        """The buffers for a parameter, or for a shard of one on dim 0, of this shape."""

    @abstractmethod
    def decode(self, buffers: Mapping[str, Tensor], rows: slice) -> Tensor:
        """Rows of the slot as fp32, shape ``(len(rows), *shape[1:])``. May alias the buffer: do not write to it."""

    @abstractmethod
    def encode(self, buffers: Mapping[str, Tensor], rows: slice, value: Tensor, rounding: Rounding) -> None:
        """Store fp32 rows."""


class WholeCodec(Codec):
    """A codec that keeps reductions over all rows, and so advances ``state <- keep * state + add * x`` by itself.

    The reductions are linear, which makes this the same as decoding, blending and encoding.
    """

    pointwise: ClassVar[bool] = False

    @abstractmethod
    def expand(self, buffers: Mapping[str, Tensor], rows: slice, mean_floor: Scalar) -> Tensor:
        """Decode, dividing by no grand mean smaller than ``mean_floor`` (a mechanism's ``<slot>.mean_floor``)."""

    def decode(self, buffers: Mapping[str, Tensor], rows: slice) -> Tensor:
        return self.expand(buffers, rows, FP32_TINY)

    @abstractmethod
    def absorb(
        self,
        buffers: Mapping[str, Tensor],
        rows: slice,
        x: Tensor,
        keep: Scalar,
        add: Scalar,
        rounding: Rounding,
        partial: Tensor | None,
    ) -> Tensor | None:
        """Take in rows of ``x``. Returns what must be carried to the next tile (``None`` before the first)."""

    @abstractmethod
    def finish(
        self, buffers: Mapping[str, Tensor], keep: Scalar, add: Scalar, rounding: Rounding, partial: Tensor | None
    ) -> None:
        """Called once after the last row."""


class Mechanism(ABC):
    """What is remembered about a parameter, and the update, in fp32 math over any tile of it.

    Every slot follows a linear recurrence ``slot <- keep * slot + add * observe(gradient)``; the two coefficients are
    scalars named ``<slot>.keep`` and ``<slot>.add``.
    """

    name: ClassVar[str]
    slots: ClassVar[tuple[Slot, ...]] = ()
    adaptive: ClassVar[bool] = False
    momentum: ClassVar[bool] = False
    decoupled: ClassVar[bool] = False
    reach: ClassVar[Reach] = Reach.ELEMENT
    normalizes: ClassVar[bool] = False
    """The step length depends on the RMS of the whole direction and of the parameter: see :meth:`step_factor`."""
    default_codecs: ClassVar[Mapping[str, str]] = {}
    """Codec names where a spelling leaves a slot out; fp32 for those not named here."""

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        """All numbers of this step, computed once in double precision. ``ages`` count this step already."""
        return {
            "step": hyper.lr * hyper.lr_scale,
            "shrink": 1.0 - hyper.lr * hyper.weight_decay if self.decoupled else 1.0,
            "coupled_decay": 0.0 if self.decoupled else hyper.weight_decay,
        }

    def observe(self, slot: str, grad: Tensor) -> Tensor:
        """What a slot averages."""
        raise NotImplementedError(f"{self.name} has no slot {slot!r}")

    @abstractmethod
    def direction(self, grad: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        """The update before the step length; the parameter moves by ``-step * direction``."""

    def step_factor(self, direction_rms: Tensor, param_rms: Tensor, scalars: Scalars) -> Tensor:
        """Factor on the step length, if :attr:`normalizes`."""
        raise NotImplementedError

    def mass(self, slot: str, age: int, hyper: Hyper) -> float:
        """Sum of the recurrence's weights after ``age`` steps: ``slot / mass`` is a plain weighted mean.

        The mean is what mechanisms have in common, so it is what migrates between them.
        """
        raise NotImplementedError(f"{self.name} has no slot {slot!r}")

    def infer(self, slot: str, means: Mapping[str, Tensor], ages: Mapping[str, int], hyper: Hyper) -> Tensor | None:
        """A safe mean for a slot that the previous mechanism did not have, or ``None`` to start it at zero."""
        return None

    def inferred_age(self, slot: str, ages: Mapping[str, int], hyper: Hyper) -> int:
        """The age that goes with :meth:`infer`: how many steps of evidence the inferred value stands for."""
        return 0

    @abstractmethod
    def expected_direction(self, means: Mapping[str, Tensor], ages: Mapping[str, int], hyper: Hyper) -> Tensor | None:
        """What :meth:`direction` gives after a typical next gradient, from means alone; ``None`` if they cannot tell.

        Its RMS matches learning rates when a block changes its mechanism.
        """

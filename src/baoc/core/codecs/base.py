"""The two halves of storage: a codec says how a slot *could* be stored, a format how one slot of one parameter *is*."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from baoc.core.rounding import Rounding
from baoc.core.spec import FP32_TINY, Buffer, Reach, Scalar, Shape, Slot

Held = Mapping[str, Tensor]  # a format's buffers under its own names, each with at least one dim


class Codec(ABC):
    """How a slot could be stored. :meth:`at` binds it to a parameter, after its fallbacks for small or thin ones."""

    name: ClassVar[str]
    bits: ClassVar[int]
    factored: ClassVar[bool] = False
    """The paper's switch of this name: what is kept are means over rows and columns."""

    def __eq__(self, other: object) -> bool:  # codecs have no settings: two of one kind are the same
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    @abstractmethod
    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        """How a slot of a parameter of this *global* shape is stored, or ``rows`` of its dim 0 on one rank."""

    def exact(self) -> str:
        """The name of the codec that keeps the same without rounding."""
        return "fp32"

    def refusal(self, slot: Slot) -> str | None:
        """Why this codec cannot store a slot, or ``None``."""
        return None


@dataclass(frozen=True)
class Format(ABC):
    """How one slot of one parameter is stored.

    Laws, each tested for every codec and many shapes: the buffers that are held are exactly :attr:`buffers`;
    ``encode(decode(held))`` changes no byte. Which kernels have code of their own for a format is theirs to say, by its
    very class; every other one runs in torch operations.
    """

    slot: Slot
    shape: Shape  # of the whole parameter
    rows: int | None = None  # of its dim 0 that are held here; None: all
    age_key: str = field(init=False, repr=False, compare=False)
    keys: tuple[tuple[str, str], ...] = field(init=False, repr=False, compare=False)
    """(own name, key in the state) of every buffer."""

    reach: ClassVar[Reach] = Reach.ROWS
    rounds: ClassVar[bool] = True
    """Some fp32 numbers are not stored as they are."""
    shares: ClassVar[bool] = True
    """Elements have numbers in common, such as a scale or a mean: see :data:`~baoc.core.spec.SPIKE`."""
    groups: ClassVar[bool] = False
    """Elements share a scale or an exponent: see :meth:`strained`."""
    view_dims: ClassVar[int | None] = None
    """1: it works on its tensors in any shape. 2: only rows matter. ``None``: needs the parameter's own shape."""

    def __post_init__(self) -> None:  # not when first asked: torch.compile cannot trace that
        object.__setattr__(self, "age_key", f"{self.slot.name}.age")
        object.__setattr__(self, "keys", tuple((buffer.name, self.key(buffer.name)) for buffer in self.buffers))

    @property
    @abstractmethod
    def buffers(self) -> tuple[Buffer, ...]:
        """What is held."""

    @abstractmethod
    def decode(self, held: Held, rows: slice) -> Tensor:
        """Rows of the slot as fp32, shape ``(len(rows), *shape[1:])``. May alias the buffer: do not write to it."""

    @abstractmethod
    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        """Store fp32 rows."""

    def adopted(self, found: Held) -> dict[str, Tensor] | None:
        """Buffers of an earlier way to store this slot, by their names then, in today's; ``None`` if these are not."""
        return None

    def problem(self, held: Held) -> str | None:
        """What is wrong with numbers that come from outside, or ``None``. Shapes and dtypes are right already."""
        return None

    def strained(self, held: Held, rows: slice) -> Tensor:
        """Which groups of some rows have too few codes for what they hold, shape ``(rows, groups)``, as booleans.

        That is a group at the end of its range, and one where a few large elements leave next to none to the others:
        these then move by rounding alone. A group of zeros is not strained. Where :attr:`groups` is false, nothing is.
        """
        raise NotImplementedError(f"{type(self).__name__} has no groups")

    def graph_key(self) -> Hashable:
        """What a traced graph of this format depends on, beside the shapes of its tensors.

        By default on everything, which makes a graph for each shape. A format whose code reads shapes off its tensors
        alone may say less.
        """
        return self

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def zeros(self, device: torch.device) -> dict[str, Tensor]:
        """New buffers, under their own names."""
        return {each.name: torch.zeros(each.shape, dtype=each.dtype, device=device) for each in self.buffers}

    @property
    def held_shape(self) -> Shape:
        """Of the rows that are held here."""
        return self.shape if self.rows is None or not self.shape else (self.rows, *self.shape[1:])

    def key(self, buffer: str) -> str:
        """Where a buffer lives in the optimizer's per-parameter state."""
        return joined(self.slot.name, buffer)

    def held_in(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """The buffers in a parameter's state, under their own names."""
        found = {name: state[key] for name, key in self.keys}
        return {name: tensor if tensor.dim() else tensor.view(1) for name, tensor in found.items()}


@dataclass(frozen=True)
class SummedFormat(Format):
    """A format that keeps sums over all rows, and so advances ``state <- keep * state + add * x`` by itself.

    The sums are linear, which makes this the same as decoding, blending and encoding.
    """

    reach: ClassVar[Reach] = Reach.SUMS

    @abstractmethod
    def expand(self, held: Held, rows: slice, mean_floor: Scalar) -> Tensor:
        """Decode, dividing by no grand mean smaller than ``mean_floor`` (a mechanism's ``<slot>.mean_floor``)."""

    def decode(self, held: Held, rows: slice) -> Tensor:
        return self.expand(held, rows, FP32_TINY)

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        partial = self.absorb(held, rows, value, 0.0, 1.0, rounding, None)
        self.finish(held, 0.0, 1.0, rounding, partial)

    @abstractmethod
    def absorb(
        self, held: Held, rows: slice, x: Tensor, keep: Scalar, add: Scalar, rounding: Rounding, partial: Tensor | None
    ) -> Tensor | None:
        """Take in rows of ``x``. Returns what must be carried to the next tile (``None`` before the first)."""

    @abstractmethod
    def finish(self, held: Held, keep: Scalar, add: Scalar, rounding: Rounding, partial: Tensor | None) -> None:
        """Called once after the last row, with the sum of all shards' partials."""


def joined(name: str, buffer: str) -> str:
    """A name below another one. The empty name is the thing itself."""
    return ".".join(part for part in (name, buffer) if part)

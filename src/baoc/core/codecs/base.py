"""The interface of codecs and formats, and the dense formats: one fp32 or bf16 number per element.

A codec says how a slot *could* be stored. Bound to one parameter, it becomes a format, which says how it *is* stored.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from baoc.core.rounding import Rounding
from baoc.core.spec import FP32_TINY, SMALL_NUMEL, Buffer, Reach, Scalar, Shape, Slot

Held = Mapping[str, Tensor]  # buffers by their name within the format, each with at least one dim


class Codec(ABC):
    """How a slot could be stored. :meth:`at` binds it to a parameter.

    Example:
        >>> from baoc import parse
        >>> parse("adamw-8").codec_names
        (('m', 'int8'), ('v', 'int8'))
    """

    name: ClassVar[str]
    bits: ClassVar[int]
    factored: ClassVar[bool] = False
    """The paper's switch: the codec keeps means over rows and columns."""

    def __eq__(self, other: object) -> bool:  # codecs have no settings, so two of one class are equal
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    @abstractmethod
    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        """Return the format of one parameter, which may be a simpler one for small or thin parameters.

        Args:
            shape: *global* shape of the parameter.
            slot: the slot to store.
            rows: rows of dim 0 on this rank. ``None``: all.

        Returns:
            The format.
        """

    def exact(self) -> str:
        """Return the name of the codec that stores the same numbers without rounding."""
        return "fp32"

    def refusal(self, slot: Slot) -> str | None:
        """Return why this codec cannot store a slot, or ``None`` if it can.

        Args:
            slot: the slot of an update rule.
        """
        return None


@dataclass(frozen=True)
class Format(ABC):
    """How one slot of one parameter is stored.

    Tests check these laws for every codec and many shapes. The state holds exactly :attr:`buffers`. With reach
    ``ROWS``, ``encode(decode(held))`` keeps every byte, with any rounding; :class:`SummedFormat` has a weaker law.
    Kernels have fast code for exact classes of formats; all others run in torch operations.

    Args:
        slot: the slot.
        shape: global shape of the parameter.
        rows: rows of dim 0 on this rank. ``None``: all.

    Example:
        >>> from baoc import parse
        >>> configuration = parse("adamw-8")
        >>> [slot.name for slot in configuration.slots]
        ['m', 'v']
    """

    slot: Slot
    shape: Shape
    rows: int | None = None
    age_key: str = field(init=False, repr=False, compare=False)
    keys: tuple[tuple[str, str], ...] = field(init=False, repr=False, compare=False)
    """Pairs of a buffer's own name and its key in the state."""

    reach: ClassVar[Reach] = Reach.ROWS
    rounds: ClassVar[bool] = True
    """Some fp32 numbers are not stored exactly."""
    shares: ClassVar[bool] = True
    """Elements share numbers, such as a scale or a mean: see :data:`~baoc.core.spec.SPIKE`."""
    groups: ClassVar[bool] = False
    """Elements share a scale or an exponent: see :meth:`underflowed`."""
    view_dims: ClassVar[int | None] = None
    """1: works on tensors of any shape. 2: only rows matter. ``None``: needs the parameter's own shape."""

    def __post_init__(self) -> None:  # not lazily: torch.compile cannot trace cached properties
        object.__setattr__(self, "age_key", f"{self.slot.name}.age")
        object.__setattr__(self, "keys", tuple((buffer.name, self.key(buffer.name)) for buffer in self.buffers))

    @property
    @abstractmethod
    def buffers(self) -> tuple[Buffer, ...]:
        """The stored tensors."""

    @abstractmethod
    def decode(self, held: Held, rows: slice) -> Tensor:
        """Read rows of the slot.

        Args:
            held: the buffers.
            rows: the rows.

        Returns:
            fp32 values, shape ``(len(rows), *shape[1:])``. They may alias a buffer: do not write to them.
        """

    @abstractmethod
    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        """Store rows of the slot.

        Args:
            held: the buffers.
            rows: the rows.
            value: fp32 values, shape ``(len(rows), *shape[1:])``.
            rounding: how to round.
        """

    def problem(self, held: Held) -> str | None:
        """Return what is wrong with the numbers of a checkpoint, or ``None``.

        Args:
            held: buffers with the right shapes and dtypes.
        """
        return None

    def underflowed(self, held: Held, rows: slice) -> Tensor:
        """Return which quantization groups lost their content. Their share is the *underflow fraction*.

        In such a group, a few large elements leave next to no codes to the others, which then change by rounding
        alone. A group at the upper end of its range counts too. A group of zeros does not.

        Args:
            held: the buffers.
            rows: the rows to look at.

        Returns:
            Booleans, shape ``(rows, groups)``.

        Raises:
            NotImplementedError: if the format has no :attr:`groups`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no groups")

    def graph_key(self) -> Hashable:
        """Return what a traced graph of this format depends on, beside the shapes of its tensors.

        The default is everything, which makes one graph per shape. A format whose code reads all shapes off its
        tensors can return less.
        """
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def zeros(self, device: torch.device) -> dict[str, Tensor]:
        """Allocate the buffers.

        Args:
            device: where.

        Returns:
            Zeros by buffer name.
        """
        return {each.name: torch.zeros(each.shape, dtype=each.dtype, device=device) for each in self.buffers}

    @property
    def held_shape(self) -> Shape:
        """Shape of this rank's rows."""
        return self.shape if self.rows is None or not self.shape else (self.rows, *self.shape[1:])

    def key(self, buffer: str) -> str:
        """Return the key of a buffer in the optimizer's state of one parameter.

        Args:
            buffer: the name of one of the buffers of this format.
        """
        return joined(self.slot.name, buffer)

    def held_in(self, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the buffers in the optimizer's state of one parameter.

        Args:
            state: the state.

        Returns:
            Buffer by its own name, with at least one dim.
        """
        found = {name: state[key] for name, key in self.keys}
        return {name: tensor if tensor.dim() else tensor.view(1) for name, tensor in found.items()}


@dataclass(frozen=True)
class SummedFormat(Format):
    """A format of means over rows or columns, which advances ``state <- keep * state + add * x`` by itself.

    Means are linear, so this equals decoding, blending and encoding without ever building the full tensor.

    Law: ``encode(decode(held))`` takes the means again. fp32 means change by at most 1e-6 of themselves, the error of
    fp32 sums. Rounded row factors keep every byte. A rounded column factor is rounded again after it was scaled by the
    ratio of the two grand means, so a decoded value changes by at most one code for its column and one for the mean of
    the columns: 1.6% in bf16, 29% in int8, apart from values below the smallest code.
    """

    reach: ClassVar[Reach] = Reach.SUMS

    @abstractmethod
    def expand(self, held: Held, rows: slice, mean_floor: Scalar) -> Tensor:
        """Read rows of the slot, with a floor for the mean that is divided by.

        Args:
            held: the buffers.
            rows: the rows.
            mean_floor: the smallest grand mean to divide by (an update rule's ``<slot>.mean_floor``).

        Returns:
            fp32 values, shape ``(len(rows), *shape[1:])``.
        """

    def decode(self, held: Held, rows: slice) -> Tensor:
        return self.expand(held, rows, FP32_TINY)

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        partial = self.absorb(held, rows, value, 0.0, 1.0, rounding, None)
        self.finish(held, 0.0, 1.0, rounding, partial)

    @abstractmethod
    def absorb(
        self, held: Held, rows: slice, x: Tensor, keep: Scalar, add: Scalar, rounding: Rounding, partial: Tensor | None
    ) -> Tensor | None:
        """Blend rows of ``x`` into the means.

        Args:
            held: the buffers.
            rows: the rows.
            x: fp32 values, shape ``(len(rows), *shape[1:])``.
            keep: factor of the old means.
            add: factor of ``x``.
            rounding: how to round.
            partial: what the previous tile returned; ``None`` before the first.

        Returns:
            Partial sums over rows to pass to the next tile, or ``None`` if the format has none.
        """

    @abstractmethod
    def finish(self, held: Held, keep: Scalar, add: Scalar, rounding: Rounding, partial: Tensor | None) -> None:
        """Store sums over all rows, once after the last tile.

        Args:
            held: the buffers.
            keep: factor of the old means.
            add: factor of the sums.
            rounding: how to round.
            partial: what the last tile returned, summed over all shards.
        """


def joined(name: str, buffer: str) -> str:
    """Join the names of a slot or factor and of its buffer. A buffer without a name has the key of its slot."""
    return ".".join(part for part in (name, buffer) if part)


@dataclass(frozen=True)
class FP32Format(Format):
    """One fp32 number per element."""

    rounds = False
    shares = False
    view_dims = 1

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (Buffer("", self.held_shape, torch.float32),)

    def decode(self, held: Held, rows: slice) -> Tensor:
        return held[""][rows]

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        held[""][rows].copy_(value)

    def problem(self, held: Held) -> str | None:
        if not bool(held[""].isfinite().all()):
            return "numbers that are not finite"
        return "negative numbers" if not self.slot.signed and bool((held[""] < 0).any()) else None

    def graph_key(self) -> Hashable:
        return type(self)


@dataclass(frozen=True)
class BF16Format(FP32Format):
    """One bf16 number per element."""

    rounds = True

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return (Buffer("", self.held_shape, torch.bfloat16),)

    def decode(self, held: Held, rows: slice) -> Tensor:
        return held[""][rows].float()

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        # bf16 is the upper half of fp32. Noise added to the lower half carries into the upper half with the right
        # frequency, away from zero for either sign. Dropping the lower half is then exact.
        bits = value.contiguous().view(torch.int32)
        noise = rounding.noise(rows.start, tuple(value.shape), value.device)
        held[""][rows].copy_(((bits + noise) & -0x10000).view(torch.float32))


class FP32(Codec):
    """32 bits per element: the exact codec."""

    name = "fp32"
    bits = 32

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        return FP32Format(slot, shape, rows)


class BF16(Codec):
    """16 bits per element, with dithered rounding."""

    name = "bf16"
    bits = 16

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        return (FP32Format if math.prod(shape) < SMALL_NUMEL else BF16Format)(slot, shape, rows)

"""Rounding of stored state: to nearest, or dithered by a sequence that depends only on an element's index and age."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from baoc.core.spec import Shape

# Over the elements of one step, the phase is an additive recurrence with a "plastic number" ratio: every step rounds up
# the right fraction of elements.
PHASE_PER_ELEMENT = 0x609FD5
_PHASE_PER_SLOT = 0x4F1BBD
PHASE_BITS = 23
PHASE_MASK = (1 << PHASE_BITS) - 1
# Over the steps of one element, the phase takes each of 512 values once, in a shuffled order: every element rounds up
# in the right fraction of steps. A recurrence would do that too, but its steps correlate: a number that decays by less
# than a code per step then came out up to 4% too small.
_ROUND_BITS = 9
_ROUND_MASK = (1 << _ROUND_BITS) - 1
_SHUFFLING = (0x0B5, 0x1A3, 0x0E9)
_PHASE_PER_ROUND = 0x48F087

NOISE_ONE = 1 << 16
"""The noise that stands for one whole code."""

NOISE_MARGIN = 8
"""The distance of noise from 0 and from :data:`NOISE_ONE`. Noise has 12 bits and lies half a step inside of both, so a
value that is representable up to fp32 rounding error is stored as it is."""

IDLE_SHIFT = 5
"""Rounding makes an element without gradient larger by at most ``2**-IDLE_SHIFT``, where elements share a scale and
each has a second moment of its own. Codes above the lowest octave of int8 are this close together, so there nothing
changes; smaller ones shrink with every step for beta1 up to 0.969. The codes of int4 are further apart, so its momentum
is rounded down at rest."""

LOOSE_IDLE_SHIFT = 0
"""The same without such a second moment: rounding at most doubles an element. Then one that stays on its code is as far
from zero as its neighbors, which go on feeding what it is divided by. A decaying int4 code keeps its mean."""


def rounding_phase(age: int, slot_index: int) -> int:
    """Return the phase of the rounding sequence of a slot.

    Args:
        age: the slot's age. A resumed run repeats the sequence, because the phase depends on nothing else.
        slot_index: the place of the slot among those of its configuration.

    Returns:
        The phase of element 0, of 23 bits.

    Example:
        >>> len({rounding_phase(age, 0) >> 14 for age in range(512)})
        512
    """
    round_, place = divmod(age, 1 << _ROUND_BITS)
    place = (place + round_ * _SHUFFLING[0]) & _ROUND_MASK  # another order in every round
    for factor in _SHUFFLING:
        place = place * factor & _ROUND_MASK
        place ^= place >> 4
    phase = (place << PHASE_BITS - _ROUND_BITS) + round_ * _PHASE_PER_ROUND + slot_index * _PHASE_PER_SLOT
    return phase & PHASE_MASK


def phase_at(phase: int, element: int) -> int:
    """Return the phase of a part of a tensor, so that it rounds as it does within the whole.

    Args:
        phase: the phase of the whole tensor.
        element: the index of the part's first element.

    Returns:
        The phase of the part.

    Example:
        >>> whole = Rounding(5).noise(0, (6,), torch.device("cpu"))
        >>> torch.equal(whole[4:], Rounding(phase_at(5, 4)).noise(0, (2,), torch.device("cpu")))
        True
    """
    return (phase + element * PHASE_PER_ELEMENT) & PHASE_MASK


@dataclass(frozen=True)
class Rounding:
    """How a codec rounds: to nearest, or dithered by a reproducible low-discrepancy sequence.

    Rounding to nearest would freeze a second moment in a low-precision format: at beta2 = 0.999 a step changes it by
    0.1%, less than half a code. Dithering is right on average, needs no generator state, and does not depend on tiles,
    threads or shards.

    Args:
        phase: the phase of the sequence. ``None`` rounds to nearest.
        idle: elements without gradient, as booleans of the tile's shape. They are dithered too, so one that rests
            between gradients moves as far as with exact state, on average. But where elements share a scale, rounding
            adds at most ``2**-idle_shift`` to one of them: the smallest codes are a long way for a small element, and
            it must not stay on one of them while its second moment decays.
        first_row: the row of the whole parameter at which this rank's rows start, so that a shard rounds as the whole.
        idle_shift: :data:`IDLE_SHIFT` or :data:`LOOSE_IDLE_SHIFT`.
    """

    phase: int | Tensor | None = None
    idle: Tensor | None = None
    first_row: int = 0
    idle_shift: int = IDLE_SHIFT

    def noise(self, first_row: int, shape: Shape, device: torch.device) -> Tensor:
        """Return the noise of a tile. A fraction f of a code rounds up if ``f * 65536 + noise >= 65536``.

        Args:
            first_row: the tile's first row among those of this rank.
            shape: the tile's shape. A row has ``prod(shape[1:])`` elements.
            device: where to make it.

        Returns:
            int32 noise in [0, 65536), in the tile's shape.
        """
        if self.phase is None:
            noise = torch.full(shape, NOISE_ONE // 2, dtype=torch.int32, device=device)
        else:
            row_numel = math.prod(shape[1:])
            index = torch.arange(shape[0] * row_numel, dtype=torch.int64, device=device)
            index = index + (self.first_row + first_row) * row_numel
            phase = (index * PHASE_PER_ELEMENT + self.phase) & PHASE_MASK
            noise = ((phase >> PHASE_BITS - 16) & -2 * NOISE_MARGIN | NOISE_MARGIN).to(torch.int32).view(shape)
        return noise


NEAREST = Rounding()

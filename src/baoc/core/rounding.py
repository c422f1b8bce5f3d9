"""How codecs round: to nearest, or dithered by a sequence that depends on an element's place and age alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from baoc.core.spec import Shape

# Across the elements of a step the phase is an additive recurrence with a "plastic number" ratio, so every step rounds
# up in the right share of elements.
PHASE_PER_ELEMENT = 0x609FD5
_PHASE_PER_SLOT = 0x4F1BBD
PHASE_BITS = 23
PHASE_MASK = (1 << PHASE_BITS) - 1
# Across steps it takes each of 512 places once, in a shuffled order, so every element rounds up in the right share of
# steps. A recurrence would have that too, but remembers: a number that decays by less than a code per step is what
# earlier roundings made of it, and came out up to 4% too small.
_ROUND_BITS = 9
_ROUND_MASK = (1 << _ROUND_BITS) - 1
_SHUFFLING = (0x0B5, 0x1A3, 0x0E9)
_PHASE_PER_ROUND = 0x48F087

NOISE_ONE = 1 << 16
NOISE_MARGIN = 8
"""Noise has 12 bits and lies half a step away from 0 and 1, so that a value which is representable up to fp32 rounding
stays where it is."""


def rounding_phase(age: int, slot_index: int) -> int:
    """Where the rounding sequence of a slot stands at an age. Depends on nothing else, so a resumed run repeats it.

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
    """The phase under which a tensor that begins at another one's ``element`` is rounded as that one is there.

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
    """

    phase: int | Tensor | None = None
    """``None`` rounds to nearest."""
    toward_zero: Tensor | None = None  # bool, shape of the tile: elements that must not grow
    first_row: int = 0  # of the rows that are held here, in the whole parameter: a shard rounds as the whole does

    def noise(self, first_row: int, shape: Shape, device: torch.device) -> Tensor:
        """int32 noise in [0, 65536): a fraction f of a code is rounded up if ``f * 65536 + noise >= 65536``.

        ``first_row`` is the tile's first row among those held here, which have ``prod(shape[1:])`` elements each.
        """
        if self.phase is None:
            noise = torch.full(shape, NOISE_ONE // 2, dtype=torch.int32, device=device)
        else:
            row_numel = math.prod(shape[1:])
            index = torch.arange(shape[0] * row_numel, device=device) + (self.first_row + first_row) * row_numel
            phase = (index * PHASE_PER_ELEMENT + self.phase) & PHASE_MASK
            noise = ((phase >> PHASE_BITS - 16) & -2 * NOISE_MARGIN | NOISE_MARGIN).to(torch.int32).view(shape)
        if self.toward_zero is not None:
            noise = noise.masked_fill(self.toward_zero.view(shape), NOISE_MARGIN)
        return noise


NEAREST = Rounding()

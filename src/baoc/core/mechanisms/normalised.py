"""What mechanisms have in common whose updates have a length of their own, whatever the size of the gradients is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from baoc.core.mechanisms.base import Evidence, Mechanism
from baoc.core.spec import Hyper, Scalars, Setting, Slot

UPDATE_RMS = Setting(
    "update_rms",
    0.4,
    "a number > 0",
    lambda x: x > 0,
    "the RMS of a normalised update in units of lr, so that AdamW's lr suits it; the literature has 0.2",
)
NESTEROV = Setting(
    "nesterov_momentum",
    0.95,
    "a number in [0, 1)",
    lambda x: 0 <= x < 1,
    "momentum of normalised updates, with a look ahead",
)
MOMENTUM_RISE = Setting(
    "momentum_rise",
    20.0,
    "a number >= 0",
    lambda x: x >= 0,
    "the t-th step's momentum is at most t / (t + momentum_rise); 0 has all of nesterov_momentum at once, as others do",
)
MOMENTUM = Slot("m", signed=True)


class Normalised(Mechanism):
    """Nesterov momentum, if there is a slot for it, whose direction a subclass brings to an RMS of one.

    The average needs no correction for its start: only its direction counts. Its memory grows with its age: gradients
    turn fast when training begins, and an average over many of them lags behind (`docs/results/momentum.md`).
    """

    adaptive = True
    momentum = True
    decoupled = True
    settings: ClassVar[tuple[Setting, ...]] = (UPDATE_RMS, NESTEROV, MOMENTUM_RISE)

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        keep = momentum_at(ages.get("m", 1), hyper)
        numbers = super().scalars(hyper, ages)
        # the same look ahead as in torch.optim.Muon: a step of the average further on
        ahead = {"m.keep": keep, "m.add": 1.0 - keep, "of_m": keep, "of_grad": 1.0 - keep}
        return numbers | {"step": numbers["step"] * UPDATE_RMS.of(hyper)} | ahead

    def observe(self, slot: str, grad: Tensor) -> Tensor:
        return grad

    def direction(self, grad: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        return slots["m"] * scalars["of_m"] + grad * scalars["of_grad"] if "m" in slots else grad

    def mass(self, slot: str, age: int, hyper: Hyper) -> float:
        return 1.0 - remaining(age, hyper)

    def typical_rms(self, evidence: Evidence, hyper: Hyper) -> float | None:
        return float(UPDATE_RMS.of(hyper))


def momentum_at(age: int, hyper: Hyper) -> float:
    """Of the step that makes an average so old.

    >>> hyper = Hyper(lr=1e-3)
    >>> [round(momentum_at(age, hyper), 3) for age in (1, 20, 100, 1000)]
    [0.048, 0.5, 0.833, 0.95]
    """
    return float(min(NESTEROV.of(hyper), age / (age + MOMENTUM_RISE.of(hyper))))


def remaining(age: int, hyper: Hyper) -> float:
    """What is left of an average's start after so many steps: the product of their momenta.

    >>> hyper = Hyper(lr=1e-3)
    >>> math.isclose(remaining(900, hyper), math.prod(momentum_at(step, hyper) for step in range(1, 901)))
    True
    """
    most, rise = NESTEROV.of(hyper), MOMENTUM_RISE.of(hyper)
    rising = min(age, math.floor(rise * most / (1.0 - most)))  # t / (t + rise) is at most `most` up to here
    # t! rise! / (t + rise)!, where rise need not be whole
    risen = math.exp(math.lgamma(rising + 1) + math.lgamma(rise + 1) - math.lgamma(rising + rise + 1))
    return float(risen * most ** (age - rising))

"""What mechanisms have in common whose updates have a length of their own, whatever the size of the gradients is."""

from __future__ import annotations

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
MOMENTUM = Slot("m", signed=True)


class Normalised(Mechanism):
    """Nesterov momentum, if there is a slot for it, whose direction a subclass brings to an RMS of one.

    The average needs no correction for its start: only its direction counts.
    """

    adaptive = True
    momentum = True
    decoupled = True
    settings: ClassVar[tuple[Setting, ...]] = (UPDATE_RMS, NESTEROV)

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        keep = NESTEROV.of(hyper)
        numbers = super().scalars(hyper, ages)
        # the same look ahead as in torch.optim.Muon: a step of the average further on
        ahead = {"m.keep": keep, "m.add": 1.0 - keep, "of_m": keep, "of_grad": 1.0 - keep}
        return numbers | {"step": numbers["step"] * UPDATE_RMS.of(hyper)} | ahead

    def observe(self, slot: str, grad: Tensor) -> Tensor:
        return grad

    def direction(self, grad: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        return slots["m"] * scalars["of_m"] + grad * scalars["of_grad"] if "m" in slots else grad

    def mass(self, slot: str, age: int, hyper: Hyper) -> float:
        return float(1.0 - NESTEROV.of(hyper) ** age)

    def typical_rms(self, evidence: Evidence, hyper: Hyper) -> float | None:
        return float(UPDATE_RMS.of(hyper))

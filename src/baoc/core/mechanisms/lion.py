"""Lion: the sign of a momentum (https://arxiv.org/abs/2302.06675)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from baoc.core.mechanisms.normalised import MOMENTUM, UPDATE_RMS, Normalised
from baoc.core.spec import Hyper, Scalars, Setting

MEMORY = Setting(
    "lion_beta2",
    0.99,
    "a number in (0, 1)",
    lambda x: 0 < x < 1,
    "decay of Lion's momentum; its look ahead is betas[0]",
)


class Lion(Normalised):
    name = "lion"
    slots = (MOMENTUM,)
    settings = (UPDATE_RMS, MEMORY)
    hides_spikes = True

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        keep, ahead = MEMORY.of(hyper), hyper.beta1
        # Lion blends the gradient with the momentum of the step before; what slots hold has it in already.
        of_m = ahead / keep
        numbers = {"m.keep": keep, "m.add": 1.0 - keep, "of_m": of_m, "of_grad": 1.0 - ahead - of_m * (1.0 - keep)}
        return super().scalars(hyper, ages) | numbers

    def direction(self, grad: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        return super().direction(grad, slots, scalars).sign()

    def mass(self, slot: str, age: int, hyper: Hyper) -> float:
        return float(1.0 - MEMORY.of(hyper) ** age)

"""Adam and AdamW, as in ``torch.optim``."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from baoc.core.mechanisms.base import Mechanism
from baoc.core.spec import FP32_TINY, Hyper, Scalars, Slot


class Adam(Mechanism):
    name = "adam"
    slots = (Slot("m", signed=True), Slot("v", signed=False, divides="m"))
    adaptive = True
    momentum = True

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        masses = {slot.name: self.mass(slot.name, ages[slot.name], hyper) for slot in self.slots}
        if min(masses.values()) <= 0:  # as in torch, a schedule may pass through such betas where nothing steps
            raise ValueError(
                f"{self.name} cannot step with betas ({hyper.beta1}, {hyper.beta2}): averages need them in [0, 1). "
                "Look at what the schedule does to them."
            )
        return super().scalars(hyper, ages) | {
            "m.keep": hyper.beta1,
            "m.add": 1.0 - hyper.beta1,
            "v.keep": hyper.beta2,
            "v.add": 1.0 - hyper.beta2,
            "v.mean_floor": FP32_TINY,
            "m.mass": masses["m"],
            "v.mass_sqrt": math.sqrt(masses["v"]),
            "eps": hyper.eps,
        }

    def observe(self, slot: str, grad: Tensor) -> Tensor:
        return grad if slot == "m" else grad * grad

    def direction(self, grad: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        denominator = slots["v"].sqrt() / scalars["v.mass_sqrt"] + scalars["eps"]
        return slots["m"] / scalars["m.mass"] / denominator

    def mass(self, slot: str, age: int, hyper: Hyper) -> float:
        return 1.0 - (hyper.beta1 if slot == "m" else hyper.beta2) ** age

    def infer(self, slot: str, means: Mapping[str, Tensor], ages: Mapping[str, int], hyper: Hyper) -> Tensor | None:
        # A fresh v would make the first update m / |g|, which has no bound. If gradients were all noise, the mean m
        # would have (1 - beta1) / (1 + beta1) of their variance; so this v keeps |m| / sqrt(v) at Adam's usual size.
        if slot != "v" or "m" not in means:
            return None
        square = means["m"].square()
        # What a coarse format rounded to zero has seen gradients all the same: it gets its row's mean.
        of_row = square.reshape(square.shape[0], -1).mean(1).view(-1, *[1] * (square.dim() - 1))
        square = torch.where(square > 0, square, of_row)
        return square * ((1.0 + hyper.beta1) / (1.0 - hyper.beta1))

    def late_age(self, slot: str, rms: float, hyper: Hyper) -> int:
        # The first update is (1 - beta1) / mass; a fresh average has a mass of 1 - beta1, which makes it one.
        left = 1.0 - (1.0 - hyper.beta1) / rms
        if slot != "m" or rms >= 1.0 or not 0.0 < hyper.beta1 < 1.0:
            return 0
        memory = round(1.0 / (1.0 - hyper.beta1))
        return min(memory, max(0, round(math.log(left) / math.log(hyper.beta1)) - 1)) if left > 0 else memory

    def inferred_age(self, slot: str, ages: Mapping[str, int], hyper: Hyper) -> int:
        memory = round(1.0 / (1.0 - hyper.beta1))  # how many gradients m speaks for
        return min(ages.get("m", 0), memory) if slot == "v" else 0

    def expected_direction(self, means: Mapping[str, Tensor], ages: Mapping[str, int], hyper: Hyper) -> Tensor | None:
        if "v" not in means:
            return None
        # Without momentum the first update is gradient / sqrt(v), and a typical gradient has the size sqrt(v).
        numerator = means["m"] if "m" in means else means["v"].sqrt()
        return numerator / (means["v"].sqrt() + hyper.eps)


class AdamW(Adam):
    name = "adamw"
    decoupled = True

"""SGD, Adam, AdamW and Adafactor, with the semantics of ``torch.optim``."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from baoc.core.mechanisms.base import Mechanism
from baoc.core.spec import FP32_TINY, Hyper, Reach, Scalars, Setting, Slot


class SGD(Mechanism):
    """SGD without momentum, as ``torch.optim.SGD``, with coupled (L2) weight decay."""

    name = "sgd"

    def direction(self, grad: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        return grad

    def expected_direction(self, means: Mapping[str, Tensor], ages: Mapping[str, int], hyper: Hyper) -> Tensor | None:
        return means["v"].sqrt() if "v" in means else None


class SGDW(SGD):
    """SGD without momentum, with decoupled weight decay."""

    name = "sgdw"
    decoupled = True


class SGDM(Mechanism):
    """SGD with momentum, as ``torch.optim.SGD``. The momentum is ``betas[0]``, so that groups suit every rule."""

    name = "sgdm"
    slots = (Slot("m", signed=True),)
    momentum = True

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        return super().scalars(hyper, ages) | {"m.keep": hyper.beta1, "m.add": 1.0}

    def observe(self, slot: str, grad: Tensor) -> Tensor:
        return grad

    def direction(self, grad: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        return slots["m"]

    def mass(self, slot: str, age: int, hyper: Hyper) -> float:
        return (1.0 - hyper.beta1**age) / (1.0 - hyper.beta1)

    def expected_direction(self, means: Mapping[str, Tensor], ages: Mapping[str, int], hyper: Hyper) -> Tensor | None:
        if "m" in means:
            return means["m"] * self.mass("m", ages["m"], hyper)
        return means["v"].sqrt() if "v" in means else None  # the first momentum is the gradient


class SGDWM(SGDM):
    """SGD with momentum and decoupled weight decay."""

    name = "sgdwm"
    decoupled = True


class Adam(Mechanism):
    """Adam with coupled (L2) weight decay, as ``torch.optim.Adam``."""

    name = "adam"
    slots = (Slot("m", signed=True), Slot("v", signed=False))
    adaptive = True
    momentum = True

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        masses = {slot.name: self.mass(slot.name, ages[slot.name], hyper) for slot in self.slots}
        if min(masses.values()) <= 0:  # checked here because, as in torch, a schedule may set such betas between steps
            raise ValueError(
                f"betas of {self.name} must be in [0, 1) at every step, got ({hyper.beta1}, {hyper.beta2}). Check what "
                "the schedule does to them."
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
        # With v = 0 the first update would be m / |g|, which has no bound. If gradients were pure noise, the variance
        # of m would be (1 - beta1) / (1 + beta1) of theirs; this v keeps |m| / sqrt(v) at Adam's usual size.
        if slot != "v" or "m" not in means:
            return None
        square = means["m"].square()
        # Elements that a coarse format rounded to zero had gradients too: they get the mean of their row.
        of_row = square.reshape(square.shape[0], -1).mean(1).view(-1, *[1] * (square.dim() - 1))
        square = torch.where(square > 0, square, of_row)
        return square * ((1.0 + hyper.beta1) / (1.0 - hyper.beta1))

    def late_age(self, slot: str, rms: float, hyper: Hyper) -> int:
        # The first update is (1 - beta1) / mass. A fresh average has a mass of 1 - beta1, so it is one.
        left = 1.0 - (1.0 - hyper.beta1) / rms
        if slot != "m" or rms >= 1.0 or not 0.0 < hyper.beta1 < 1.0:
            return 0
        memory = round(1.0 / (1.0 - hyper.beta1))
        return min(memory, max(0, round(math.log(left) / math.log(hyper.beta1)) - 1)) if left > 0 else memory

    def inferred_age(self, slot: str, ages: Mapping[str, int], hyper: Hyper) -> int:
        memory = round(1.0 / (1.0 - hyper.beta1))  # gradients that m averages
        return min(ages.get("m", 0), memory) if slot == "v" else 0

    def expected_direction(self, means: Mapping[str, Tensor], ages: Mapping[str, int], hyper: Hyper) -> Tensor | None:
        if "v" not in means:
            return None
        # Without m, the first update is gradient / sqrt(v), and a typical gradient is sqrt(v).
        numerator = means["m"] if "m" in means else means["v"].sqrt()
        return numerator / (means["v"].sqrt() + hyper.eps)


class AdamW(Adam):
    """Adam with decoupled weight decay, as ``torch.optim.AdamW``."""

    name = "adamw"
    decoupled = True


FP32_EPS = torch.finfo(torch.float32).eps
BETA2_DECAY = Setting(
    "beta2_decay", -0.8, "a number <= 0", lambda x: x <= 0, "v averages with weights age ** beta2_decay"
)
EPS = Setting(
    "adafactor_eps",
    (None, 1e-3),
    "two numbers >= 0, the first of which may be None",
    lambda x: len(x) == 2 and (x[0] is None or x[0] >= 0) and x[1] >= 0,
    "torch's eps: the floors of v's root (None: that of fp32) and of the parameter's RMS",
)
CLIP = Setting("clip_threshold", 1.0, "a number >= 1", lambda x: x >= 1, "torch's d: the largest RMS of an update")


class Adafactor(Mechanism):
    """Adafactor, as ``torch.optim.Adafactor``: relative step sizes, clipped updates, no momentum.

    The ``factored`` codec of slot ``v`` does the factorization.
    """

    name = "adafactor"
    slots = (Slot("v", signed=False, age_is_state=True, torch_dims=True),)
    adaptive = True
    decoupled = True
    reach = Reach.SUMS
    settings = (BETA2_DECAY, EPS, CLIP)
    default_codecs = {"v": "factored"}

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        age = ages["v"]
        add = float(age ** BETA2_DECAY.of(hyper))
        eps1, eps2 = EPS.of(hyper)
        # torch uses the epsilon of the parameter's dtype; here all math is in fp32
        eps1 = FP32_EPS if eps1 is None else eps1
        return super().scalars(hyper, ages) | {
            "step": min(hyper.lr, 1.0 / math.sqrt(age)) * hyper.lr_scale,
            "v.keep": 1.0 - add,
            "v.add": add,
            "v.floor": eps1 * eps1,
            "v.mean_floor": eps1,  # as torch; it makes v too small where gradients are below 1e-4
            "min_param_rms": eps2,
            "clip": CLIP.of(hyper),
        }

    def observe(self, slot: str, grad: Tensor) -> Tensor:
        return grad * grad

    def direction(self, grad: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        return slots["v"].clamp(min=scalars["v.floor"]).rsqrt() * grad

    def step_factor(self, direction_rms: Tensor, param_rms: Tensor, scalars: Scalars) -> Tensor:
        return param_rms.clamp(min=scalars["min_param_rms"]) / (direction_rms / scalars["clip"]).clamp(min=1.0)

    def mass(self, slot: str, age: int, hyper: Hyper) -> float:
        return 1.0  # the first weight is 1, and every later pair sums to 1

    def expected_direction(self, means: Mapping[str, Tensor], ages: Mapping[str, int], hyper: Hyper) -> Tensor | None:
        # A typical gradient is sqrt(v), whatever v is.
        return next((torch.ones_like(mean) for mean in means.values()), None)

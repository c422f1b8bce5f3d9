"""Adafactor with the semantics of ``torch.optim.Adafactor``: relative steps, clipped updates, no momentum.

The factorization itself is not here: it is the ``factored`` codec of the slot ``v``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from baoc.core.mechanisms.base import Mechanism
from baoc.core.spec import Hyper, Reach, Scalars, Setting, Slot

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
        # torch takes the parameter's own epsilon; all math here is in fp32, whatever the parameter is
        eps1 = FP32_EPS if eps1 is None else eps1
        return super().scalars(hyper, ages) | {
            "step": min(hyper.lr, 1.0 / math.sqrt(age)) * hyper.lr_scale,
            "v.keep": 1.0 - add,
            "v.add": add,
            "v.floor": eps1 * eps1,
            "v.mean_floor": eps1,  # as torch: where gradients are below 1e-4, it makes v smaller than it is
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
        # A typical gradient has the size sqrt(v), known or not.
        return next((torch.ones_like(mean) for mean in means.values()), None)

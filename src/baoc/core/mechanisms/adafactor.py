"""Adafactor with the semantics of ``torch.optim.Adafactor``: relative steps, clipped updates, no momentum.

The factorization itself is not here: it is the ``factored`` codec of the slot ``v``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from baoc.core.spec import Hyper, Mechanism, Scalars, Slot


class Adafactor(Mechanism):
    name = "adafactor"
    slots = (Slot("v", signed=False, age_is_state=True),)
    adaptive = True
    decoupled = True
    normalizes = True
    default_codecs = {"v": "factored"}

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        age = ages["v"]
        add = age**hyper.beta2_decay
        eps1, eps2 = hyper.adafactor_eps
        return super().scalars(hyper, ages) | {
            "step": min(hyper.lr, 1.0 / math.sqrt(age)) * hyper.lr_scale,
            "v.keep": 1.0 - add,
            "v.add": add,
            "v.floor": eps1 * eps1,
            "v.mean_floor": eps1,  # as torch: where gradients are below 1e-4, it makes v smaller than it is
            "min_param_rms": eps2,
            "clip": hyper.clip_threshold,
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

"""SGD and SGD with momentum, with coupled (L2) or decoupled weight decay, as in ``torch.optim.SGD``."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from baoc.core.mechanisms.base import Mechanism
from baoc.core.spec import Hyper, Scalars, Slot


class SGD(Mechanism):
    name = "sgd"

    def direction(self, grad: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        return grad

    def expected_direction(self, means: Mapping[str, Tensor], ages: Mapping[str, int], hyper: Hyper) -> Tensor | None:
        return means["v"].sqrt() if "v" in means else None


class SGDW(SGD):
    name = "sgdw"
    decoupled = True


class SGDM(Mechanism):
    """The momentum factor is ``betas[0]``, so that one group of hyper-parameters serves every mechanism."""

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
        return means["v"].sqrt() if "v" in means else None  # the first step's momentum is the gradient itself


class SGDWM(SGDM):
    name = "sgdwm"
    decoupled = True

"""Update rules with updates of a fixed RMS: Lion, and rules that equalize rows or columns of a matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

from torch import Tensor

from baoc.core.mechanisms.base import Evidence, Mechanism
from baoc.core.roles import Role
from baoc.core.spec import Hyper, Reach, Scalars, Setting, Shape, Slot

UPDATE_RMS = Setting(
    "update_rms",
    0.4,
    "a number > 0",
    lambda x: x > 0,
    "RMS of a normalised update in units of lr, so that AdamW's lr suits it; of muon and normuon on noisy gradients",
)
NESTEROV = Setting(
    "nesterov_momentum",
    0.95,
    "a number in [0, 1)",
    lambda x: 0 <= x < 1,
    "Nesterov momentum of normalised updates",
)
MOMENTUM_RISE = Setting(
    "momentum_rise",
    20.0,
    "a number >= 0",
    lambda x: x >= 0,
    "step t has a momentum of at most t / (t + momentum_rise); 0 uses nesterov_momentum from the first step",
)
MOMENTUM = Slot("m", signed=True)


class Normalised(Mechanism):
    """Base of rules that scale a direction to an RMS of one, with Nesterov momentum if there is a slot for it.

    The momentum needs no bias correction, because only its direction counts. It rises with the slot's age: gradients
    change direction quickly when training begins, and a long average lags behind (`docs/results/momentum.md`).
    """

    adaptive = True
    momentum = True
    decoupled = True
    settings: ClassVar[tuple[Setting, ...]] = (UPDATE_RMS, NESTEROV, MOMENTUM_RISE)

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        keep = momentum_at(ages.get("m", 1), hyper)
        numbers = super().scalars(hyper, ages)
        # the same Nesterov step as in torch.optim.Muon
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
    """Return the momentum of one step.

    Args:
        age: age of the slot, the step included.
        hyper: the hyper-parameters of the param group.

    Returns:
        The momentum.

    Example:
        >>> hyper = Hyper(lr=1e-3)
        >>> [round(momentum_at(age, hyper), 3) for age in (1, 20, 100, 1000)]
        [0.048, 0.5, 0.833, 0.95]
    """
    return float(min(NESTEROV.of(hyper), age / (age + MOMENTUM_RISE.of(hyper))))


def remaining(age: int, hyper: Hyper) -> float:
    """Return the weight that the initial value of an average still has: the product of all momenta.

    Args:
        age: age of the slot.
        hyper: the hyper-parameters of the param group.

    Returns:
        The weight.

    Example:
        >>> hyper = Hyper(lr=1e-3)
        >>> math.isclose(remaining(900, hyper), math.prod(momentum_at(step, hyper) for step in range(1, 901)))
        True
    """
    most, rise = NESTEROV.of(hyper), MOMENTUM_RISE.of(hyper)
    rising = min(age, math.floor(rise * most / (1.0 - most)))  # the last age at which t / (t + rise) <= most
    # the product is t! rise! / (t + rise)!, with gamma functions because rise need not be whole
    risen = math.exp(math.lgamma(rising + 1) + math.lgamma(rise + 1) - math.lgamma(rising + rise + 1))
    return float(risen * most ** (age - rising))


MEMORY = Setting(
    "lion_beta2",
    0.99,
    "a number in (0, 1)",
    lambda x: 0 < x < 1,
    "decay of Lion's momentum; betas[0] blends it with the gradient",
)


class Lion(Normalised):
    """The sign of a blend of momentum and gradient (https://arxiv.org/abs/2302.06675)."""

    name = "lion"
    slots = (MOMENTUM,)
    settings = (UPDATE_RMS, MEMORY)
    hides_spikes = True

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        keep, ahead = MEMORY.of(hyper), hyper.beta1
        # Lion blends the gradient with the momentum before this step, but slots include this step's gradient.
        of_m = ahead / keep
        numbers = {"m.keep": keep, "m.add": 1.0 - keep, "of_m": of_m, "of_grad": 1.0 - ahead - of_m * (1.0 - keep)}
        return super().scalars(hyper, ages) | numbers

    def direction(self, grad: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        return super().direction(grad, slots, scalars).sign()

    def mass(self, slot: str, age: int, hyper: Hyper) -> float:
        return float(1.0 - MEMORY.of(hyper) ** age)


class ColNorm(Normalised):
    """Scale every column to an RMS of one, without matrix products.

    Rows and columns are those of the parameter in memory: a row of an embedding is a token.
    """

    name = "colnorm"
    slots = (replace(MOMENTUM, optional=True),)
    reach = Reach.SUMS
    norms: ClassVar[tuple[Literal["row", "col"], ...]] = ("col",)

    def suits(self, shape: Shape, role: Role) -> bool:
        return role is not Role.VECTOR


class RowNorm(ColNorm):
    """Scale every row to an RMS of one, so that a rare token moves as far as a frequent one when it occurs."""

    name = "rownorm"
    norms = ("row",)


class Sinkhorn(ColNorm):
    """Scale rows and columns in turn, so that both come close to an RMS of one (https://arxiv.org/abs/2502.06742)."""

    name = "sinkhorn"
    norms = (*("row", "col"),) * 5

"""What every mechanism says of itself."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from baoc.core.roles import Role
from baoc.core.spec import Hyper, Reach, Scalars, Setting, Shape, Slot


@dataclass(frozen=True)
class Evidence:
    """What is known of a tensor's gradients: the means of some slots, for all of its elements or a sample of them."""

    means: Mapping[str, Tensor]  # by slot, all of one shape
    ages: Mapping[str, int]
    param_rms: float  # of the whole parameter


class Mechanism(ABC):
    """What is remembered about a parameter, and the update, in fp32 math over any rows of it.

    Every slot follows a linear recurrence ``slot <- keep * slot + add * observe(gradient)``; the two coefficients are
    scalars named ``<slot>.keep`` and ``<slot>.add``. A subclass gives :meth:`direction`, and with a slot
    :meth:`observe` and :meth:`mass`. Beyond that, by its :attr:`reach`: ``SUMS`` has :meth:`step_factor` or
    :attr:`norms`, ``MATRIX`` needs :meth:`finish`. :meth:`typical_rms` is the one place that knows how long its updates
    are.
    """

    name: ClassVar[str]
    slots: ClassVar[tuple[Slot, ...]] = ()
    adaptive: ClassVar[bool] = False
    momentum: ClassVar[bool] = False
    decoupled: ClassVar[bool] = False
    reach: ClassVar[Reach] = Reach.ROWS
    hides_spikes: ClassVar[bool] = False
    """A gradient that is no number would not show in the direction, and stay in the state."""
    norms: ClassVar[tuple[Literal["row", "col"], ...]] = ()
    """``SUMS``: lines of every matrix of the direction, one kind after the other, that are brought to an RMS of one."""
    settings: ClassVar[tuple[Setting, ...]] = ()
    """Hyper-parameters of its own, beside lr, betas, eps and weight decay."""
    default_codecs: ClassVar[Mapping[str, str]] = {}
    """Codec names where a spelling leaves a slot out; fp32 for those not named here."""
    fallback: ClassVar[str] = "adamw-32"
    """The configuration of a parameter that it does not suit."""

    def suits(self, shape: Shape, role: Role) -> bool:
        """Whether it is made for such a parameter."""
        return True

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        """All numbers of this step, computed once in double precision. ``ages`` count this step already."""
        return {
            "step": hyper.lr * hyper.lr_scale,
            "shrink": 1.0 - hyper.lr * hyper.weight_decay if self.decoupled else 1.0,
            "coupled_decay": 0.0 if self.decoupled else hyper.weight_decay,
        }

    def observe(self, slot: str, grad: Tensor) -> Tensor:
        """What a slot averages."""
        raise NotImplementedError(f"{self.name} has no slot {slot!r}")

    @abstractmethod
    def direction(self, grad: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        """The update before the step length; the parameter moves by ``-step * direction``."""

    def step_factor(self, direction_rms: Tensor, param_rms: Tensor, scalars: Scalars) -> Tensor:
        """``SUMS``: factor on the step length, from the RMS of the whole direction and of the parameter."""
        raise NotImplementedError(f"{self.name} reaches over sums, but has neither step_factor nor norms")

    def finish(self, stacked: Tensor, scalars: Scalars) -> Tensor:
        """``MATRIX``: what becomes of directions, shape ``(batch, rows, cols)``. Equal shapes come in one batch."""
        raise NotImplementedError(f"{self.name} reaches over matrices, but has no finish")

    def finish_in(self, stacked: Tensor, scratch: Tensor, scalars: Scalars) -> Tensor:
        """``MATRIX``: the same, for those that can do with :meth:`scratch` elements for each matrix; may be a view."""
        return self.finish(stacked, scalars)

    def workspace(self, rows: int, cols: int) -> int:
        """``MATRIX``: elements that :meth:`finish` needs for one matrix, itself included."""
        return 2 * rows * cols

    def scratch(self, rows: int, cols: int) -> int:
        """``MATRIX``: those of them that :meth:`finish_in` takes from what it is given."""
        return 0

    def operations(self, rows: int, cols: int) -> int:
        """``MATRIX``: of the products of matrices in :meth:`finish`, for one matrix, with default settings."""
        return 0

    def adapt(self, finished: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        """``MATRIX``, with slots of the finished direction, which have taken it in: what they make of it."""
        return finished

    def mass(self, slot: str, age: int, hyper: Hyper) -> float:
        """Sum of the recurrence's weights after ``age`` steps: ``slot / mass`` is a plain weighted mean.

        The mean is what mechanisms have in common, so it is what migrates between them.
        """
        raise NotImplementedError(f"{self.name} has no slot {slot!r}")

    def infer(self, slot: str, means: Mapping[str, Tensor], ages: Mapping[str, int], hyper: Hyper) -> Tensor | None:
        """A safe mean for a slot that the previous mechanism did not have, or ``None`` to start it at zero."""
        return None

    def inferred_age(self, slot: str, ages: Mapping[str, int], hyper: Hyper) -> int:
        """The age that goes with :meth:`infer`: how many steps of evidence the inferred value stands for."""
        return 0

    def late_age(self, slot: str, rms: float, hyper: Hyper) -> int:
        """The age of an empty slot that starts in the middle of training, after updates of this RMS without state.

        Where the average of one gradient makes a longer update than that of many, a few zeros before it help.
        """
        return 0

    def expected_direction(self, means: Mapping[str, Tensor], ages: Mapping[str, int], hyper: Hyper) -> Tensor | None:
        """What :meth:`direction` gives after a typical next gradient, from means; ``None`` if they cannot tell."""
        return None

    def typical_rms(self, evidence: Evidence, hyper: Hyper) -> float | None:
        """RMS of its next update in units of lr, given what is known of the gradients; ``None`` if that cannot tell.

        It matches learning rates when a block changes its mechanism, and across the mechanisms of a plan.
        """
        hyper = dataclasses.replace(hyper, lr=max(hyper.lr, 1e-30), lr_scale=1.0)
        means, ages = dict(evidence.means), dict(evidence.ages)
        for slot in self.slots:
            ages.setdefault(slot.name, self.inferred_age(slot.name, evidence.ages, hyper))
            inferred = None if slot.name in means else self.infer(slot.name, evidence.means, evidence.ages, hyper)
            if inferred is not None:
                means[slot.name] = inferred
        direction = self.expected_direction(means, ages, hyper)
        if direction is None:
            return None
        rms = direction.square().mean().sqrt()
        scalars = self.scalars(hyper, {slot.name: ages[slot.name] + 1 for slot in self.slots})
        if self.reach is Reach.SUMS and not self.norms:
            rms = rms * self.step_factor(rms, torch.tensor(evidence.param_rms), scalars)
        return rms.item() * scalars["step"] / hyper.lr


def pooled_rms(parts: Iterable[tuple[int, float]]) -> float:
    """The RMS over several parts, given as (elements, RMS).

    >>> pooled_rms([(1, 3.0), (1, 0.0), (0, 7.0)])
    2.1213203435596424
    """
    parts = [(numel, rms) for numel, rms in parts if numel]
    return math.sqrt(sum(numel * rms**2 for numel, rms in parts) / max(1, sum(numel for numel, _ in parts)))

"""The interface of update rules."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from baoc.core.roles import Role
from baoc.core.spec import Hyper, Reach, Scalars, Setting, Shape, Slot


@dataclass(frozen=True)
class Evidence:
    """What is known about a parameter's gradients.

    Args:
        means: mean of each known slot, for all elements or a sample of them; all have one shape.
        ages: age of each known slot.
        param_rms: RMS of the whole parameter.
        mean_squares: mean square of the gradients that each slot stands for, over the whole parameter: of a signed
            slot the mean of its squares, of an unsigned one its mean. Default: those of ``means``.
    """

    means: Mapping[str, Tensor]
    ages: Mapping[str, int]
    param_rms: float
    mean_squares: Mapping[str, float] = field(default_factory=dict)


class Mechanism(ABC):
    """An update rule: which state is kept per parameter, and the update in fp32 math over any rows of it.

    Every slot follows a linear recurrence ``slot <- keep * slot + add * observe(gradient)``. The two coefficients are
    scalars named ``<slot>.keep`` and ``<slot>.add``. A subclass implements :meth:`direction`, and if it has slots
    :meth:`observe` and :meth:`mass`. With reach ``SUMS`` it also implements :meth:`step_factor` or sets :attr:`norms`;
    with reach ``MATRIX`` it implements :meth:`finish`. :meth:`typical_rms` alone defines how large its updates are.

    Example:
        >>> from baoc import parse
        >>> parse("muon-8").mechanism.name, [slot.name for slot in parse("muon-8").mechanism.slots]
        ('muon', ['m', 's'])
    """

    name: ClassVar[str]
    slots: ClassVar[tuple[Slot, ...]] = ()
    adaptive: ClassVar[bool] = False
    momentum: ClassVar[bool] = False
    decoupled: ClassVar[bool] = False
    reach: ClassVar[Reach] = Reach.ROWS
    hides_spikes: ClassVar[bool] = False
    """A non-finite gradient would stay in the state without showing in the direction."""
    norms: ClassVar[tuple[Literal["row", "col"], ...]] = ()
    """``SUMS``: which lines of every matrix of the direction are scaled to an RMS of one, in this order."""
    settings: ClassVar[tuple[Setting, ...]] = ()
    """Hyper-parameters beside lr, betas, eps and weight decay."""
    default_codecs: ClassVar[Mapping[str, str]] = {}
    """Codec of slots that a spelling leaves out; fp32 for slots that are not listed."""
    fallback: ClassVar[str] = "adamw-32"
    """The configuration of parameters that the rule does not suit."""

    def suits(self, shape: Shape, role: Role) -> bool:
        """Return whether the rule can update a parameter.

        Args:
            shape: global shape of the parameter.
            role: role of the parameter.
        """
        return True

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        """Return all numbers of one step, computed once in double precision.

        Args:
            hyper: the hyper-parameters of the param group.
            ages: age of each slot, this step included.

        Returns:
            Number by name.
        """
        return {
            "step": hyper.lr * hyper.lr_scale,
            "shrink": 1.0 - hyper.lr * hyper.weight_decay if self.decoupled else 1.0,
            "coupled_decay": 0.0 if self.decoupled else hyper.weight_decay,
        }

    def observe(self, slot: str, grad: Tensor) -> Tensor:
        """Return what a slot averages, for example the square of the gradient.

        Args:
            slot: the name of the slot.
            grad: rows of the gradient.
        """
        raise NotImplementedError(f"{self.name} has no slot {slot!r}")

    @abstractmethod
    def direction(self, grad: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        """Return the update before the step size. The parameter moves by ``-step * direction``.

        Args:
            grad: rows of the gradient.
            slots: the same rows of each slot, this step included.
            scalars: the numbers of this step.
        """

    def step_factor(self, direction_rms: Tensor, param_rms: Tensor, scalars: Scalars) -> Tensor:
        """Return a factor on the step size, for reach ``SUMS``.

        Args:
            direction_rms: RMS of the whole direction.
            param_rms: RMS of the whole parameter.
            scalars: the numbers of this step.
        """
        raise NotImplementedError(f"{self.name} has reach SUMS, but neither step_factor nor norms")

    def finish(self, stacked: Tensor, scalars: Scalars) -> Tensor:
        """Turn directions into updates, for reach ``MATRIX``. Matrices of one shape come in one batch.

        Args:
            stacked: directions, shape ``(batch, rows, cols)``. They may be overwritten.
            scalars: the numbers of this step.

        Returns:
            Updates of the same shape.
        """
        raise NotImplementedError(f"{self.name} has reach MATRIX, but no finish")

    def finish_in(self, stacked: Tensor, scratch: Tensor, scalars: Scalars) -> Tensor:
        """Do the same as :meth:`finish` within given memory.

        Args:
            stacked: directions, shape ``(batch, rows, cols)``. They may be overwritten.
            scratch: :meth:`scratch` elements for each matrix.
            scalars: the numbers of this step.

        Returns:
            The updates, possibly as a view of ``stacked`` or ``scratch``.
        """
        return self.finish(stacked, scalars)

    def workspace(self, rows: int, cols: int) -> int:
        """Return how many elements :meth:`finish` needs for one matrix, the matrix included.

        Args:
            rows: rows of the matrix.
            cols: its columns.
        """
        return 2 * rows * cols

    def scratch(self, rows: int, cols: int) -> int:
        """Return how many elements of ``scratch`` :meth:`finish_in` uses for one matrix.

        Args:
            rows: rows of the matrix.
            cols: its columns.
        """
        return 0

    def operations(self, rows: int, cols: int, device: str = "cpu") -> int:
        """Return the floating-point operations of the matrix products of one matrix, with default settings.

        Args:
            rows: rows of the matrix.
            cols: its columns.
            device: type of the device: CPUs save half of some products.
        """
        return 0

    def adapt(self, finished: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        """Scale finished updates by slots that average them (:attr:`Slot.of_direction`).

        Args:
            finished: what :meth:`finish` returned.
            slots: those slots, this step included.
            scalars: the numbers of this step.

        Returns:
            The scaled updates, of the same shape.
        """
        return finished

    def length(self, direction_square: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        """Return a factor on the updates of matrices, for reach ``MATRIX`` (:attr:`Slot.sets_length`).

        Args:
            direction_square: mean square of the direction of each matrix, before :meth:`finish`.
            slots: those slots, this step included: one number per matrix.
            scalars: the numbers of this step.
        """
        raise NotImplementedError(f"{self.name} has a slot that sets lengths, but no length")

    def mass(self, slot: str, age: int, hyper: Hyper) -> float:
        """Return the sum of the recurrence's weights: ``slot / mass`` is a weighted mean.

        Update rules have these means in common, so state migrates between rules as means.

        Args:
            slot: the name of the slot.
            age: how many steps it has averaged.
            hyper: the hyper-parameters of the param group.
        """
        raise NotImplementedError(f"{self.name} has no slot {slot!r}")

    def infer(self, slot: str, means: Mapping[str, Tensor], ages: Mapping[str, int], hyper: Hyper) -> Tensor | None:
        """Return a safe mean for a slot that the previous update rule did not have.

        Args:
            slot: the name of the slot.
            means: mean of each slot that the previous rule had.
            ages: their ages.
            hyper: the hyper-parameters of the param group.

        Returns:
            The mean, or ``None`` to start at zero.
        """
        return None

    def inferred_age(self, slot: str, ages: Mapping[str, int], hyper: Hyper) -> int:
        """Return the age of a mean from :meth:`infer`: how many gradients it stands for.

        Args:
            slot: the slot that was inferred.
            ages: the ages of the old configuration's slots.
            hyper: hyperparameters of the group.
        """
        return 0

    def late_age(self, slot: str, rms: float, hyper: Hyper) -> int:
        """Return the age at which an empty slot starts in the middle of training.

        An average of one gradient can make a larger update than an average of many. Counting a few zeros before it
        prevents that.

        Args:
            slot: the name of the slot.
            rms: RMS of the updates before, in units of lr.
            hyper: the hyper-parameters of the param group.
        """
        return 0

    def expected_direction(self, means: Mapping[str, Tensor], ages: Mapping[str, int], hyper: Hyper) -> Tensor | None:
        """Predict what :meth:`direction` returns after a typical next gradient.

        Args:
            means: mean of each known slot.
            ages: their ages.
            hyper: the hyper-parameters of the param group.

        Returns:
            The direction, or ``None`` if the means do not determine it.
        """
        return None

    def typical_rms(self, evidence: Evidence, hyper: Hyper) -> float | None:
        """Predict the RMS of the next update in units of lr.

        It matches learning rates across the update rules of a plan, and when a block changes its rule.

        Args:
            evidence: what is known about the gradients.
            hyper: the hyper-parameters of the param group.

        Returns:
            The RMS, or ``None`` if the evidence does not determine it.
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
            param_rms = torch.tensor(evidence.param_rms, dtype=torch.float32, device=rms.device)
            rms = rms * self.step_factor(rms, param_rms, scalars)
        return rms.item() * scalars["step"] / hyper.lr


def pooled_rms(parts: Iterable[tuple[int, float]]) -> float:
    """Return the RMS over several parts.

    Args:
        parts: pairs of number of elements and RMS.

    Returns:
        The RMS of all elements.

    Example:
        >>> pooled_rms([(1, 3.0), (1, 0.0), (0, 7.0)])
        2.1213203435596424
    """
    parts = [(numel, rms) for numel, rms in parts if numel]
    return math.sqrt(sum(numel * rms**2 for numel, rms in parts) / max(1, sum(numel for numel, _ in parts)))

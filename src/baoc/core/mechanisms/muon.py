"""Muon and its variants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from baoc.core.mechanisms.base import Evidence
from baoc.core.mechanisms.newton_schulz import YOU_JIACHENG, operations, orthogonalised, workspace
from baoc.core.mechanisms.normalised import MOMENTUM, MOMENTUM_RISE, NESTEROV, UPDATE_RMS, Normalised, momentum_at
from baoc.core.roles import HIDDEN, Role
from baoc.core.spec import FP32_TINY, Hyper, Reach, Scalars, Setting, Shape, Slot


def _is_finite(x: object) -> bool:
    return isinstance(x, (int, float)) and math.isfinite(x)


NEWTON_SCHULZ = Setting(
    "newton_schulz",
    YOU_JIACHENG,
    "one to twenty triples of finite numbers, one triple for each iteration",
    lambda x: 0 < len(x) <= 20 and all(len(triple) == 3 and all(map(_is_finite, triple)) for triple in x),
    "coefficients (a, b, c) of x <- a x + b (x x') x + c (x x')^2 x; torch.optim.Muon has "
    "((3.4445, -4.775, 2.0315),) * 5",
)
ROW_MEMORY = Setting(
    "normuon_beta2", 0.95, "a number in [0, 1)", lambda x: 0 <= x < 1, "decay of NorMuon's mean square per row"
)


class Spectral(Normalised):
    """The gradient with all singular values made one: Muon without momentum, so without state."""

    name = "spectral"
    momentum = False
    reach = Reach.MATRIX
    settings: ClassVar[tuple[Setting, ...]] = (*Normalised.settings, NEWTON_SCHULZ)

    def suits(self, shape: Shape, role: Role) -> bool:
        return role in HIDDEN

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        triples = enumerate(NEWTON_SCHULZ.of(hyper))
        iterations = {f"iteration.{i}.{name}": float(x) for i, triple in triples for name, x in zip("abc", triple)}
        return super().scalars(hyper, ages) | iterations

    def finish(self, stacked: Tensor, scalars: Scalars) -> Tensor:
        batch, *shape = stacked.shape
        return self.finish_in(stacked, stacked.new_empty(batch * self.scratch(*shape)), scalars)

    def finish_in(self, stacked: Tensor, scratch: Tensor, scalars: Scalars) -> Tensor:
        # An orthogonal matrix has min(rows, cols) singular values of one. This factor makes its RMS one.
        return orthogonalised(stacked, _coefficients(scalars), scratch).mul_(math.sqrt(max(stacked.shape[-2:])))

    def workspace(self, rows: int, cols: int) -> int:
        return workspace(rows, cols)

    def operations(self, rows: int, cols: int, device: str = "cpu") -> int:
        return operations(rows, cols, len(YOU_JIACHENG), device)

    def scratch(self, rows: int, cols: int) -> int:
        return workspace(rows, cols) - rows * cols


MAX_UPDATE_RMS = Setting(
    "max_update_rms",
    0.45,
    "a number > 0",
    lambda x: x > 0,
    "the largest RMS of an update of muon and normuon in units of lr; with update_rms=1e9, the RMS of every update",
)


class Muon(Spectral):
    """Momentum with all singular values made one, as ``torch.optim.Muon``, and with a length that follows the signal.

    AdamW's updates are longer where gradients agree with each other (early in training, in fine-tuning), and become
    shorter where gradients vanish. The same ratio sets the length here: the RMS of the momentum to the root of ``s``,
    the running mean square of the gradient, one number per matrix. Updates have the RMS ``update_rms`` where gradients
    are noise and the momentum is full, and at most ``max_update_rms``.
    """

    name = "muon"
    momentum = True
    slots: ClassVar[tuple[Slot, ...]] = (MOMENTUM, Slot("s", signed=False, sets_length=True, codecs=("mean",)))
    default_codecs = {"s": "mean"}
    settings = (*Spectral.settings, MAX_UPDATE_RMS)

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        numbers = super().scalars(hyper, ages)
        keep, add = numbers["of_m"], numbers["of_grad"]
        mass = keep * self.mass("m", ages["m"], hyper) + add  # of the weights in the look ahead
        s_mass = max(self.mass("s", ages["s"], hyper), FP32_TINY)  # a schedule may set beta2 to 1
        return numbers | {
            "step": hyper.lr * hyper.lr_scale,
            "s.keep": hyper.beta2,
            "s.add": 1.0 - hyper.beta2,
            "length": UPDATE_RMS.of(hyper) / _rms_of_noise(keep, hyper) * math.sqrt(s_mass) / mass,
            "max_length": float(MAX_UPDATE_RMS.of(hyper)),
        }

    def observe(self, slot: str, grad: Tensor) -> Tensor:
        return grad if slot == "m" else grad * grad

    def length(self, direction_square: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        ratio = (direction_square / slots["s"].clamp(min=FP32_TINY)).sqrt()
        return (ratio * scalars["length"]).clamp(max=scalars["max_length"])

    def mass(self, slot: str, age: int, hyper: Hyper) -> float:
        return float(1.0 - hyper.beta2**age) if slot == "s" else super().mass(slot, age, hyper)

    def infer(self, slot: str, means: Mapping[str, Tensor], ages: Mapping[str, int], hyper: Hyper) -> Tensor | None:
        if slot != "s" or "v" in means:
            return means.get("v") if slot == "s" else None
        # as if the momentum had averaged noise: then updates have their usual length
        noise = _rms_of_noise(momentum_at(max(1, ages.get("m", 0)), hyper), hyper)
        return means["m"].square() / noise**2 if "m" in means else None

    def inferred_age(self, slot: str, ages: Mapping[str, int], hyper: Hyper) -> int:
        memory = round(1.0 / (1.0 - NESTEROV.of(hyper)))  # gradients that m averages
        return ages.get("v", min(ages.get("m", 0), memory)) if slot == "s" else 0

    def late_age(self, slot: str, rms: float, hyper: Hyper) -> int:
        # An empty momentum's first direction is 1 - momentum^2 of the gradient. Relative to noise that falls with the
        # momentum, which rises with age.
        if slot != "m":
            return 0
        wanted = rms / UPDATE_RMS.of(hyper)
        oldest = 1 + math.ceil(MOMENTUM_RISE.of(hyper) * NESTEROV.of(hyper) / (1.0 - NESTEROV.of(hyper)))
        momenta = ((age, momentum_at(age + 1, hyper)) for age in range(oldest))
        return next((age for age, keep in momenta if (1.0 - keep**2) / _rms_of_noise(keep, hyper) <= wanted), oldest)

    def typical_rms(self, evidence: Evidence, hyper: Hyper) -> float | None:
        usual, means = float(UPDATE_RMS.of(hyper)), evidence.means
        known = {name: (x.square() if name == "m" else x).mean().item() for name, x in means.items() if name in "msv"}
        known |= evidence.mean_squares
        s = known.get("s", known.get("v"))
        if s is None:  # it will be inferred from m so that updates have their usual length, or starts late
            return usual
        # Without m, the first direction is the gradient, and the RMS of a typical gradient is the root of s.
        ratio = math.sqrt(known.get("m", s) / max(s, FP32_TINY))
        noise = _rms_of_noise(momentum_at(1 + evidence.ages.get("m", 0), hyper), hyper)
        return min(usual / noise * ratio, float(MAX_UPDATE_RMS.of(hyper)))


def _rms_of_noise(keep: float, hyper: Hyper) -> float:
    """Return the RMS of Nesterov's look ahead that counts as noise, for gradients with an RMS of one.

    A momentum that has just begun to rise averages little noise away. By itself that would make early updates as short
    as later ones, and AdamW's early updates are longer. The geometric mean of the noise now and with full momentum is
    in between, and ends lower than either on language and image models together (`docs/results/length.md`).

    Args:
        keep: the momentum of this step.
        hyper: the hyper-parameters of the param group.

    Returns:
        The RMS.

    Example:
        >>> [round(_rms_of_noise(keep, Hyper(lr=1e-3)), 2) for keep in (0.0, 0.5, 0.95)]
        [0.42, 0.36, 0.17]
    """

    def square(momentum: float) -> float:
        # momentum^2 of the average before the step, whose variance is (1 - momentum) / (1 + momentum), and
        # 1 - momentum^2 of the gradient
        return momentum**4 * (1.0 - momentum) / (1.0 + momentum) + (1.0 - momentum**2) ** 2

    return math.sqrt(math.sqrt(square(keep) * square(NESTEROV.of(hyper))))


class NorMuon(Muon):
    """Muon with rows divided by the root of their running mean square (https://arxiv.org/abs/2510.05491)."""

    name = "normuon"
    slots = (*Muon.slots, Slot("o", signed=False, of_direction=True, codecs=("row-mean",)))
    default_codecs = {**Muon.default_codecs, "o": "row-mean"}
    settings = (*Muon.settings, ROW_MEMORY)

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        keep = ROW_MEMORY.of(hyper)
        numbers = {"o.keep": keep, "o.add": 1.0 - keep, "o.mean_floor": 0.0, "o.mass": self.mass("o", ages["o"], hyper)}
        return super().scalars(hyper, ages) | numbers

    def adapt(self, finished: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        return finished / (slots["o"] / scalars["o.mass"]).sqrt().clamp(min=FP32_TINY)

    def mass(self, slot: str, age: int, hyper: Hyper) -> float:
        return float(1.0 - ROW_MEMORY.of(hyper) ** age) if slot == "o" else super().mass(slot, age, hyper)


def _coefficients(scalars: Scalars) -> list[tuple[float, float, float]]:
    count = sum(name.startswith("iteration.") for name in scalars) // 3
    return [tuple(float(scalars[f"iteration.{i}.{name}"]) for name in "abc") for i in range(count)]  # type: ignore[misc]

"""Muon and its kin: a matrix moves by its momentum, or its gradient, with all singular values made one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from baoc.core.mechanisms.newton_schulz import POLAR_EXPRESS, operations, orthogonalised, workspace
from baoc.core.mechanisms.normalised import MOMENTUM, Normalised
from baoc.core.roles import HIDDEN, Role
from baoc.core.spec import FP32_TINY, Hyper, Reach, Scalars, Setting, Shape, Slot

NEWTON_SCHULZ = Setting(
    "newton_schulz",
    POLAR_EXPRESS,
    "one to twenty triples of numbers, one triple for each iteration",
    lambda x: 0 < len(x) <= 20 and all(len(triple) == 3 for triple in x),
    "coefficients (a, b, c) of x <- a x + b (x x') x + c (x x')^2 x; those of torch.optim.Muon are "
    "((3.4445, -4.775, 2.0315),) * 5",
)
ROW_MEMORY = Setting(
    "normuon_beta2", 0.95, "a number in [0, 1)", lambda x: 0 <= x < 1, "decay of NorMuon's mean square of each row"
)


class Spectral(Normalised):
    """Without momentum, so without state."""

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
        # An orthogonal matrix has min(rows, cols) singular values of one: this is what makes its RMS one.
        return orthogonalised(stacked, _coefficients(scalars), scratch).mul_(math.sqrt(max(stacked.shape[-2:])))

    def workspace(self, rows: int, cols: int) -> int:
        return workspace(rows, cols)

    def operations(self, rows: int, cols: int) -> int:
        return operations(rows, cols, len(POLAR_EXPRESS))

    def scratch(self, rows: int, cols: int) -> int:
        return workspace(rows, cols) - rows * cols


class Muon(Spectral):
    """As ``torch.optim.Muon``, which takes other coefficients by default."""

    name = "muon"
    momentum = True
    slots: ClassVar[tuple[Slot, ...]] = (MOMENTUM,)


class NorMuon(Muon):
    """Muon whose rows are brought to one size by a running mean square of each (https://arxiv.org/abs/2510.05491)."""

    name = "normuon"
    slots = (MOMENTUM, Slot("o", signed=False, of_direction=True, codecs=("row-mean",)))
    default_codecs = {"o": "row-mean"}
    settings = (*Muon.settings, ROW_MEMORY)

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        keep = ROW_MEMORY.of(hyper)
        numbers = {"o.keep": keep, "o.add": 1.0 - keep, "o.mean_floor": 0.0, "o.mass": self.mass("o", ages["o"], hyper)}
        return super().scalars(hyper, ages) | numbers

    def observe(self, slot: str, grad: Tensor) -> Tensor:
        return grad * grad if slot == "o" else grad

    def adapt(self, finished: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        return finished / (slots["o"] / scalars["o.mass"]).sqrt().clamp(min=FP32_TINY)

    def mass(self, slot: str, age: int, hyper: Hyper) -> float:
        return float(1.0 - ROW_MEMORY.of(hyper) ** age) if slot == "o" else super().mass(slot, age, hyper)


def _coefficients(scalars: Scalars) -> list[tuple[float, float, float]]:
    count = sum(name.startswith("iteration.") for name in scalars) // 3
    return [tuple(float(scalars[f"iteration.{i}.{name}"]) for name in "abc") for i in range(count)]  # type: ignore[misc]

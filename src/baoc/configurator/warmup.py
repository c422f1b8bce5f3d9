"""What a warm-up follows, and when it has seen enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from baoc.core.spec import Hyper
from baoc.planning import partition
from baoc.planning.choices import unit_vectors
from baoc.planning.risk import Anchors
from baoc.profiling.coordinates import FLOOR
from baoc.profiling.profile import Profile
from baoc.profiling.sampling import Sampler

_FLOORS = (FLOOR, FLOOR // 4, FLOOR // 16)


def fitting_sampler(
    params: Mapping[str, Tensor], room: int, ratio: float, seed: int, betas: tuple[float, float]
) -> Sampler | None:
    """A sampler of at most ``room`` bytes: of a small model fewer coordinates are followed, or none."""
    for floor in _FLOORS:
        sampler = Sampler(params, ratio=ratio, floor=floor, seed=seed, betas=betas)
        if sampler.nbytes <= room:
            return sampler
    return None


class Diagnostics:
    """The normalised diagnostics of a model's units."""

    def __init__(self, profile: Profile, hyper: Hyper, anchors: Anchors) -> None:
        self._units: Sequence[partition.Unit] = partition.structural_units(profile.shapes)
        self.table: NDArray[np.float64] = unit_vectors(self._units, profile, hyper, anchors)  # (units, 5)

    def change_since(self, last: NDArray[np.float64] | None) -> float:
        """By how much they differ from earlier ones, on average over all parameters."""
        if last is None or last.shape != self.table.shape:
            return float("inf")
        difference = np.abs(self.table - last)
        weights = np.array([[float(unit.numel)] for unit in self._units]) * np.isfinite(difference)
        return float(np.nansum(weights * difference) / max(1.0, weights.sum()))

"""The runs of one method on one workload: first its learning rates on one seed, then all seeds with the best."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.runs.cell import Cell, Row
from experiments.runs.tuning import TUNING_SEED


@dataclass(frozen=True)
class Series:
    """All cells of a method on a workload.

    >>> series = Series("gpt-small/embedded", "muon", 300, (0.5, 1.0, 2.0), seeds=(0, 1, 2))
    >>> [(cell.seed, cell.lr_factor) for cell in series.tuning]
    [(0, 0.5), (0, 1.0), (0, 2.0)]
    >>> [[(cell.seed, cell.lr_factor) for cell in cells] for cells in series.finals(2.0)]
    [[(0, 2.0), (1, 2.0), (2, 2.0)]]
    """

    workload: str
    method: str
    steps: int
    grid: tuple[float, ...]
    seeds: tuple[int, ...]
    variants: tuple[str, ...] = ()
    tuning_seeds: tuple[int, ...] = (TUNING_SEED,)

    @property
    def tuning(self) -> list[Cell]:
        return [self._cell(seed, factor) for seed in self.tuning_seeds for factor in self.grid]

    def finals(self, lr_factor: float) -> list[list[Cell]]:
        """What the tables show, the default first, then each variant. One is in :attr:`tuning` too."""
        return [[self._cell(seed, lr_factor, variant) for seed in self.seeds] for variant in ("", *self.variants)]

    @property
    def cells(self) -> list[Cell]:
        """All runs that may be needed: which of them are depends on the learning rate that is best."""
        finals = [cell for factor in self.grid for cells in self.finals(factor) for cell in cells]
        return list(dict.fromkeys([*self.tuning, *finals]))

    def about(self, cell: Cell) -> Row:
        """Which part of the protocol a run belongs to. The best of the first part is used in the second."""
        is_tuning = len(self.grid) > 1 and cell in self.tuning
        return {"phase": "tune" if is_tuning else "final", "lr_grid": list(self.grid)}

    def _cell(self, seed: int, lr_factor: float, variant: str = "") -> Cell:
        return Cell(self.workload, self.method, seed, lr_factor, self.steps, variant)

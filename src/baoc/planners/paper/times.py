"""Update times of blocks (Sec. 3.1): from a cost model, given by the user, or measured by :mod:`baoc.plan`.

A measurement is of structural units, because these are known before blocks are: the time of a block is the sum over
its units, however Algorithm 2 or a later plan merges them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baoc.core.configuration import BUDGET_REFERENCE, Configuration, parse
from baoc.core.files import read_json, replaced
from baoc.core.plan import PlanError
from baoc.core.spec import Shape
from baoc.planners import cost

GPU, MEASURE = "gpu", "measure"
FORMAT = "baoc.update-times"
VERSION = 1

Units = Sequence[Mapping[str, Shape]]
"""Shapes by name of each unit of a block, as one rank holds them."""


@dataclass(frozen=True)
class UpdateTimes:
    """Measured seconds of one update.

    Args:
        device: where they were measured.
        seconds: by unit, which goes by the shapes of its tensors, and by configuration.

    Raises:
        ValueError: if a time is missing or not a positive number.

    Example:
        >>> times = UpdateTimes("cpu", {"8x8": {"adamw[m=bf16,v=bf16]": 2e-6, "sgd": 1e-6}})
        >>> times.ratios([[{"weight": (8, 8)}]], [parse("sgd")])
        array([[0.5]])
    """

    device: str
    seconds: Mapping[str, Mapping[str, float]]

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not isinstance(self.seconds, Mapping):
            raise ValueError("times must have a device and seconds by unit and configuration.")
        for unit, row in self.seconds.items():
            if not isinstance(row, Mapping):
                raise ValueError(f"times of unit {unit!r} must be seconds by configuration, got {row!r}.")
            for name, found in row.items():
                if not _is_positive(found):
                    raise ValueError(f"times of unit {unit!r} with {name!r} must be a positive number, got {found!r}.")

    def ratios(self, blocks: Sequence[Units], configurations: Sequence[Configuration]) -> NDArray[np.float64]:
        """Return r_(i,c): the time of each block relative to its time with AdamW16.

        Args:
            blocks: the units of each block.
            configurations: the configurations to compare.

        Raises:
            PlanError: a unit or a configuration was not measured.
        """
        chosen = (*configurations, BUDGET_REFERENCE)
        rows = [[sum(self._of(unit, c) for unit in units if signature(unit)) for c in chosen] for units in blocks]
        times = np.array(rows, dtype=np.float64).reshape(len(blocks), len(chosen))
        unit = times[:, -1:]
        return np.divide(times[:, :-1], unit, out=np.ones_like(times[:, :-1]), where=unit > 0)

    def _of(self, unit: Mapping[str, Shape], configuration: Configuration) -> float:
        row = self.seconds.get(signature(unit), {})
        if str(configuration) not in row:
            raise PlanError(
                f"times= has no time of {configuration.alias} for the unit {', '.join([*unit][:4])} of shapes "
                f"{signature(unit)}. `baoc measure` measures all units of a model."
            )
        return row[str(configuration)]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file for ``PaperPlanner(times=path)``.

        Args:
            path: the file.
        """
        content = {"format": FORMAT, "version": VERSION, "device": self.device, "seconds": self.seconds}
        with replaced(path) as file:
            file.write(json.dumps(content, indent=2).encode() + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> UpdateTimes:
        """Read a file that :meth:`save` or ``baoc measure`` wrote.

        Args:
            path: the file.

        Returns:
            The times.

        Raises:
            ValueError: the file is something else, or damaged.
        """
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        content = read_json(text, "a file of update times", FORMAT, VERSION, ValueError)
        return cls(content.get("device"), content.get("seconds"))  # type: ignore[arg-type]  # checked there


Times = str | os.PathLike[str] | UpdateTimes | Mapping[str, float]
"""``"gpu"``, ``"measure"``, a file, measured times, or ratios by configuration."""


def signature(unit: Mapping[str, Shape]) -> str:
    """Return what measured times of a unit go by; empty if it has no elements.

    >>> signature({"weight": (768, 3072), "bias": (3072,), "scale": ()})
    '768x3072 3072 1'
    """
    return " ".join("x".join(map(str, shape)) or "1" for shape in unit.values() if math.prod(shape))


def parsed_times(times: object, candidates: Sequence[Configuration]) -> Times:
    """Return the setting ``times`` of a planner: a word, ratios by configuration, or the content of a file.

    Raises:
        ValueError: it is something else, or lacks a candidate.
    """
    if isinstance(times, UpdateTimes) or times in (GPU, MEASURE):
        return times
    if isinstance(times, (str, os.PathLike)):
        path = os.fspath(times)
        if not Path(path).is_file():
            raise ValueError(f"times must be 'gpu', 'measure', a file or a mapping; there is no file {path!r}.")
        try:
            return UpdateTimes.load(path)
        except ValueError as error:
            raise ValueError(f"times={path!r}: {error}") from None
    if not isinstance(times, Mapping):
        raise ValueError(f"times must be 'gpu', 'measure', a file or a mapping, got {times!r}.")
    if set(times) == {"device", "seconds"}:
        return UpdateTimes(times["device"], times["seconds"])
    ratios = {}
    for name, ratio in times.items():
        if not _is_positive(ratio):
            raise ValueError(f"times[{name!r}] must be a positive ratio to AdamW16, got {ratio!r}.")
        try:
            ratios[str(parse(name))] = float(ratio)
        except ValueError as error:
            raise ValueError(f"times names {name!r}: {error}") from None
    missing = [c.alias for c in candidates if str(c) not in ratios]
    if missing:
        raise ValueError(f"times has no ratio of {', '.join(missing)}. Give one of every candidate.")
    return ratios


def ratios(times: Times, blocks: Sequence[Units], configurations: Sequence[Configuration]) -> NDArray[np.float64]:
    """Return r_(i,c) of Sec. 3.1, (blocks, configurations)."""
    if isinstance(times, UpdateTimes):
        return times.ratios(blocks, configurations)
    if isinstance(times, Mapping):
        return np.tile([times[str(c)] for c in configurations], (len(blocks), 1))
    merged = [{name: shape for unit in units for name, shape in unit.items()} for units in blocks]
    return cost.update_ratios(merged, configurations)


def plain(times: Times) -> Any:
    """Return times as JSON values."""
    return {"device": times.device, "seconds": times.seconds} if isinstance(times, UpdateTimes) else times


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf

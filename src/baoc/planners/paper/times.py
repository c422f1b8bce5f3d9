"""Update times of blocks (Sec. 3.1): from a cost model, given by the user, from a file, or measured on a device.

A measurement is of structural units, because these are known before blocks are: the time of a block is the sum over
its units, however Algorithm 2 or a later plan merges them.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from baoc.core.configuration import BUDGET_REFERENCE, Configuration, parse
from baoc.core.files import read_json, replaced
from baoc.core.plan import Plan, PlanError
from baoc.core.spec import Shape
from baoc.optim.optimizer import BlockOptimizer
from baoc.planners import cost

GPU, MEASURE = "gpu", "measure"
FORMAT = "baoc.update-times"
VERSION = 1
_STEPS = 3  # timed ones; the first step, which allocates and compiles, is not

Units = Sequence[Mapping[str, Shape]]
"""Shapes by name of each unit of a block, as one rank holds them."""


@dataclass(frozen=True)
class UpdateTimes:
    """Measured seconds of one update.

    Args:
        device: where they were measured.
        seconds: by unit, which goes by the shapes of its tensors, and by configuration.

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
            for name, found in row.items() if isinstance(row, Mapping) else [("", None)]:
                if not _is_positive(found):
                    raise ValueError(f"times of unit {unit!r} with {name!r} must be a positive number, got {found!r}.")

    def ratios(self, blocks: Sequence[Units], configurations: Sequence[Configuration]) -> NDArray[np.float64]:
        """Return r_(i,c): the time of each block relative to its time with AdamW16.

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
        """Write a file for ``PaperPlanner(times=path)``."""
        content = {"format": FORMAT, "version": VERSION, "device": self.device, "seconds": self.seconds}
        with replaced(path) as file:
            file.write(json.dumps(content, indent=2).encode() + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> UpdateTimes:
        """Read a file that :meth:`save` or ``baoc measure`` wrote.

        Raises:
            ValueError: the file is something else, or damaged.
        """
        content = read_json(Path(path).read_text(encoding="utf-8"), "file of update times", FORMAT, VERSION, ValueError)
        return cls(content.get("device", ""), content.get("seconds", {}))


Times = str | UpdateTimes | Mapping[str, float]
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
    if isinstance(times, str):
        if not Path(times).is_file():
            raise ValueError(f"times must be 'gpu', 'measure', a file or a mapping; there is no file {times!r}.")
        try:
            return UpdateTimes.load(times)
        except ValueError as error:
            raise ValueError(f"times={times!r}: {error}") from None
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


def measure(
    units: Iterable[Mapping[str, Shape]],
    configurations: Sequence[Configuration],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> UpdateTimes:
    """Time one update of every unit with every configuration and with AdamW16.

    Tensors of the units' shapes are made for it, one unit at a time, so this needs room for the largest unit's
    weights, gradients and state. Units with equal shapes are measured once.

    Args:
        units: shapes by name.
        configurations: to measure.
        device: where to measure.
        dtype: of parameters and gradients.

    Returns:
        The medians of three updates, in seconds.

    Example:
        >>> times = measure([{"weight": (64, 64)}], [parse("sgd")])
        >>> list(times.seconds), list(times.seconds["64x64"])
        (['64x64'], ['adamw[m=bf16,v=bf16]', 'sgd'])
    """
    device = torch.device(device)
    distinct = {signature(unit): unit for unit in units if signature(unit)}
    chosen = dict.fromkeys((BUDGET_REFERENCE, *configurations))
    seconds = {
        key: {str(c): _one_update(unit, c, device, dtype) for c in chosen} for key, unit in sorted(distinct.items())
    }
    return UpdateTimes(str(device), seconds)


def _one_update(
    unit: Mapping[str, Shape], configuration: Configuration, device: torch.device, dtype: torch.dtype
) -> float:
    params = {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for name, shape in unit.items()}
    for param in params.values():
        param.grad = torch.linspace(-1, 1, param.numel(), dtype=dtype, device=device).view(param.shape)
    optimizer = BlockOptimizer(list(params.items()), lr=1e-3, plan=Plan.uniform(configuration, dict(unit)))
    optimizer.step()
    taken = []
    for _ in range(_STEPS):
        _wait(device)
        start = time.perf_counter()
        optimizer.step()
        _wait(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf

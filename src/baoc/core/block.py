"""A block: parameters that share one configuration, and its entry in a plan file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baoc.core.configuration import Configuration, parse
from baoc.core.spec import Shape
from baoc.core.splits import Split

LR_SCALES = (1e-30, 1e30)
"""The smallest and the largest learning-rate multiplier. Beyond them, fp32 cannot hold the product with lr."""

MOST_NUMEL = 1 << 62


class PlanError(ValueError):
    """A plan that does not fit its model or its budget, or a file that is not a plan."""


@dataclass(frozen=True)
class Block:
    """Parameters that share one configuration.

    Args:
        name: the block's name, unique in its plan.
        configuration: what updates the parameters.
        parameters: global shape by parameter name.
        lr_scale: learning-rate multiplier, from 1e-30 to 1e30. ``None`` is 1 in a new run, and matches the size of the
            last update where state is inherited.
        risk: what the configuration is expected to cost, by term. Plans made by hand have none.
        why: why the block has this configuration.
        host: whether the state is in host memory, wherever the parameters are.
        splits: parameters that are several matrices, by name. Those of other parameters are left out.

    Raises:
        PlanError: if ``lr_scale`` is out of range, or a split does not fit its parameter.

    Example:
        >>> from baoc import Plan
        >>> block = Plan.uniform("adamw-8", {"weight": (64, 64)}).blocks[0]
        >>> str(block.configuration), block.numel, block.state_bytes
        ('adamw[m=int8,v=int8]', 4096, 8320)
    """

    name: str
    configuration: Configuration
    parameters: Mapping[str, Shape]
    lr_scale: float | None = None
    risk: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    host: bool = False
    splits: Mapping[str, Split] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.splits:
            own = {name: split for name, split in self.splits.items() if name in self.parameters}
            object.__setattr__(self, "splits", own)
        for name, split in self.splits.items():
            if problem := split.problem(self.parameters[name]):
                raise PlanError(f"parameter {name!r} cannot be split as block {self.name!r} says: {problem}.")
        least, most = LR_SCALES
        if self.lr_scale is not None and not least <= self.lr_scale <= most:
            raise PlanError(
                f"lr_scale of block {self.name!r} must be a number from {least:g} to {most:g} or null, "
                f"got {self.lr_scale!r}."
            )

    @property
    def numel(self) -> int:
        """Number of elements of all parameters."""
        return sum(math.prod(shape) for shape in self.parameters.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state, exactly."""
        return self.state_bytes_as(self.configuration)

    def state_bytes_as(self, configuration: Configuration) -> int:
        """Return the bytes of state that the block would hold under another configuration.

        Args:
            configuration: the other configuration.

        Returns:
            Bytes of state, exactly.
        """
        return sum(configuration.state_bytes(shape) for shape in self.parameters.values())

    def cost_text(self, is_loss: bool, wide: bool) -> str:
        """Return what the configuration is expected to cost, as a cell of a table.

        Args:
            is_loss: the terms are percent of loss. Otherwise they are risks.
            wide: list the terms of a risk.

        Returns:
            The sum, and the terms if they are listed.
        """
        total = sum(self.risk.values())
        if is_loss:
            return f"{total:+.2f}%"
        terms = [f"{term} {value:.2g}" for term, value in self.risk.items() if value >= 0.0005]
        return f"{total:.3f} = {' + '.join(terms)}" if wide and terms else f"{total:.3f}"

    def to_entry(self) -> dict[str, Any]:
        """Return the block as a JSON object of a plan file."""
        return {
            "name": self.name,
            "configuration": str(self.configuration),
            "lr_scale": self.lr_scale,
            "risk": dict(self.risk),
            "why": self.why,
            "host": self.host,
            "parameters": {name: list(shape) for name, shape in self.parameters.items()},
            "splits": {name: split.plain() for name, split in self.splits.items()},
        }

    @classmethod
    def from_entry(cls, entry: Any, index: int) -> Block:
        """Read a block from a JSON object of a plan file.

        Args:
            entry: the JSON object.
            index: its place among the blocks, for errors.

        Returns:
            The block.

        Raises:
            PlanError: if the entry is not a block.
        """
        try:
            lr_scale = entry.get("lr_scale")
            splits = {name: Split.from_plain(split) for name, split in entry.get("splits", {}).items()}
            stray = next((name for name in splits if name not in entry["parameters"]), None)
            if stray is not None:
                raise ValueError(f"it splits {stray!r}, but has no parameter of that name.")
            return cls(
                name=str(entry["name"]),
                configuration=parse(entry["configuration"]),
                parameters={name: _shape(shape) for name, shape in entry["parameters"].items()},
                lr_scale=None if lr_scale is None else _number(lr_scale),
                risk={term: _number(value) for term, value in entry.get("risk", {}).items()},
                why=str(entry.get("why", "")),
                host=_bool(entry.get("host", False)),
                splits=splits,
            )
        except PlanError:
            raise
        except KeyError as error:
            raise PlanError(f"block {index} of the plan has no {error.args[0]!r}.") from None
        except (TypeError, AttributeError, ValueError) as error:
            raise PlanError(f"block {index} of the plan cannot be read: {error}") from None


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"'host' must be true or false, got {value!r}.")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"'lr_scale' and 'risk' must be numbers, got {value!r}.")
    return float(value)


def _shape(shape: Any) -> Shape:
    is_shape = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not is_shape or math.prod(shape) > MOST_NUMEL:
        raise ValueError(f"a shape must be a list of whole numbers, at most 2**62 elements in all, got {shape!r}.")
    return tuple(shape)

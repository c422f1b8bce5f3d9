"""What is different between two plans, parameter by parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baoc.core.plan import Block, Plan
from baoc.core.spec import Shape
from baoc.core.text import human_bytes, table


@dataclass(frozen=True)
class Side:
    """What one plan says about a parameter."""

    block: str
    configuration: str
    lr_scale: float | None
    host: bool
    shape: Shape
    state_bytes: int

    @classmethod
    def of(cls, block: Block, parameter: str) -> Side:
        shape = block.parameters[parameter]
        state_bytes = block.configuration.state_bytes(shape)
        return cls(block.name, str(block.configuration), block.lr_scale, block.host, shape, state_bytes)


@dataclass(frozen=True)
class Change:
    """A parameter that two plans treat differently; a side is None where its plan does not have the parameter."""

    parameter: str
    before: Side | None
    after: Side | None

    @property
    def what(self) -> tuple[str, ...]:
        """Which of "configuration", "lr_scale", "block", "host" and "shape" differ; "added" or "removed" if one side
        has it.
        """
        if self.before is None or self.after is None:
            return ("added",) if self.before is None else ("removed",)
        names = ("configuration", "lr_scale", "block", "host", "shape")
        return tuple(name for name in names if getattr(self.before, name) != getattr(self.after, name))


def diff(before: Plan, after: Plan) -> list[Change]:
    """The parameters that the two plans treat differently, in the order of the first plan.

    >>> shapes = {"weight": (64, 64), "bias": (64,)}
    >>> before, after = Plan.uniform("adamw-16", shapes), Plan.uniform("sgd", shapes)
    >>> [(change.parameter, change.what) for change in diff(before, after)]
    [('weight', ('configuration',)), ('bias', ('configuration',))]
    """
    sides = [{n: Side.of(block, n) for block in plan.blocks for n in block.parameters} for plan in (before, after)]
    names = dict.fromkeys((*sides[0], *sides[1]))
    changes = (Change(name, sides[0].get(name), sides[1].get(name)) for name in names)
    return [change for change in changes if change.what]


def diff_table(changes: Sequence[Change]) -> str:
    """One row per parameter."""
    header = ["parameter", "configuration", "lr scale", "block", "state before", "after"]
    if any("shape" in change.what for change in changes):
        header.insert(1, "shape")
    if any(side.host for change in changes for side in (change.before, change.after) if side):
        header.insert(header.index("block") + 1, "on")
    rows = [[_cell(change, column) for column in header] for change in changes]
    return table(header, rows, right=["state before", "after"])


def _cell(change: Change, column: str) -> str:
    before, after = change.before, change.after
    if column == "parameter":
        return change.parameter
    if column == "state before":
        return human_bytes(before.state_bytes) if before else "-"
    if column == "after":
        return human_bytes(after.state_bytes) if after else "-"
    left, right = (_text(side, column) if side else "(none)" for side in (before, after))
    return left if left == right else f"{left} -> {right}"


def _text(side: Side, column: str) -> str:
    if column == "lr scale":
        return "-" if side.lr_scale is None else f"{side.lr_scale:.4g}"
    if column == "on":
        return "host" if side.host else "device"
    return str(getattr(side, column))

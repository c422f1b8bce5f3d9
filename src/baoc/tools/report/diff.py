"""Compare two plans parameter by parameter."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill

from baoc.core.configuration import parse
from baoc.core.plan import Block, Plan
from baoc.core.spec import Shape
from baoc.core.splits import describe
from baoc.core.text import WIDTH, human_bytes, printable, shortened, table

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)|(?<=\.)\d+$")
_NO_BREAK = "\u00a0"
_NAME_WIDTH = 32  # two names of blocks fit on a line


@dataclass(frozen=True)
class Side:
    """How one plan configures a parameter."""

    block: str
    configuration: str
    lr_scale: float | None
    host: bool
    shape: Shape
    state_bytes: int
    matrices: str
    """That it is split into, if it is."""

    @classmethod
    def of(cls, block: Block, parameter: str) -> Side:
        """Read the side of a parameter from its block."""
        shape = block.parameters[parameter]
        state_bytes = block.configuration.state_bytes(shape)
        split = block.splits.get(parameter)
        matrices = "" if split is None else describe(split, shape)
        return cls(block.name, str(block.configuration), block.lr_scale, block.host, shape, state_bytes, matrices)


@dataclass(frozen=True)
class Change:
    """A parameter that two plans configure differently. A side is None if its plan lacks the parameter."""

    parameter: str
    before: Side | None
    after: Side | None

    @property
    def what(self) -> tuple[str, ...]:
        """The fields of a side that differ, such as "configuration" and "lr_scale"; or "added" or "removed"."""
        if self.before is None or self.after is None:
            return ("added",) if self.before is None else ("removed",)
        names = ("configuration", "lr_scale", "block", "host", "shape", "matrices")
        return tuple(name for name in names if getattr(self.before, name) != getattr(self.after, name))


def diff(before: Plan, after: Plan) -> list[Change]:
    """Compare two plans.

    Args:
        before: A plan.
        after: Another plan.

    Returns:
        The parameters that they configure differently, in the order of the first plan.

    Example:
        >>> shapes = {"weight": (64, 64), "bias": (64,)}
        >>> before, after = Plan.uniform("adamw-16", shapes), Plan.uniform("sgd", shapes)
        >>> [(change.parameter, change.what) for change in diff(before, after)]
        [('weight', ('configuration',)), ('bias', ('configuration',))]
    """
    sides = [{n: Side.of(block, n) for block in plan.blocks for n in block.parameters} for plan in (before, after)]
    names = dict.fromkeys((*sides[0], *sides[1]))
    changes = (Change(name, sides[0].get(name), sides[1].get(name)) for name in names)
    return [change for change in changes if change.what]


def diff_text(changes: Sequence[Change]) -> str:
    """Format changes for a terminal, grouped by what changed.

    Args:
        changes: What :func:`diff` returned.

    Returns:
        Text in 80 columns.

    Example:
        >>> shapes = {"h.0.weight": (64, 64), "h.1.weight": (64, 64)}
        >>> before, after = Plan.uniform("adamw-16", shapes), Plan.uniform("adamw-8", shapes)
        >>> print(diff_text(diff(before, after)))
        adamw-16 -> adamw-8, 2 tensors: 32.0 KiB -> 16.2 KiB
          h.{0,1}.weight
    """
    found: dict[tuple[str, ...], list[Change]] = {}
    for change in changes:
        found.setdefault(_summary(change), []).append(change)
    lines = []
    for (became, *others), same in found.items():
        sides = zip(*((change.before, change.after) for change in same))
        sizes = [human_bytes(sum(side.state_bytes for side in sides_of if side)) for sides_of in sides]
        count = f"{len(same)} tensor{'s' if len(same) != 1 else ''}"
        whole = " -> ".join(size.replace(" ", _NO_BREAK) for size in sizes)  # a number stays with its unit
        lines.append(fill(f"{became}, {count}: {whole}", WIDTH, subsequent_indent="    ").replace(_NO_BREAK, " "))
        lines += [f"  ({', '.join(others)})"] if others else []
        lines += [
            f"  {shortened(printable(name), WIDTH - 2)}" for name in _together([change.parameter for change in same])
        ]
    return "\n".join(lines)


def _summary(change: Change) -> tuple[str, ...]:
    """Describe the change of configuration, then the other changes."""
    before, after = change.before, change.after
    if before is None or after is None:
        side = before or after
        assert side is not None
        return (f"{'added' if before is None else 'removed'}: {parse(side.configuration).alias}",)
    parts = [" -> ".join(dict.fromkeys(parse(side.configuration).alias for side in (before, after)))]
    for column in ("lr scale", "shape", "matrices", *(["block"] if change.what == ("block",) else [])):
        was, became = (shortened(printable(_text(side, column)), _NAME_WIDTH) for side in (before, after))
        parts += [f"{column} {was or 'one'} -> {became or 'one'}"] if was != became else []
    return tuple(parts)


def _together(names: Sequence[str]) -> list[str]:
    """Merge names that differ only in numbers.

    >>> _together(["h.0.up", "h.1.up", "h.0.norm", "h.2.up"])
    ['h.{0..2}.up', 'h.0.norm']
    """
    alike: dict[str, list[tuple[str, ...]]] = {}
    for name in names:
        alike.setdefault(_NUMBER.sub("#", name), []).append(tuple(_NUMBER.findall(name)))
    found = []
    for pattern, numbers in alike.items():
        parts = [_run(list(dict.fromkeys(column))) for column in zip(*numbers)]
        is_whole = math.prod(count for _, count in parts) == len(numbers)  # otherwise some combinations do not exist
        if is_whole:
            found.append(_filled(pattern, [text for text, _ in parts]))
        else:
            found += [_filled(pattern, each) for each in numbers]
    return found


def _run(numbers: Sequence[str]) -> tuple[str, int]:
    """Format the numbers at one position of a name; also return their count."""
    values = [int(number) for number in numbers]
    if len(values) == 1:
        return numbers[0], 1
    is_run = len(values) > 2 and values == list(range(values[0], values[0] + len(values)))
    return f"{{{numbers[0]}..{numbers[-1]}}}" if is_run else f"{{{','.join(numbers)}}}", len(values)


def _filled(pattern: str, numbers: Sequence[str]) -> str:
    parts = iter(numbers)
    return "".join(next(parts) if character == "#" else character for character in pattern)


def diff_table(changes: Sequence[Change]) -> str:
    """Format changes as a table at full width.

    Args:
        changes: What :func:`diff` returned.

    Returns:
        A table with one row per parameter.
    """
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

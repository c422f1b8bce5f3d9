"""Units, and what a group of neighbouring units is called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WHOLE_MODEL = "all"


@dataclass(frozen=True)
class Unit:
    """Parameters that structure alone would keep together: a candidate for a block.

    >>> Unit("transformer.wte", ("transformer.wte.weight",), 38597376)
    Unit(name='transformer.wte', parameters=('transformer.wte.weight',), numel=38597376, layer='')
    """

    name: str
    parameters: tuple[str, ...]
    numel: int
    layer: str = ""
    """Path of the repeated layer that it is a part of. Empty: it stands outside of all layers."""


def blocks(units: Sequence[Unit], groups: Iterable[Sequence[int]]) -> list[tuple[str, tuple[str, ...]]]:
    """Name and parameters of each group of neighbouring units.

    A group that is all there is under a path has the path's name, another one that of its two ends. Names are unique.

    >>> units = [Unit(f"h.{i}.{part}", (f"h.{i}.{part}.w",), 1) for i in range(3) for part in ("norm", "attn", "mlp")]
    >>> [name for name, _ in blocks(units, [(0,), (1, 2), (3, 4, 5), (6, 7, 8)])]
    ['h.0.norm', 'h.0.attn..mlp', 'h.1', 'h.2']
    >>> [name for name, _ in blocks(units, [(0, 1, 2, 3, 4, 5), (6, 7), (8,)])]
    ['h.0..1', 'h.2.norm..attn', 'h.2.mlp']
    """
    groups = [tuple(group) for group in groups]
    if sorted(index for group in groups for index in group) != list(range(len(units))) or () in groups:
        raise ValueError(f"the groups must hold each of the {len(units)} units exactly once, and none may be empty.")
    under = _units_under(units)
    names = unique(_name([units[index] for index in group], under) for group in groups)
    parameters = (tuple(name for index in group for name in units[index].parameters) for group in groups)
    return list(zip(names, parameters))


def unique(names: Iterable[str]) -> list[str]:
    """Give a name that was there before a number.

    >>> unique(["a", "b", "a"])
    ['a', 'b', 'a#2']
    """
    taken: set[str] = set()
    result = []
    for name in names:
        chosen, number = name, 1
        while chosen in taken:
            number += 1
            chosen = f"{name}#{number}"
        taken.add(chosen)
        result.append(chosen)
    return result


def _name(group: Sequence[Unit], under: Counter[str]) -> str:
    if len(group) == 1:
        return group[0].name
    held = _units_under(group)

    def widest(name: str) -> str:
        """The highest path above a unit of which nothing lies outside of the group."""
        return next((path for path in _paths(name) if held[path] == under[path]), name)

    first, last = widest(group[0].name), widest(group[-1].name)
    if first == last:
        return first or WHOLE_MODEL
    shared = _shared_path(first, last)
    return f"{first}..{last[len(shared) :]}"


def _units_under(units: Sequence[Unit]) -> Counter[str]:
    return Counter(path for unit in units for path in _paths(unit.name))


def _paths(name: str) -> list[str]:
    """From the root down: 'h.0.attn' -> '', 'h', 'h.0', 'h.0.attn'."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]


def _shared_path(first: str, last: str) -> str:
    """The path both lie under, with its dot: 'h.0.attn', 'h.0.mlp' -> 'h.0.'."""
    shared = [path for path, other in zip(_paths(first)[:-1], _paths(last)[:-1]) if path == other]
    return f"{shared[-1]}." if shared[-1] else ""

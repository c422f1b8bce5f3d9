"""Phi in percent of loss: what configurations cost or gained in ablations, by role and regime.

A table of measured differences stands behind it: one role of a model was moved from AdamW32 to a configuration, and the
final test loss was compared with AdamW32's, at AdamW32's learning rate. A block is charged its share of its role. So a
uniform plan is predicted to be what it was measured to be, up to how roles act on each other.

The table that ships is made from `docs/results/ablation`; ``baoc calibrate`` makes one of your own workload.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from baoc.core.configuration import Configuration, ConfigurationError, parse
from baoc.core.files import replaced
from baoc.core.roles import HIDDEN, Role
from baoc.planning.risk.paper import BlockMetrics

if TYPE_CHECKING:
    from baoc.planning.risk.paper import Settings

FORMAT = "baoc.risk-table"
VERSION = 1
REGIMES = ("scratch", "finetune")
TERM = "loss"
UNKNOWN = 50.0
"""Percent: what nobody measured is a last resort."""

VECTORS = "adamw-32"
"""What vectors always have: they cost next to nothing, and were not ablated."""
_STANDS_FOR = {Role.STACK: Role.MATRIX, Role.CONVOLUTION: Role.MATRIX, Role.HEAD: Role.EMBEDDING}
"""Where a role was not ablated."""


class TableError(ValueError):
    """A file that is not a table of risks, or one that does not know what it is asked."""


@dataclass(frozen=True)
class Effect:
    """What a configuration did to the final loss, in percent of AdamW32's; negative is better."""

    loss: float
    error: float = 0.0  # standard error over workloads and seeds
    runs: int = 0  # behind it
    workloads: int = 0

    @property
    def spread(self) -> float:
        """Standard deviation from workload to workload, where there were several.

        >>> Effect(-7.0, error=1.5, runs=8, workloads=4).spread
        3.0
        """
        return self.error * math.sqrt(self.workloads) if self.workloads > 1 else 0.0


@dataclass(frozen=True)
class Table:
    """Effects by regime, role and configuration.

    >>> table = Table.load()
    >>> table.effect("scratch", Role.VECTOR, parse("adamw-32"))
    Effect(loss=0.0, error=0.0, runs=0, workloads=0)
    """

    effects: Mapping[str, Mapping[Role, Mapping[Configuration, Effect]]]
    provenance: str = ""

    @property
    def candidates(self) -> tuple[Configuration, ...]:
        """All that it knows, of any role, in the file's order."""
        found = {c: None for roles in self.effects.values() for known in roles.values() for c in known}
        return tuple(found) if parse(VECTORS) in found else (parse(VECTORS), *found)

    def effect(self, regime: str, role: Role, configuration: Configuration) -> Effect | None:
        """``None`` where nothing is known, or where the configuration is not made for the role."""
        if role is Role.VECTOR:
            return Effect(0.0) if configuration == parse(VECTORS) else None
        known = self._of(regime, role)
        if not known:
            return Effect(0.0) if configuration == parse(VECTORS) else None
        return known.get(configuration)

    def _of(self, regime: str, role: Role | None) -> Mapping[Configuration, Effect]:
        roles = self.effects.get(regime, {})
        while role is not None and role not in roles:
            role = _STANDS_FOR.get(role)
        return roles[role] if role is not None else {}

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> Table:
        """A table's file; the one that ships, if none is named."""
        return _shipped() if path is None else _loaded(os.fspath(path))

    @classmethod
    def from_json(cls, text: str, source: str = "this") -> Table:
        try:
            content: Any = json.loads(text)
        except ValueError as error:
            raise TableError(f"{source} is not a table of risks: it is not JSON ({error}).") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise TableError(f'{source} is not a table of risks: it has no "format": "{FORMAT}".')
        if content.get("version") != VERSION:
            raise TableError(
                f"{source} is a table of version {content.get('version')!r}, and this baoc reads version {VERSION}."
            )
        try:
            effects = {
                regime: {
                    Role(role): {parse(spelling): Effect(**effect) for spelling, effect in known.items()}
                    for role, known in roles.items()
                }
                for regime, roles in content["effects"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError, ConfigurationError) as error:
            raise TableError(f"{source} is a damaged table of risks: {error}") from None
        if unknown := [regime for regime in effects if regime not in REGIMES]:
            raise TableError(f"{source} has a regime {unknown[0]!r}. There are {', '.join(REGIMES)}.")
        for known in (known for roles in effects.values() for known in roles.values()):
            if not all(math.isfinite(effect.loss) for effect in known.values()):
                raise TableError(f"{source} has an effect that is not a number.")
        return cls(effects, str(content.get("provenance", "")))

    def to_json(self) -> str:
        effects = {
            regime: {
                role.value: {
                    str(configuration): {
                        "loss": round(effect.loss, 4),
                        "error": round(effect.error, 4),
                        "runs": effect.runs,
                        "workloads": effect.workloads,
                    }
                    for configuration, effect in known.items()
                }
                for role, known in roles.items()
            }
            for regime, roles in self.effects.items()
        }
        content = {"format": FORMAT, "version": VERSION, "provenance": self.provenance, "effects": effects}
        return json.dumps(content, indent=2) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a table's file. One that is there already stays until this one is complete."""
        text = self.to_json()
        with replaced(path) as file:
            file.write(text.encode())


@functools.cache
def _shipped() -> Table:
    file = resources.files(__package__) / "table.json"
    return Table.from_json(file.read_text(encoding="utf-8"), "the table that ships")


@functools.cache
def _loaded(path: str) -> Table:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"cannot read the table of risks {path!r}: {error}.") from None
    return Table.from_json(text, repr(path))


def measured(metrics: BlockMetrics, configuration: Configuration, settings: Settings) -> dict[str, float]:
    """The block's share of what its role's move to the configuration did."""
    table = Table.load(settings.table)
    total = 0.0
    for role, share in metrics.roles.items():
        effect = table.effect(settings.regime, role, configuration)
        total += share * (UNKNOWN if effect is None else effect.loss)
    return {TERM: total}


def elements(roles: Iterable[tuple[Role, int]]) -> dict[Role, int]:
    """How many there are of each role; hidden weights of all kinds, which ablations moved at once, count together.

    >>> elements([(Role.MATRIX, 10), (Role.CONVOLUTION, 30), (Role.HEAD, 5)])[Role.MATRIX]
    40
    """
    totals = dict.fromkeys(Role, 0)
    for role, numel in roles:
        for alike in HIDDEN if role in HIDDEN else (role,):
            totals[alike] += numel
    return totals


def role_shares(roles: Iterable[tuple[Role, int]], of: Mapping[Role, int]) -> dict[Role, float]:
    """How much of each role some parameters are, by elements.

    >>> role_shares([(Role.MATRIX, 10)], of=elements([(Role.MATRIX, 10), (Role.CONVOLUTION, 30)]))
    {<Role.MATRIX: 'matrix'>: 0.25}
    """
    shares: dict[Role, float] = {}
    for role, numel in roles:
        shares[role] = shares.get(role, 0.0) + (numel / of[role] if of[role] else 0.0)
    return shares

"""The effect table: the measured change of the final loss, by regime, role and configuration.

In each measurement one role of a model moves from AdamW32 to a configuration, and the final test loss is compared with
AdamW32's at AdamW32's learning rate. A parameter is charged its share of its role's elements, so the prediction for a
uniform plan is what was measured, up to interactions between roles.

The table that ships is made from `docs/results/ablation`; ``baoc calibrate`` makes one for your own workload.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from baoc.core.configuration import Configuration, ConfigurationError, parse
from baoc.core.files import read_json, replaced
from baoc.core.roles import HIDDEN, Role
from baoc.planners.model_facts import REGIMES

FORMAT = "baoc.effect-table"
VERSION = 1
TERM = "loss"
UNKNOWN = 50.0
"""Percent of the loss that configurations without a measurement are charged, so that they are a last resort."""

VECTORS = "adamw-32"
"""The configuration of all vectors: their state is small, and other ones were not measured."""
_STANDS_FOR = {Role.STACK: Role.MATRIX, Role.CONVOLUTION: Role.MATRIX, Role.HEAD: Role.EMBEDDING}
"""Roles whose effects are used for roles that were not measured."""


class TableError(ValueError):
    """A file that is not an effect table."""


@dataclass(frozen=True)
class Effect:
    """The effect of a configuration on the final loss, in percent of AdamW32's loss; negative is better."""

    loss: float
    error: float = 0.0  # standard error over workloads and seeds
    runs: int = 0  # that were measured
    workloads: int = 0

    @property
    def spread(self) -> float:
        """Standard deviation from workload to workload, where there were several.

        >>> Effect(-7.0, error=1.5, runs=8, workloads=4).spread
        3.0
        """
        return self.error * math.sqrt(self.workloads) if self.workloads > 1 else 0.0


@dataclass(frozen=True)
class EffectTable:
    """Effects by regime, role and configuration.

    >>> table = EffectTable.load()
    >>> table.effect("scratch", Role.VECTOR, parse("adamw-32"))
    Effect(loss=0.0, error=0.0, runs=0, workloads=0)
    """

    effects: Mapping[str, Mapping[Role, Mapping[Configuration, Effect]]]
    provenance: str = ""

    @property
    def candidates(self) -> tuple[Configuration, ...]:
        """All configurations of the table, in the order of the file."""
        found = {c: None for roles in self.effects.values() for known in roles.values() for c in known}
        return tuple(found) if parse(VECTORS) in found else (parse(VECTORS), *found)

    def effect(self, regime: str, role: Role, configuration: Configuration) -> Effect | None:
        """Return an effect; ``None`` if the configuration was not measured for the role, or does not suit it."""
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
    def load(cls, path: str | os.PathLike[str] | None = None) -> EffectTable:
        """Read a table from a file, or the table that ships if ``path`` is ``None``.

        Raises:
            TableError: the file is no effect table, or cannot be read.
        """
        if path is None:
            return _shipped()
        path = os.fspath(path)
        try:
            found = os.stat(path)
        except OSError as error:
            raise TableError(f"cannot read the effect table {path!r}: {error.strerror}.") from None
        return _loaded(path, found.st_mtime_ns, found.st_size)

    @classmethod
    def from_json(cls, text: str, source: str = "this") -> EffectTable:
        content = read_json(text, "an effect table", FORMAT, VERSION, TableError, source)
        try:
            effects = {
                regime: {
                    Role(role): {parse(spelling): _read_effect(effect) for spelling, effect in known.items()}
                    for role, known in roles.items()
                }
                for regime, roles in content["effects"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError, ConfigurationError) as error:
            raise TableError(f"{source} is a damaged effect table: {error}") from None
        if unknown := [regime for regime in effects if regime not in REGIMES]:
            raise TableError(f"{source} has a regime {unknown[0]!r}. There are {', '.join(REGIMES)}.")
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
        """Write a file. An existing file is replaced only when the new one is complete."""
        text = self.to_json()
        with replaced(path) as file:
            file.write(text.encode())


def _read_effect(fields: Mapping[str, Any]) -> Effect:
    effect = Effect(**fields)
    for name in ("loss", "error"):
        value = getattr(effect, name)
        if type(value) not in (int, float) or not math.isfinite(value) or (name == "error" and value < 0):
            raise ValueError(f"{name} cannot be {value!r}")
    for name in ("runs", "workloads"):
        value = getattr(effect, name)
        if type(value) is not int or value < 0:
            raise ValueError(f"{name} cannot be {value!r}")
    return effect


@functools.cache
def _shipped() -> EffectTable:
    file = resources.files(__package__) / "effects.json"
    return EffectTable.from_json(file.read_text(encoding="utf-8"), "the table that ships")


@functools.lru_cache(maxsize=8)
def _loaded(path: str, mtime_ns: int, size: int) -> EffectTable:
    """Read a table, again if its file has changed."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"cannot read the effect table {path!r}: {error}.") from None
    return EffectTable.from_json(text, repr(path))


def elements(roles: Iterable[tuple[Role, int]]) -> dict[Role, int]:
    """Return the number of elements by role. Hidden weights of all kinds were measured and count together.

    >>> elements([(Role.MATRIX, 10), (Role.CONVOLUTION, 30), (Role.HEAD, 5)])[Role.MATRIX]
    40
    """
    totals = dict.fromkeys(Role, 0)
    for role, numel in roles:
        for alike in HIDDEN if role in HIDDEN else (role,):
            totals[alike] += numel
    return totals

"""The effect table: the measured change of the final loss, by regime, role and configuration.

In each measurement one role of a model moves from AdamW32 to a configuration, and the final test loss is compared with
AdamW32's at AdamW32's learning rate. A parameter is charged its share of its role's elements, so the prediction for a
uniform plan is what was measured, up to interactions between roles.

The table that ships is made from `docs/results/ablation` and `docs/results/zoo`; ``baoc calibrate`` makes one for your
own workload. Single runs are noisy, and not every precision of every rule is run. Two facts need no run: the effect of
AdamW32 is 0, because all runs are compared with it, and more state of the same kind is at least as good.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from types import MappingProxyType
from typing import Any

from baoc.core.configuration import Configuration, ConfigurationError, parse
from baoc.core.files import read_json, replaced
from baoc.core.roles import HIDDEN, Role
from baoc.core.spec import Shape
from baoc.planners.model_facts import GENERAL, REGIMES

FORMAT = "baoc.effect-table"
VERSION = 1
TERM = "loss"
UNKNOWN = 50.0
"""Percent of the loss that configurations without a measurement are charged, so that they are a last resort."""

DEVIATIONS = 1.645
"""Standard deviations on either side of a mean that hold 90%."""
VECTORS = "adamw-32"
"""The configuration of vectors: their state is small, so they keep it as long as a budget allows."""
OF_VECTORS = ("adamw[m=bf16a,v=bf16a]", "adamw[m=fp8,v=fp8]")
"""What vectors of small models may have beside it. They were measured on all weights, vectors included."""
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
    interval: tuple[float, float] | None = field(default=None, repr=False)
    """Lowest and highest value (90%), where the error is not the same on both sides."""

    @property
    def low(self) -> float:
        """The lowest value to expect of another workload (90%)."""
        return self.loss - DEVIATIONS * max(self.error, self.spread) if self.interval is None else self.interval[0]

    @property
    def high(self) -> float:
        """The highest value to expect of another workload (90%)."""
        return self.loss + DEVIATIONS * max(self.error, self.spread) if self.interval is None else self.interval[1]

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

    def distinct(self, shapes: Iterable[Shape]) -> tuple[Configuration, ...]:
        """Return the configurations, without those that would store tensors of these shapes as another one does."""
        shapes = list(shapes)
        found: dict[tuple[str, tuple[Any, ...]], Configuration] = {}
        for each in self.candidates:
            found.setdefault((each.mechanism_name, tuple(each.layout(shape).formats for shape in shapes)), each)
        return tuple(found.values())

    def effect(self, regime: str, role: Role, configuration: Configuration) -> Effect | None:
        """Return an effect; ``None`` if the configuration was not measured for the role, or does not suit it."""
        configuration = configuration.with_weight(None) if configuration.weight else configuration
        if role is Role.VECTOR:
            if configuration == parse(VECTORS):
                return Effect(0.0)
            return self._of(regime, Role.MATRIX).get(configuration) if str(configuration) in OF_VECTORS else None
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
    if effect.interval is not None:
        raise ValueError("an interval is not read from files")
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


# ---- tables from measured differences ----

LADDERS: tuple[tuple[str, ...], ...] = (
    ("adamw-32", "adamw-16", "adamw-8", "adamw[m=int8,v=factored]", "adamw[m=int4,v=factored]", "colnorm"),
    ("adamw-32", "adamw[m=int8a,v=int8a]", "adamw[m=int8a,v=factored]"),
    ("adamw[m=int4a,v=int8a]", "adamw[m=int4a,v=log4]", "adamw[m=int4a,v=factored]"),
    ("adamw-32", "adamw[m=int8,v=row-mean]", "adamw[m=int4,v=row-mean]"),
    ("muon-32", "muon-16", "muon-8", "muon[m=int8a]", "muon-4", "spectral"),
    ("normuon-32", "normuon-16", "normuon-8", "normuon-4"),
)
"""In each, a configuration holds more state of the same kind than the next one."""
LOSS_REFERENCE = "adamw-32"
_ANY_SIZE = {
    "adamw-8": "adamw[m=int8a,v=int8a]",
    "adamw[m=int8,v=factored]": "adamw[m=int8a,v=factored]",
    "muon-8": "muon[m=int8a]",
}
DERIVED = {
    "adamw-16": LOSS_REFERENCE,
    **{f"{name}-{bits}": f"{name}-8" for name in ("muon", "normuon") for bits in (32, 16)},
    **_ANY_SIZE,
    **{any_size: large for large, any_size in _ANY_SIZE.items()},
}
"""Configurations that need not be run, and the ones whose effect they have."""
OF_SMALL_MODELS = {
    "adamw[m=bf16a,v=bf16a]": "adamw-16",
    "adamw[m=fp8,v=fp8]": "adamw[m=int4a,v=int8a]",
    "adamw[m=int4a,v=factored-bf16]": "adamw[m=int4a,v=factored]",
}
"""The same for formats of :mod:`baoc.core.codecs.small`, in the regime "general", to which most small models belong."""
NOT_RUN = 0.25
"""Percent that each of them is charged more, above the tolerance of plans, so that it is used where no other one fits.
Their own runs do not count: ``fp8`` is as good as ``int8a`` in most of them, but ends far behind where losses go to
zero, because its groups have no scale."""
STEP = 0.002
"""Percent by which more state is taken to be better where runs show no difference."""
_FIXED, _DERIVED = 1e9, 1e-9  # weights beside numbers of runs


@dataclass(frozen=True)
class Difference:
    """The difference of one run to AdamW32 with the same seed and batches."""

    regime: str
    role: Role
    configuration: Configuration
    workload: str
    percent: float  # of AdamW32's test loss


def table_of(differences: Iterable[Difference], provenance: str = "") -> EffectTable:
    """Return the table for some differences: means over workloads of means over runs, with ladders in order."""
    found: dict[str, dict[Role, dict[Configuration, dict[str, list[float]]]]] = {}
    for each in differences:
        roles = found.setdefault(each.regime, {})
        roles.setdefault(each.role, {}).setdefault(each.configuration, {}).setdefault(each.workload, []).append(
            each.percent
        )
    effects = {
        regime: {
            role: completed(
                {c: effect_of(runs) for c, runs in known.items()}, OF_SMALL_MODELS if regime == GENERAL else {}
            )
            for role, known in roles.items()
        }
        for regime, roles in found.items()
    }
    return EffectTable(effects, provenance)


def effect_of(by_workload: Mapping[str, Sequence[float]]) -> Effect:
    """Return the mean over workloads and its standard error, or that over runs if there is one workload.

    Args:
        by_workload: differences in percent, by workload.

    Example:
        >>> effect_of({"gpt": [1.0, 2.0], "vit": [3.5]})
        Effect(loss=2.5, error=1.0, runs=3, workloads=2)
    """
    means = [statistics.fmean(runs) for runs in by_workload.values()]
    runs = [value for values in by_workload.values() for value in values]
    spread = means if len(means) > 1 else runs
    error = statistics.stdev(spread) / math.sqrt(len(spread)) if len(spread) > 1 else 0.0
    return Effect(statistics.fmean(means), error, len(runs), len(means))


def completed(
    measured: Mapping[Configuration, Effect], small: Mapping[str, str] = MappingProxyType({})
) -> dict[Configuration, Effect]:
    """Return effects with AdamW32, with configurations that need no run, and with ladders in order.

    Args:
        measured: effects by configuration.
        small: :data:`OF_SMALL_MODELS`, or nothing.

    Example:
        >>> known = completed({parse("muon-8"): Effect(-9.0, runs=3), parse("spectral"): Effect(-9.2, runs=3)})
        >>> {name: round(known[parse(name)].loss, 2) for name in ("adamw-16", "muon-32", "muon-8", "spectral")}
        {'adamw-16': 0.0, 'muon-32': -9.1, 'muon-8': -9.1, 'spectral': -9.09}
    """
    known = {parse(LOSS_REFERENCE): Effect(0.0), **measured}
    sources = {parse(spelling): parse(source) for spelling, source in DERIVED.items()}
    derived = {each: source for each, source in sources.items() if source in known and each not in known}
    known |= {each: Effect(known[source].loss) for each, source in derived.items()}
    order: dict[Configuration, None] = {}
    for ladder in LADDERS:
        rungs = [parse(spelling) for spelling in ladder if parse(spelling) in known]
        known |= zip(rungs, _in_order([known[rung] for rung in rungs], is_fixed=ladder[0] == LOSS_REFERENCE))
        order |= dict.fromkeys(rungs)
    for each, source in derived.items():  # runs of the source; above they must not count twice
        known[each] = replace(known[source], loss=known[each].loss)
    for each, source in ((parse(spelling), parse(source)) for spelling, source in small.items()):
        if source in known and each not in known:
            known[each] = replace(known[source], loss=known[source].loss + NOT_RUN)
    return {configuration: known[configuration] for configuration in {**order, **known}}


def _in_order(rungs: Sequence[Effect], is_fixed: bool) -> list[Effect]:
    """Return effects whose losses never fall: neighbors in the wrong order share their mean (pool adjacent violators).

    Args:
        rungs: effects of a ladder, from most state to least.
        is_fixed: the first one is the reference and does not change.
    """
    pools: list[tuple[float, float, int]] = []  # loss, weight, rungs
    for index, rung in enumerate(rungs):
        pools.append((rung.loss, _FIXED if is_fixed and index == 0 else max(_DERIVED, rung.runs), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (loss, weight, count), (other, other_weight, others) = pools[-2:]
            both = loss if weight >= _FIXED else (loss * weight + other * other_weight) / (weight + other_weight)
            pools[-2:] = [(both, weight + other_weight, count + others)]
    losses = [loss for loss, _, count in pools for _ in range(count)]
    return [replace(rung, loss=loss + STEP * index) for index, (rung, loss) in enumerate(zip(rungs, losses))]

"""What a plan may choose from: blocks, and what each configuration would risk, hold and take there."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import cast

import numpy as np
from numpy.typing import NDArray

from baoc.core.configuration import BEYOND, CATALOG, REFERENCE, Configuration
from baoc.core.mechanisms.normalised import Normalised
from baoc.core.plan import PlanError
from baoc.core.roles import Role, canonical_name
from baoc.core.spec import SMALL_NUMEL, Hyper, Shape
from baoc.planning import cost, partition, patterns, rates
from baoc.planning import risk as risks
from baoc.planning.metrics import Metrics
from baoc.planning.partition.units import unique
from baoc.planning.settings import AUTO, Settings
from baoc.planning.space import PER_ROLE, REFINED
from baoc.profiling.facts import Facts
from baoc.profiling.profile import Profile

TOKENS = 4096
"""Of a step, until some were counted: few enough that an expensive update is not chosen by mistake."""
_UNWANTED = 10.0  # risk of anything but the reference's mechanism for a block without signal
PLURAL = {
    Role.VECTOR: "vectors",
    Role.MATRIX: "matrices",
    Role.STACK: "stacks",
    Role.CONVOLUTION: "convolutions",
    Role.EMBEDDING: "embeddings",
    Role.HEAD: "heads",
}
SMALL = "small tables"
"""Embeddings and heads that are planned like vectors, where no vector is among them."""


class Choices:
    """All that does not depend on a budget."""

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        profile: Profile | None,
        hyper: Hyper,
        settings: Settings | None = None,
        facts: Facts | None = None,
        rows: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Without a profile all blocks have the prior's metrics: the plan for a warm-up, or for a dry run. ``facts``
        are the profile's, if none are given. With the ``rows`` that one rank has of sharded parameters, all bytes are
        that rank's, budgets too.
        """
        self.settings = settings or Settings()
        if not any(math.prod(shape) for shape in shapes.values()):
            raise PlanError("there is nothing to plan: the model has no parameters, or only empty ones.")
        self._shapes = {canonical_name(name): shape for name, shape in shapes.items()}
        self._profile = None if profile is None else profile.with_names(canonical_name)
        self._hyper = hyper
        self.facts = facts or (Facts() if self._profile is None else self._profile.facts)
        self.regime = self.facts.regime if self.settings.regime == AUTO else self.settings.regime
        self.tokens = self.settings.tokens or self.facts.tokens or TOKENS
        self.candidates = self.settings.chosen_candidates
        self._roles = {name: _planned_role(self.facts.role(name, shape), shape) for name, shape in self._shapes.items()}
        self._lr_factors = self._rates()
        self._elements = risks.elements((self._roles[name], math.prod(shape)) for name, shape in self._shapes.items())
        self.names, self.blocks = self._partition()
        self.metrics: list[risks.BlockMetrics] = [self._measured(block) for block in self.blocks]
        self._terms = self._risks()
        self._rows = {canonical_name(name): count for name, count in rows.items()}
        self.memory = cost.memory(self.blocks, self.candidates, self._rows)
        self.time = self._times()

    @property
    def reference_bytes(self) -> int:
        return sum(REFERENCE.state_bytes(shape, rows=self._rows.get(n)) for n, shape in self._shapes.items())

    @functools.cached_property
    def cost(self) -> NDArray[np.float64]:
        """Phi of Eq. 2 with preferences (Sec. 3.2), infinite where a configuration is forbidden."""
        total = np.array([[sum(terms.values()) for terms in row] for row in self._terms])
        if np.isnan(total).any():
            block = self.names[int(np.argmax(np.isnan(total).any(axis=1)))]
            raise PlanError(f"the risks of block {block!r} are not numbers: its profile holds what is beyond range.")
        total -= self.settings.preference * self._meant(self._preferred)
        forbidden = self._meant(self._forbidden)
        if forbidden.all(axis=1).any():
            block = self.names[int(np.argmax(forbidden.all(axis=1)))]
            raise PlanError(f"every configuration is forbidden for block {block!r}. Allow it at least one.")
        for unwanted in (self._unsuited(), self._unmeasured()):
            without = forbidden | unwanted
            nothing_left = without.all(axis=1, keepdims=True)
            forbidden = np.where(nothing_left, forbidden, without)
        return np.where(forbidden, np.inf, total)

    def _resolve_patterns(self, names_of: Mapping[str, Sequence[str]]) -> None:
        # a configuration that is no candidate anyway may be forbidden
        self._forbidden = patterns.chosen(self.settings.forbid, self.candidates, names_of, (*CATALOG, *BEYOND))
        self._preferred = patterns.chosen(self.settings.prefer, self.candidates, names_of)

    def _meant(self, rows: Mapping[str, patterns.Row]) -> NDArray[np.bool_]:
        """Which (block, configuration) pairs the patterns name: those of any of a block's parameters."""
        return np.array([np.any([rows[name] for name in block], axis=0) for block in self.blocks], dtype=bool)

    def _unsuited(self) -> NDArray[np.bool_]:
        """Which pairs would not be what they say: a mechanism that falls back to another for all of a block."""
        found = [
            [
                not any(c.mechanism.suits(shape, self._roles[name]) for name, shape in block.items())
                for c in self.candidates
            ]
            for block in self.blocks
        ]
        return np.array(found, dtype=bool).reshape(len(self.blocks), len(self.candidates))

    def _unmeasured(self) -> NDArray[np.bool_]:
        """Which pairs nobody has measured, where measurements are what a plan is made by. Candidates that a person
        names are a last resort all the same.
        """
        if self.settings.chosen_risk != risks.MEASURED or self.settings.candidates is not None:
            return np.zeros((len(self.blocks), len(self.candidates)), dtype=bool)
        table = risks.Table.load(self.settings.table)
        found = [
            [any(table.effect(self.regime, role, c) is None for role in metrics.roles) for c in self.candidates]
            for metrics in self.metrics
        ]
        return np.array(found, dtype=bool).reshape(len(self.blocks), len(self.candidates))

    def _partition(self) -> tuple[list[str], list[dict[str, Shape]]]:
        granularity = self.settings.chosen_granularity
        if granularity == PER_ROLE:
            return self._by_role()
        structure = "module" if granularity == REFINED else cast(partition.Granularity, granularity)
        units = partition.structural_units(self._shapes, structure)
        groups: Sequence[Sequence[int]] = [(i,) for i in range(len(units))]
        if granularity == REFINED and self._profile is not None:
            vectors = unit_vectors(units, self._profile, self._hyper, self.settings.anchors)
            groups = partition.refine(
                units, vectors, min_share=self.settings.min_share, quantile=self.settings.quantile
            )
        block_of = {name: block for block, parameters in partition.blocks(units, groups) for name in parameters}
        self._resolve_patterns({name: (name, unit.name, block_of[name]) for unit in units for name in unit.parameters})
        named = partition.blocks(units, [run for group in groups for run in self._of_one_rule(group, units)])
        return [name for name, _ in named], [{n: self._shapes[n] for n in parameters} for _, parameters in named]

    def _of_one_rule(self, group: Sequence[int], units: Sequence[partition.Unit]) -> list[list[int]]:
        """A group cut where patterns tell its units apart, or it might be left with nothing that is allowed."""

        def rule(index: int) -> tuple[bytes, ...]:
            mine = units[index].parameters
            rules = (self._forbidden, self._preferred)
            return tuple(np.any([rows[name] for name in mine], axis=0).tobytes() for rows in rules)

        return [list(run) for _, run in itertools.groupby(group, rule)]

    def _by_role(self) -> tuple[list[str], list[dict[str, Shape]]]:
        """Every matrix for itself, so that any budget can be spent, and all vectors of one learning rate together."""
        others = {name: shape for name, shape in self._shapes.items() if self._roles[name] is not Role.VECTOR}
        vectors: dict[float, dict[str, Shape]] = {}
        for name, shape in self._shapes.items():
            if name not in others:
                vectors.setdefault(self._lr_factors[name], {})[name] = shape
        self._resolve_patterns({name: (name, PLURAL[self._roles[name]]) for name in self._shapes})
        blocks = [*({name: shape} for name, shape in others.items()), *vectors.values()]
        return unique([*others, *(PLURAL[Role.VECTOR] for _ in vectors)]), blocks

    def _rates(self) -> dict[str, float]:
        """By parameter, what its role makes of the learning rate."""
        if self.settings.chosen_lr_match != rates.BY_ROLE:
            return dict.fromkeys(self._shapes, 1.0)
        return rates.lr_factors({n: (self.facts.role(n, s), s) for n, s in self._shapes.items()}, self.regime)

    def _times(self) -> NDArray[np.float64]:
        if self.settings.defaults.time_is_of == "update":
            return cost.update_ratios(self.blocks, self.candidates)
        return cost.step_ratios(self.blocks, self.candidates, self.tokens, self.facts.operations_per_byte)

    def _measured(self, block: Mapping[str, Shape]) -> risks.BlockMetrics:
        mine = [(self._roles[name], math.prod(shape)) for name, shape in block.items()]
        shares = risks.role_shares(mine, of=self._elements)
        if self._profile is not None and self._needs_metrics:
            return Metrics(self._profile, block, self._hyper, roles=shares)
        prior = risks.Prior(roles=shares)
        return prior if any(len(shape) > 1 for shape in block.values()) else replace(prior, structure_residual=None)

    @property
    def _needs_metrics(self) -> bool:
        """Whether gradients say anything about risks or learning rates."""
        return self.settings.chosen_risk != risks.MEASURED or not all(map(is_as_long_as_adamw, self.candidates))

    def _risks(self) -> list[list[dict[str, float]]]:
        model = risks.find(self.settings.chosen_risk)
        settings = self.settings.risk_settings(self._hyper, self.regime)
        return [
            [model(m, c, settings) if self._can_judge(m) else _risk_without_signal(c) for c in self.candidates]
            for m in self.metrics
        ]

    def _can_judge(self, metrics: risks.BlockMetrics) -> bool:
        return metrics.has_signal or self.settings.chosen_risk == risks.MEASURED


def unit_vectors(
    units: Sequence[partition.Unit], profile: Profile, hyper: Hyper, anchors: risks.Anchors
) -> NDArray[np.float64]:
    """The units' normalised diagnostics for Alg. 2, one row each; NaN where a unit has none."""
    rows = []
    for unit in units:
        metrics = Metrics(profile, unit.parameters, hyper)
        need = risks.needs(metrics, anchors)
        structure = np.nan if metrics.structure_residual is None else need.structure
        row = [need.adaptive, need.momentum, need.decay, structure, risks.precision_risk(metrics.precision(8))]
        rows.append(row if metrics.has_signal else [np.nan] * len(row))
    return np.array(rows)


def is_as_long_as_adamw(configuration: Configuration) -> bool:
    """Whether updates at AdamW's learning rate have AdamW's length by construction."""
    mechanism = configuration.mechanism
    return (mechanism.adaptive and mechanism.momentum) or isinstance(mechanism, Normalised)


def _planned_role(role: Role, shape: Shape) -> Role:
    """Small embeddings and heads have fp32 state in every configuration: they are no more than vectors."""
    is_small = role in (Role.EMBEDDING, Role.HEAD) and math.prod(shape) < SMALL_NUMEL
    return Role.VECTOR if is_small else role


def _risk_without_signal(configuration: Configuration) -> dict[str, float]:
    switches = configuration.switches
    kept = configuration.mechanism_name == REFERENCE.mechanism_name and not switches.factored
    return {"aggressive": switches.bits / 1000 if kept else _UNWANTED + risks.aggressiveness(configuration)}

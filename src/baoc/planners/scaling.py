"""How effects change with the size of a model and the length of its training.

The runs of the effect table are short runs of small models, which flatter Muon. Two laws carry effects to the user's
scale. Both are fitted to published end-of-run losses and to a ladder of our own runs (`docs/results/scaling.md`):

- ``worth``: percent of the loss that e times the steps are worth. Long runs of large models have flatter curves, so a
  difference of the loss in the table is a smaller one there: it is the same share of the steps.
- ``saved``: the logarithm of how many times more steps a tuned AdamW needs for the loss of Muon on hidden matrices.

``saved`` times ``worth`` is what Muon gains. Rules without momentum fall behind as runs get longer, so they are charged
for every step beyond those of the table. Studies differ by more than runs of one study do: intervals have both.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from baoc.core.configuration import Configuration
from baoc.core.roles import HIDDEN, Role
from baoc.core.text import human_count
from baoc.planners.effect_table import DEVIATIONS, Effect, EffectTable
from baoc.planners.model_facts import SCRATCH

TOKENS_PER_PARAMETER = 20
"""The planned length, unless steps are given."""
HIDDEN_RULES = ("muon", "normuon", "spectral")
"""Rules whose gain over AdamW on hidden weights is the law's."""
FAR = 10.0
"""Times the parameters of the largest model that was trained, from which on there is no evidence."""


@dataclass(frozen=True)
class Scale:
    """Hidden parameters, tokens of the whole training, and steps.

    >>> Scale.of(1_000_000, tokens_per_step=4000).steps, Scale.of(1_000_000, tokens_per_step=4000, steps=10).tokens
    (5000.0, 40000.0)
    """

    parameters: float
    tokens: float
    steps: float

    @classmethod
    def of(cls, parameters: int, tokens_per_step: int, steps: int | None = None) -> Scale:
        """Return the scale of a training; by default of 20 tokens per parameter."""
        parameters = max(1, parameters)
        count = TOKENS_PER_PARAMETER * parameters / tokens_per_step if steps is None else float(steps)
        return cls(parameters, count * tokens_per_step, count)


@dataclass(frozen=True)
class Law:
    """``exp(constant) (1 + N / knee)^-size (D / 20 N)^-length``, with the covariance of the three in its logarithm."""

    constant: float
    size: float
    length: float
    knee: float = 0.0
    """Parameters up to which size makes little difference; 0: none."""
    covariance: tuple[tuple[float, ...], ...] = ()
    between: float = 0.0
    """Standard deviation between studies, of the logarithm."""
    within: float = 0.0
    """Standard deviation within a study, of the logarithm."""

    def features(self, parameters: float, tokens: float) -> tuple[float, float, float]:
        """Return what the coefficients are multiplied by in the logarithm."""
        size = parameters / 1e9 if self.knee == 0 else 1 + parameters / self.knee
        return 1.0, -math.log(size), -math.log(tokens / (TOKENS_PER_PARAMETER * parameters))

    def mean(self, parameters: float, tokens: float) -> float:
        """Return the value of the law."""
        features = self.features(parameters, tokens)
        return math.exp(sum(map(math.prod, zip(features, (self.constant, self.size, self.length)))))

    def spread(self, parameters: float, tokens: float) -> float:
        """Return the factor by which a new study may differ from the mean, either way (90%)."""
        x = self.features(parameters, tokens)
        fitted = sum(a * b * cell for a, row in zip(x, self.covariance) for b, cell in zip(x, row))
        return math.exp(DEVIATIONS * math.sqrt(fitted + self.between**2 + self.within**2))


@dataclass(frozen=True)
class Laws:
    """The fitted laws, and what they were fitted to."""

    worth: Law
    saved: Law
    no_momentum: tuple[float, float]
    """Constant, and slope by the logarithm of the steps, of ln(steps of a rule without momentum / Muon's)."""
    comparisons: int
    studies: int
    parameters: tuple[float, float]
    """The smallest and the largest model."""
    shortest: float
    """Fewest tokens per parameter."""
    table: Scale
    """A typical run of the effect table."""
    largest: Mapping[str, float]
    """Parameters of the largest model in the effect table, by regime."""

    @classmethod
    def from_plain(cls, content: Mapping[str, Any]) -> Laws:
        """Read what a file has."""
        return cls(
            worth=Law(**content["worth"]),
            saved=Law(**content["saved"]),
            no_momentum=(content["no_momentum"][0], content["no_momentum"][1]),
            comparisons=content["comparisons"],
            studies=content["studies"],
            parameters=(content["parameters"][0], content["parameters"][1]),
            shortest=content["shortest"],
            table=Scale(**content["table"]),
            largest=content["largest"],
        )

    @classmethod
    @functools.cache
    def load(cls) -> Laws:
        """Return the laws that ship."""
        file = resources.files(__package__) / "scaling.json"
        return cls.from_plain(json.loads(file.read_text(encoding="utf-8")))

    def worth_of(self, scale: Scale) -> float:
        """Return what e times the steps are worth, in percent of the loss."""
        return self.worth.mean(*self._within(scale))

    def carried(self, scale: Scale) -> float:
        """Return what is left of a difference in the effect table: at most all of it.

        Example:
            >>> laws = Laws.load()
            >>> 0 < laws.carried(Scale.of(10**10, 10**6)) < laws.carried(Scale.of(10**8, 10**6)) < 1
            True
        """
        return min(1.0, self.worth_of(scale) / self.worth_of(self.table))

    def gain(self, scale: Scale) -> tuple[float, float, float]:
        """Return the change of the loss that Muon makes, in percent of a tuned AdamW's: the mean, lowest and highest.

        Example:
            >>> mean, low, high = Laws.load().gain(Scale.of(10**9, 10**6))
            >>> low < mean < high < 0
            True
        """
        place = self._within(scale)
        mean, spread = -self.worth.mean(*place) * self.saved.mean(*place), self.saved.spread(*place)
        return mean, mean * spread, mean / spread

    def lag(self, scale: Scale) -> float:
        """Return what a rule without momentum loses beyond what the effect table says, in percent of the loss."""
        steps_of_table, steps = self._lag_in_steps(self.table.steps), self._lag_in_steps(scale.steps)
        return self.worth_of(scale) * max(0.0, steps - steps_of_table)

    def _lag_in_steps(self, steps: float) -> float:
        constant, slope = self.no_momentum
        return max(0.0, constant + slope * math.log(max(1.0, steps)))

    def _within(self, scale: Scale) -> tuple[float, float]:
        """Return parameters and tokens; models and runs below all that were trained count as the smallest of these."""
        parameters = max(scale.parameters, self.parameters[0])
        return parameters, parameters * max(scale.tokens / scale.parameters, self.shortest)


class EffectsAtScale:
    """The effects of a table for one regime at one scale.

    The laws hold for language models that are trained from scratch with the table that ships. Other effects are as
    the table has them.
    """

    def __init__(self, table: EffectTable, regime: str, scale: Scale, *, is_own: bool = False) -> None:
        self.table, self.regime, self.scale = table, regime, scale
        self._is_own = is_own
        self._laws = Laws.load() if regime == SCRATCH and not is_own else None
        self.carried = 1.0 if self._laws is None else self._laws.carried(scale)

    def effect(self, role: Role, configuration: Configuration) -> Effect | None:
        """Return an effect; ``None`` if the configuration was not measured for the role, or does not suit it."""
        found = self.table.effect(self.regime, role, configuration)
        if found is None or self._laws is None:
            return found
        loss, lag = found.loss, 0.0 if has_momentum(configuration) else self._laws.lag(self.scale)
        if not self.uses_law(role, configuration):
            error = math.hypot(found.error * self.carried, lag / 2)  # one study measured the lag
            return replace(found, loss=loss * self.carried + lag, error=error)
        mean, low, high = self._laws.gain(self.scale)
        beyond = (loss - self._best(role)) * self.carried + lag
        error = math.hypot((high - low) / (2 * DEVIATIONS), lag / 2)
        return replace(found, loss=mean + beyond, error=error, interval=(low + beyond - lag, high + beyond + lag))

    def uses_law(self, role: Role, configuration: Configuration) -> bool:
        """Return whether the gain of a configuration is the law's."""
        return self._laws is not None and role in HIDDEN and configuration.mechanism_name in HIDDEN_RULES

    def _best(self, role: Role) -> float:
        """Return the table's effect of the best rule for hidden weights, whose gain the law is about."""
        known = ((each, self.table.effect(self.regime, role, each)) for each in self.table.candidates)
        return min(effect.loss for each, effect in known if effect and each.mechanism_name in HIDDEN_RULES)

    def source(self, runs: int, *, uses_law: bool) -> str:
        """Return where a prediction comes from, and whether it was extrapolated."""
        mine = human_count(round(self.scale.parameters))
        if self._is_own:
            return f"from {runs} runs of your own"
        laws = Laws.load()
        if uses_law:
            smallest, largest = (human_count(round(each)) for each in laws.parameters)
            about = f"at {mine} parameters and {human_count(round(self.scale.tokens))} tokens"
            if not laws.parameters[0] <= self.scale.parameters <= laws.parameters[1]:
                nearest = largest if self.scale.parameters > laws.parameters[1] else smallest
                return f"{about}, extrapolated from {nearest}"
            return f"{about}, from {laws.comparisons} runs of {smallest} to {largest}"
        limit = laws.largest[self.regime]
        about = f"from {runs} runs of up to {human_count(round(limit))} parameters"
        return about if self.scale.parameters < FAR * limit else f"{about}; no evidence at {mine}"


def has_momentum(configuration: Configuration) -> bool:
    """Return whether a rule remembers gradients.

    >>> from baoc.core.configuration import parse
    >>> has_momentum(parse("muon-8")), has_momentum(parse("spectral"))
    (True, False)
    """
    return any(slot.is_average for slot in configuration.slots)

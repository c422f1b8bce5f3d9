"""What a person may ask of a plan besides its budgets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from baoc.core.configuration import Configuration, parse
from baoc.core.spec import Hyper
from baoc.core.text import check_names
from baoc.planning import partition, rates
from baoc.planning import risk as risks
from baoc.planning.patterns import Patterns
from baoc.planning.space import DEFAULT_SPACE, PER_ROLE, REFINED, SPACES, Space

AUTO = "auto"
"""As a memory budget: the least that is expected to be within a tolerance of the best."""
GRANULARITIES = (PER_ROLE, REFINED, *partition.GRANULARITIES)
_PREFERENCE = 0.5  # lambda_pref


@dataclass(frozen=True)
class Settings:
    """Everything about a plan but its budgets. What is ``None`` is the space's own. Where the paper has a default, it
    is the default here.
    """

    space: str = DEFAULT_SPACE
    """``"measured"``, ours, or ``"paper"``."""
    risk: str | risks.RiskModel | None = None
    regime: str = AUTO
    """``"scratch"`` or ``"finetune"``; left out, the weights tell."""
    table: str | None = None
    """A file of measured effects, such as ``baoc calibrate`` writes; left out, the one that ships."""
    tolerance: float = 0.2
    """Of ``memory="auto"``, in percent of loss."""
    tokens: int | None = None
    """That a step trains on; left out, they are counted where the optimizer is given a module."""
    anchors: risks.Anchors = risks.DEFAULT_ANCHORS
    weights: Mapping[str, float] | None = None
    gamma: float = risks.GAMMA
    granularity: str | None = None
    min_share: float = partition.MIN_SHARE
    quantile: float = 0.75
    candidates: Sequence[Configuration | str] | None = None
    forbid: Patterns = ()
    prefer: Patterns = ()
    preference: float = _PREFERENCE
    lr_match: str | None = None
    """How long a block's updates are: ``"role"``, ``"rms"`` or ``"none"``, see :data:`~baoc.planning.rates.MATCHES`."""

    def __post_init__(self) -> None:
        if self.lr_match is not None:
            _check_known("lr_match", self.lr_match, rates.MATCHES)
        _check_known("space", self.space, SPACES)
        _check_known("regime", self.regime, (AUTO, *risks.REGIMES))
        if self.granularity is not None:
            _check_known("granularity", self.granularity, GRANULARITIES)
        if self.tokens is not None and not self.tokens >= 1:
            raise ValueError(f"tokens is {self.tokens!r}; it must be at least 1, or None to have them counted.")
        if not self.tolerance >= 0:
            raise ValueError(f"tolerance is {self.tolerance!r}; it must be a number of at least 0, in percent of loss.")
        if self.candidates is not None:
            given = (self.candidates,) if isinstance(self.candidates, (str, Configuration)) else self.candidates
            object.__setattr__(self, "candidates", tuple(map(parse, given)))
            if not self.candidates:
                raise ValueError("there are no candidates to plan with. Give at least one configuration.")

    @classmethod
    def of(cls, caller: str, given: Mapping[str, Any]) -> Settings:
        """Settings from keyword arguments; one that is not known is an error in the caller's name."""
        return cls().changed(caller, given)

    def changed(self, caller: str, given: Mapping[str, Any]) -> Settings:
        """These settings with others in their place."""
        check_names(given, caller, (field.name for field in fields(self)))
        return replace(self, **given)

    @property
    def defaults(self) -> Space:
        return SPACES[self.space]

    @property
    def chosen_risk(self) -> str | risks.RiskModel:
        return self.defaults.risk if self.risk is None else self.risk

    @property
    def chosen_granularity(self) -> str:
        return self.granularity or self.defaults.granularity

    @property
    def chosen_lr_match(self) -> str:
        return self.lr_match or self.defaults.lr_match

    @property
    def named_candidates(self) -> tuple[Configuration, ...] | None:
        """What the user or the space has named; ``None`` if evidence is to say."""
        return cast(tuple[Configuration, ...] | None, self.candidates) or self.defaults.candidates

    @property
    def chosen_candidates(self) -> tuple[Configuration, ...]:
        named = self.named_candidates
        return risks.Table.load(self.table).candidates if named is None else named

    def risk_settings(self, hyper: Hyper, regime: str) -> risks.Settings:
        return risks.Settings(self.anchors, self.weights or {}, self.gamma, hyper.weight_decay, regime, self.table)


def _check_known(what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}. Choose one of {', '.join(known)}.")

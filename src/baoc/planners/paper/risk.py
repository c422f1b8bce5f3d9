"""Normalizations of Appendix A, and the linear risk of Eq. 9: as printed ("paper") and with repairs ("update")."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from baoc.core.configuration import Configuration
from baoc.planners.paper.metrics import EPSILON

TERMS = ("adaptive", "momentum", "decay", "structure", "precision", "aggressive")
GAMMA = 0.1
PAPER_BITS = (32, 16, 8)


class BlockMetrics(Protocol):
    """The diagnostics of a block that risk models read."""

    @property
    def has_signal(self) -> bool: ...

    @property
    def anisotropy(self) -> float: ...

    @property
    def direction_stability(self) -> float: ...

    @property
    def snr(self) -> float: ...

    @property
    def distortion(self) -> float: ...

    @property
    def structure_residual(self) -> float | None: ...

    def precision(self, bits: int) -> float: ...

    def alignment(self, configuration: Configuration) -> float: ...


@dataclass(frozen=True)
class Anchors:
    """Where each need signal starts to rise and where it reaches 1 (App. A, Eq. 11, 13 and 15).

    >>> round(Anchors().perturbed(0.2).anisotropy[0] / math.log(2), 6)
    1.2
    """

    anisotropy: tuple[float, float] = (math.log(2), math.log(10))
    stability: tuple[float, float] = (0.2, 0.6)
    snr: tuple[float, float] = (0.0, 2.0)

    def __post_init__(self) -> None:
        for name in ("anisotropy", "stability", "snr"):
            low, high = getattr(self, name)
            if not low < high:
                raise ValueError(f"the anchors of {name} are ({low}, {high}); the first must be below the second.")

    def perturbed(self, share: float) -> Anchors:
        """Return anchors with both anisotropy anchors moved by a share, as in the paper's sensitivity study."""
        low, high = self.anisotropy
        return replace(self, anisotropy=(low * (1 + share), high * (1 + share)))


DEFAULT_ANCHORS = Anchors()


@dataclass(frozen=True)
class RiskSettings:
    """Settings of a risk model.

    Args:
        anchors: of the need signals.
        weights: W of Alg. 1, by term; 1 where not given.
        gamma: weight of Agg in Eq. 2.
        weight_decay: the run's.
    """

    anchors: Anchors = DEFAULT_ANCHORS
    weights: Mapping[str, float] = field(default_factory=dict)
    gamma: float = GAMMA
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        unknown = [name for name in self.weights if name not in TERMS]
        if unknown:
            raise ValueError(f"unknown risk term {unknown[0]!r}. Known: {', '.join(TERMS)}.")
        for name, weight in self.weights.items():
            if not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
                raise ValueError(f"the weight of risk term {name!r} must be a non-negative number, got {weight!r}.")


class RiskModel(Protocol):
    """Returns the terms of the risk of a configuration for a block. The planner minimizes their sum."""

    def __call__(
        self, metrics: BlockMetrics, configuration: Configuration, settings: RiskSettings
    ) -> dict[str, float]: ...


@dataclass(frozen=True)
class Needs:
    """The normalized signals of App. A: how much a block needs each mechanism."""

    adaptive: float  # s_A
    momentum: float  # s_M
    decay: float  # C-tilde
    structure: float  # s_F

    def vector(self) -> tuple[float, float, float, float]:
        return self.adaptive, self.momentum, self.decay, self.structure


def needs(metrics: BlockMetrics, anchors: Anchors) -> Needs:
    """Return the normalized signals of a block (App. A)."""
    stability = _ramp(metrics.direction_stability, anchors.stability)  # Eq. 14
    signal = _ramp(math.log1p(metrics.snr), anchors.snr)  # Eq. 16
    residual = metrics.structure_residual
    return Needs(
        adaptive=_ramp(metrics.anisotropy, anchors.anisotropy),  # Eq. 12
        momentum=stability * signal,  # Eq. 17
        decay=math.log1p(metrics.distortion),  # Eq. 18
        structure=0.0 if residual is None else min(max(residual, 0.0), 1.0),  # Eq. 19; vectors are never factored
    )


def precision_risk(alignment: float) -> float:
    """Return Eq. 10 and 20: -log of the clipped cosine."""
    return max(0.0, -math.log(min(max(alignment, EPSILON), 1.0) + EPSILON))


def aggressiveness(configuration: Configuration) -> float:
    """Return Agg(c) of Eq. 1."""
    switches = configuration.switches
    dropped = (not switches.adaptive) + (not switches.momentum) + (not switches.decoupled)
    return dropped + switches.factored + 32 / switches.bits - 1


def paper(metrics: BlockMetrics, configuration: Configuration, settings: RiskSettings) -> dict[str, float]:
    """Return Eq. 9 plus gamma * Agg as printed, where precision is that of AdamW at the same bit width.

    For bit widths that the paper does not have, precision is that of the configuration itself.
    """
    bits = configuration.switches.bits
    cosine = metrics.precision(bits) if bits in PAPER_BITS else metrics.alignment(configuration)
    return _linear(metrics, configuration, settings, precision_risk(cosine))


def update(metrics: BlockMetrics, configuration: Configuration, settings: RiskSettings) -> dict[str, float]:
    """Return Eq. 9 with two repairs.

    Precision is that of the configuration's own update, and dropping decoupled decay is no risk if there is no decay.
    """
    terms = _linear(metrics, configuration, settings, precision_risk(metrics.alignment(configuration)))
    return terms | ({"decay": 0.0} if settings.weight_decay == 0 else {})


def _linear(
    metrics: BlockMetrics, configuration: Configuration, settings: RiskSettings, precision: float
) -> dict[str, float]:
    need, switches = needs(metrics, settings.anchors), configuration.switches
    terms = {
        "adaptive": need.adaptive * (not switches.adaptive),
        "momentum": need.momentum * (not switches.momentum),
        "decay": need.decay * (not switches.decoupled),
        "structure": need.structure * switches.factored,
        "precision": precision,
        "aggressive": settings.gamma * aggressiveness(configuration),
    }
    return {name: value * settings.weights.get(name, 1.0) for name, value in terms.items()}


def _ramp(value: float, anchors: tuple[float, float]) -> float:
    low, high = anchors
    return min(max((value - low) / (high - low), 0.0), 1.0)


@dataclass(frozen=True)
class Prior:
    """Diagnostics of a typical transformer block, for plans that are made before any gradient.

    The numbers are rounded medians over the modules with matrices of a small GPT after 60 steps of AdamW at learning
    rate 1e-3 with one seed.
    """

    has_signal: bool = True
    anisotropy: float = 4.2
    direction_stability: float = 0.35
    snr: float = 0.08
    distortion: float = 0.62
    structure_residual: float | None = 0.25

    def precision(self, bits: int) -> float:
        known = {32: 0.0, 16: 2e-6, 8: 3e-5}  # 1 - cosine
        width = min((width for width in known if width >= bits), default=32)
        return max(0.0, 1.0 - known[width] * 4.0 ** (width - bits))  # squared errors grow by 4 per missing bit

    def alignment(self, configuration: Configuration) -> float:
        return self.precision(configuration.switches.bits)


RISKS: dict[str, RiskModel] = {"paper": paper, "update": update}


def register_risk(name: str) -> Callable[[RiskModel], RiskModel]:
    """Give a risk model a name that ``PaperPlanner(risk=...)`` accepts.

    Example:
        >>> @register_risk("only-bits")
        ... def only_bits(metrics, configuration, settings):
        ...     return {"precision": 32 / configuration.switches.bits}
        >>> "only-bits" in RISKS
        True
        >>> del RISKS["only-bits"]
    """

    def add(model: RiskModel) -> RiskModel:
        RISKS[name] = model
        return model

    return add


def find_risk(risk: str | RiskModel) -> RiskModel:
    """Return a risk model by its name.

    Raises:
        ValueError: no model has this name.
    """
    if not isinstance(risk, str):
        if not callable(risk):
            raise ValueError(f"risk must be the name of a risk model or a function, got {risk!r}.")
        return risk
    if risk not in RISKS:
        raise ValueError(f"unknown risk model {risk!r}. Known: {', '.join(RISKS)}; register_risk adds your own.")
    return RISKS[risk]

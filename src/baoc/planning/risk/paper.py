"""Appendix A's normalizations and the linear risk of Eq. 9: to the letter, and repaired."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from baoc.core.configuration import Configuration
from baoc.core.roles import Role
from baoc.planning.metrics import EPSILON

TERMS = ("adaptive", "momentum", "decay", "structure", "precision", "aggressive")
GAMMA = 0.1
PAPER_BITS = (32, 16, 8)


class BlockMetrics(Protocol):
    """What a risk model may know of a block."""

    @property
    def roles(self) -> Mapping[Role, float]: ...  # how much of each role's elements in the model are this block's

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
    """Where a need signal begins and where it is full (App. A, Eq. 11, 13 and 15).

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
        """Both anisotropy anchors moved by a share, as in the paper's sensitivity study."""
        low, high = self.anisotropy
        return replace(self, anisotropy=(low * (1 + share), high * (1 + share)))


DEFAULT_ANCHORS = Anchors()


@dataclass(frozen=True)
class Settings:
    """What a user may change about a risk model."""

    anchors: Anchors = DEFAULT_ANCHORS
    weights: Mapping[str, float] = field(default_factory=dict)  # by term; 1 where not given
    gamma: float = GAMMA  # Eq. 2's weight of Agg
    weight_decay: float = 0.01
    regime: str = "scratch"
    table: str | None = None  # of measured effects, a file; the one that ships if there is none

    def __post_init__(self) -> None:
        unknown = [name for name in self.weights if name not in TERMS]
        if unknown:
            raise ValueError(f"unknown risk term {unknown[0]!r}. Known: {', '.join(TERMS)}.")


class RiskModel(Protocol):
    """Terms of the risk of a configuration for a block. Their sum is what is minimised."""

    def __call__(self, metrics: BlockMetrics, configuration: Configuration, settings: Settings) -> dict[str, float]: ...


@dataclass(frozen=True)
class Needs:
    """The normalised signals of App. A: how much a block needs each mechanism."""

    adaptive: float  # s_A
    momentum: float  # s_M
    decay: float  # C-tilde
    structure: float  # s_F

    def vector(self) -> tuple[float, float, float, float]:
        return self.adaptive, self.momentum, self.decay, self.structure


def needs(metrics: BlockMetrics, anchors: Anchors) -> Needs:
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
    """Eq. 10 and 20: -log of the clipped cosine."""
    return max(0.0, -math.log(min(max(alignment, EPSILON), 1.0) + EPSILON))


def aggressiveness(configuration: Configuration) -> float:
    """Eq. 1, Agg(c)."""
    switches = configuration.switches
    dropped = (not switches.adaptive) + (not switches.momentum) + (not switches.decoupled)
    return dropped + switches.factored + 32 / switches.bits - 1


def paper(metrics: BlockMetrics, configuration: Configuration, settings: Settings) -> dict[str, float]:
    """Eq. 9 plus gamma * Agg, to the letter: precision is AdamW's at the configuration's bit-width.

    Where the paper has no AdamW of that width, it is the configuration's own.
    """
    bits = configuration.switches.bits
    cosine = metrics.precision(bits) if bits in PAPER_BITS else metrics.alignment(configuration)
    return _linear(metrics, configuration, settings, precision_risk(cosine))


def update(metrics: BlockMetrics, configuration: Configuration, settings: Settings) -> dict[str, float]:
    """Eq. 9 with two repairs.

    Precision is that of the update this configuration would really make, and dropping decoupled decay risks nothing
    where there is no decay.
    """
    terms = _linear(metrics, configuration, settings, precision_risk(metrics.alignment(configuration)))
    return terms | ({"decay": 0.0} if settings.weight_decay == 0 else {})


def _linear(
    metrics: BlockMetrics, configuration: Configuration, settings: Settings, precision: float
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
    """What is assumed of a block before any gradient was seen: the typical transformer block.

    Its numbers are rounded medians over the modules with matrices of a small GPT after 60 steps of AdamW
    at lr 1e-3, one seed. The plan for the warm-up, and a dry run's, stand on it.
    """

    roles: Mapping[Role, float] = field(default_factory=dict)
    has_signal: bool = True
    anisotropy: float = 4.2
    direction_stability: float = 0.35
    snr: float = 0.08
    distortion: float = 0.62
    structure_residual: float | None = 0.25

    def precision(self, bits: int) -> float:
        known = {32: 0.0, 16: 2e-6, 8: 3e-5}  # 1 - cosine
        width = min((width for width in known if width >= bits), default=32)
        return max(0.0, 1.0 - known[width] * 4.0 ** (width - bits))  # an error's square, for every bit that is missing

    def alignment(self, configuration: Configuration) -> float:
        return self.precision(configuration.switches.bits)

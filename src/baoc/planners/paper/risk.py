"""Normalizations of Appendix A, and the linear risk of Eq. 9: as printed ("paper") and with repairs ("update")."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from baoc.core.configuration import Configuration
from baoc.planners.paper.metrics import EPSILON

DIAGNOSTICS = ("adaptive", "momentum", "decay", "structure", "precision")
"""The diagnostics of z_j in Alg. 2: s_A, s_M, C-tilde, s_F and l_Q(8)."""
SNR_MODES = ("auto", "always", "never")
TERMS = ("adaptive", "momentum", "decay", "structure", "precision", "aggressive")
GAMMA = 0.1
PAPER_BITS = (32, 16, 8)


class BlockMetrics(Protocol):
    """The diagnostics of a block that risk models read (the metrics z of the paper).

    Example:
        >>> def cheap_first_moment(metrics: BlockMetrics, configuration, settings):
        ...     return {"momentum": 0.0 if metrics.direction_stability < 0.1 else 1.0}
    """

    @property
    def steps(self) -> int:
        """Steps that were sampled."""

    @property
    def has_signal(self) -> bool:
        """Whether any sampled gradient was not zero."""

    @property
    def has_matrix(self) -> bool:
        """Whether the block has a tensor with at least two dims."""

    @property
    def anisotropy(self) -> float:
        """The log-ratio of the 90% and the 10% quantile of the second moment (Eq. 4)."""

    @property
    def direction_stability(self) -> float:
        """The mean of cosines between successive gradients (Eq. 5)."""

    @property
    def snr(self) -> float:
        """The signal-to-noise ratio of the gradients (Eq. 5)."""

    @property
    def distortion(self) -> float:
        """How far the preconditioner is from a constant, weighted by the parameters (Eq. 6)."""

    @property
    def structure_residual(self) -> float | None:
        """The error of second moments from row and column means (Eq. 7); ``None`` without a matrix."""

    def precision(self, bits: int) -> float:
        """Return the cosine between AdamW's updates with state of so many bits and in fp32 (Eq. 8).

        Args:
            bits: of an element of state.
        """

    def alignment(self, configuration: Configuration) -> float:
        """Return the cosine between a configuration's updates with exact state and with its codecs (Eq. 8).

        Args:
            configuration: the configuration.
        """


@dataclass(frozen=True)
class Anchors:
    """Where each need signal starts to rise and where it reaches 1 (App. A, Eq. 11, 13 and 15).

    Args:
        anisotropy: of the anisotropy, which is a logarithm (Eq. 11).
        stability: of the direction stability (Eq. 13).
        snr: of log(1 + SNR) (Eq. 15).

    Raises:
        ValueError: if a pair is not two ascending numbers.

    >>> round(Anchors().perturbed(0.2).anisotropy[0] / math.log(2), 6)
    1.2
    """

    anisotropy: tuple[float, float] = (math.log(2), math.log(10))
    stability: tuple[float, float] = (0.2, 0.6)
    snr: tuple[float, float] = (0.0, 2.0)

    def __post_init__(self) -> None:
        for name in ("anisotropy", "stability", "snr"):
            pair = getattr(self, name)
            is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
            if not is_pair or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in pair):
                raise ValueError(f"the anchors of {name} must be two numbers, got {pair!r}.")
            if not pair[0] < pair[1]:
                raise ValueError(
                    f"the anchors of {name} are ({pair[0]}, {pair[1]}); the first must be below the second."
                )
            object.__setattr__(self, name, tuple(pair))

    def perturbed(self, share: float) -> Anchors:
        """Return anchors with both anisotropy anchors moved by a share, as in the paper's sensitivity study.

        Args:
            share: the change, such as 0.2 for 20% more.
        """
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
        snr: whether the momentum need is s_rho * s_snr ("always"), s_rho ("never"), or s_rho where the SNR is missing
            or unreliable ("auto"; see :func:`has_snr`).
        beta_m: decay of the first moment, which "auto" depends on.
        epsilon: of Eq. 10 and 20.
    """

    anchors: Anchors = DEFAULT_ANCHORS
    weights: Mapping[str, float] = field(default_factory=dict)
    gamma: float = GAMMA
    weight_decay: float = 0.01
    snr: str = "auto"
    beta_m: float = 0.9
    epsilon: float = EPSILON

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", named_weights("weights", self.weights, TERMS))


def named_weights(setting: str, weights: object, known: Sequence[str]) -> dict[str, float]:
    """Return weights by name.

    Args:
        setting: its name, for errors.
        weights: a mapping from some names to weights, one weight per name in their order, or ``None``.
        known: the names.

    Raises:
        ValueError: a name is unknown, the number of weights is wrong, or a weight is negative or not finite.

    Example:
        >>> named_weights("weights", [1.0, 2.0], ("a", "b"))
        {'a': 1.0, 'b': 2.0}
    """
    if weights is None:
        return {}
    if isinstance(weights, Mapping):
        found = dict(weights)
        unknown = [name for name in found if name not in known]
        if unknown:
            raise ValueError(f"{setting} names {unknown[0]!r}, which is not one of {', '.join(known)}.")
    elif isinstance(weights, Sequence) and not isinstance(weights, str):
        if len(weights) != len(known):
            raise ValueError(f"{setting} has {len(weights)} numbers; it needs {len(known)}: {', '.join(known)}.")
        found = dict(zip(known, weights))
    else:
        raise ValueError(f"{setting} must be a mapping or a list of numbers for {', '.join(known)}; got {weights!r}.")
    for name, weight in found.items():
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight < math.inf:
            raise ValueError(f"{setting}[{name!r}] must be a non-negative number, got {weight!r}.")
    return found


class RiskModel(Protocol):
    """Returns the terms of the risk of a configuration for a block. The planner minimizes their sum.

    Example:
        >>> def fewer_bits(metrics: BlockMetrics, configuration: Configuration, settings: RiskSettings):
        ...     return {"precision": 1 - metrics.precision(configuration.switches.bits)}
        >>> from baoc import PaperPlanner
        >>> planner = PaperPlanner(risk=fewer_bits)
    """

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


def has_snr(metrics: BlockMetrics, settings: RiskSettings) -> bool:
    """Return whether the SNR proxy is available and reliable (App. A.3).

    It is available if some sampled gradient was not zero. It is reliable after 1 / (1 - beta_m) steps, when the first
    moment has averaged over its own window: after one step, the squared mean of gradients is their mean square.
    """
    if settings.snr != "auto":
        return settings.snr == "always"
    # rounded: 1 / (1 - 0.9) is above 10 in floats
    is_long_enough = metrics.steps >= round(1 / (1 - settings.beta_m), 6)
    return metrics.has_signal and is_long_enough and math.isfinite(metrics.snr)


def needs(metrics: BlockMetrics, settings: RiskSettings) -> Needs:
    """Return the normalized signals of a block (App. A)."""
    anchors = settings.anchors
    momentum = _ramp(metrics.direction_stability, anchors.stability)  # Eq. 14
    if has_snr(metrics, settings):
        momentum *= _ramp(math.log1p(metrics.snr), anchors.snr)  # Eq. 16 and 17
    residual = metrics.structure_residual
    if residual is None:  # vectors are never factored; a matrix with too few samples may be anything
        residual = float(metrics.has_matrix)
    return Needs(
        adaptive=_ramp(metrics.anisotropy, anchors.anisotropy),  # Eq. 12
        momentum=momentum,
        decay=math.log1p(metrics.distortion),  # Eq. 18
        structure=min(max(residual, 0.0), 1.0),  # Eq. 19
    )


def precision_risk(alignment: float, epsilon: float = EPSILON) -> float:
    """Return Eq. 10 and 20: -log of the clipped cosine."""
    return -math.log(min(max(alignment, epsilon), 1.0) + epsilon)


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
    return _linear(metrics, configuration, settings, precision_risk(cosine, settings.epsilon))


def update(metrics: BlockMetrics, configuration: Configuration, settings: RiskSettings) -> dict[str, float]:
    """Return Eq. 9 with two repairs.

    Precision is that of the configuration's own update, and dropping decoupled decay is no risk if there is no decay.
    """
    precision = precision_risk(metrics.alignment(configuration), settings.epsilon)
    terms = _linear(metrics, configuration, settings, precision)
    return terms | ({"decay": 0.0} if settings.weight_decay == 0 else {})


def _linear(
    metrics: BlockMetrics, configuration: Configuration, settings: RiskSettings, precision: float
) -> dict[str, float]:
    need, switches = needs(metrics, settings), configuration.switches
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

    steps: int = 60
    has_signal: bool = True
    has_matrix: bool = True
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

    Args:
        name: the name.

    Returns:
        A decorator, which returns the risk model unchanged.

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

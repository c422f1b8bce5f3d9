"""``PaperPlanner``: Algorithm 1 of the paper.

It samples gradients in a warm-up, computes metrics, scores risks and solves the MILP.

The pieces are beside this file: :mod:`sampling` and :mod:`times` (Sec. 3.1), :mod:`metrics` (Sec. 3.3), :mod:`risk`
(App. A and Eq. 9), :mod:`units` and :mod:`refine` (Alg. 2). `docs/equations.md` lists the choices that the paper leaves
open.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from baoc.core.configuration import CATALOG, EXTENDED, Configuration, ConfigurationError, parse
from baoc.core.plan import Plan
from baoc.core.spec import DEFAULT_WEIGHT
from baoc.planners.base import (
    AUTO,
    Budget,
    Progress,
    Session,
    check_choice,
    check_count,
    check_flag,
    check_time,
    is_number,
)
from baoc.planners.effects import parsed_candidates
from baoc.planners.model_facts import ModelFacts
from baoc.planners.paper.coordinates import RATIO
from baoc.planners.paper.metrics import EPSILON, MetricSettings
from baoc.planners.paper.problem import (
    GRANULARITIES,
    PAPER,
    REFINED,
    PaperProblem,
    change_of,
    unit_diagnostics,
    unit_granularity,
)
from baoc.planners.paper.refine import MIN_SHARE
from baoc.planners.paper.risk import (
    DEFAULT_ANCHORS,
    DIAGNOSTICS,
    GAMMA,
    SNR_MODES,
    TERMS,
    Anchors,
    RiskModel,
    find_risk,
    named_weights,
)
from baoc.planners.paper.sampling import BETA_RHO, Sampler
from baoc.planners.paper.statistics import GradientStatistics, StatisticsError
from baoc.planners.paper.times import GPU, MEASURE, Times, UpdateTimes, parsed_times
from baoc.planners.patterns import Patterns, check_patterns
from baoc.planners.weights import LOW_BITS

WARMUP = 50
WITHIN_BUDGET = "budget"
_CHECK_EVERY = 10  # steps


@dataclass(frozen=True, kw_only=True)
class PaperPlanner:
    """Plans as the paper does: from gradients that are sampled in a warm-up.

    Args:
        warmup: steps before the plan is made.
        warmup_base: what the warm-up runs on: a configuration (Alg. 1 has AdamW16), a :class:`~baoc.Plan`, or
            ``"budget"`` for the best plan within the budget that can be made without gradients.
        sample_ratio: s of Sec. 3.1: the share of each unit's coordinates that is sampled.
        sample_floor: sample at least this many coordinates of each unit, or all. The paper has no floor.
        seed: of the choice of coordinates.
        beta_m: decay of the sampled first moment (Eq. 3).
        beta_v: decay of the sampled second moment (Eq. 3).
        beta_rho: decay of the direction stability (Eq. 5).
        bias_correction: divide the EMAs of Eq. 3 and 5 by their mass, as Adam does. The paper does not.
        epsilon: of all formulas.
        stable_within: end the warm-up early once the normalized diagnostics change by less than this in ten steps, on
            average; ``None`` for a warm-up of full length.
        replan_every: plan again after this many steps, from newer gradients; sampling then goes on.
        inherit: migrate optimizer state when such a plan differs from the last one. ``False`` restarts it (App. D).
        time: B_time of Sec. 3.1: the mean over blocks of update-time ratios to AdamW16; ``math.inf`` for no limit.
        times: where these ratios are from: "gpu" (a cost model), "measure" (one-step timings on the parameters'
            device at the end of the warm-up, kept in plan and checkpoint), a file of ``baoc measure``, or a ratio by
            configuration, ``{"adamw-8": 0.9, ...}``.
        candidates: configurations to choose from; by default the paper's 21.
        granularity: how blocks are cut: "refined" (Alg. 2), or by structure: "tensor", "module", "layer", "coarse".
        min_share: alpha of Alg. 2.
        tau: tau of Alg. 2, a number in [0, 1]; by default a quantile.
        quantile: tau is this quantile of all differences between units.
        diagnostic_weights: w_k of Alg. 2, by diagnostic: "adaptive", "momentum", "decay", "structure", "precision"; 1
            where not given.
        risk: "paper" (Eq. 9), "update" (Eq. 9 with repairs), one that ``register_risk`` knows, or a function.
        anchors: of the need signals (App. A).
        snr: whether the need for momentum is s_rho * s_snr ("always"), s_rho ("never"), or s_rho only where the SNR is
            missing or fewer than 1 / (1 - beta_m) steps were seen ("auto").
        weights: W of Alg. 1, by risk term: the diagnostics and "aggressive"; 1 where not given.
        gamma: weight of Agg in Eq. 2.
        forbid: hard constraints: configurations that must not be used, "sgd*" or by a pattern, {"head.*": "sgd*"}.
        prefer: soft constraints, likewise.
        preference: lambda_pref of Sec. 3.2.
        lr_match: multiply the learning rate of each block so that its updates are as long as AdamW's. The paper does
            not; without it SGD blocks hardly move at AdamW's learning rate.
        low_bits: format of the low bits of 16-bit parameters, as in :class:`~baoc.EffectPlanner`. The paper has none:
            with "auto" a plan has 8 bits where they leave every block its update rule, else "sr".

    Raises:
        ValueError: if a setting is invalid. The message names it.
        ConfigurationError: if a candidate is no configuration.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from baoc import BAOC
        >>> model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        >>> optimizer = BAOC(model, lr=1e-3, memory=0.8, planner=PaperPlanner(warmup=3), verbose=False)
        >>> for _ in range(4):
        ...     model(torch.randn(8, 64)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.plan.state_bytes <= 0.8 * optimizer.plan.reference_bytes
        True
    """

    warmup: int = WARMUP
    warmup_base: Plan | Configuration | str = "adamw-16"
    sample_ratio: float = RATIO
    sample_floor: int = 0
    seed: int = 0
    beta_m: float = 0.9
    beta_v: float = 0.999
    beta_rho: float = BETA_RHO
    bias_correction: bool = False
    epsilon: float = EPSILON
    stable_within: float | None = None
    replan_every: int | None = None
    inherit: bool = True
    time: float = 1.3
    times: Times = GPU
    candidates: Sequence[Configuration | str] = PAPER
    granularity: str = REFINED
    min_share: float = MIN_SHARE
    tau: float | None = None
    quantile: float = 0.75
    diagnostic_weights: Mapping[str, float] = field(default_factory=dict)
    risk: str | RiskModel = "paper"
    anchors: Anchors = DEFAULT_ANCHORS
    snr: str = "auto"
    weights: Mapping[str, float] = field(default_factory=dict)
    gamma: float = GAMMA
    forbid: Patterns = ()
    prefer: Patterns = ()
    preference: float = 0.5
    lr_match: bool = False
    low_bits: str = AUTO

    def __post_init__(self) -> None:
        check_count("warmup", self.warmup, 1)
        check_count("seed", self.seed, 0)
        check_count("sample_floor", self.sample_floor, 0)
        if self.replan_every is not None:
            check_count("replan_every", self.replan_every, 1)
        check_time(self.time)
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_choice("snr", self.snr, SNR_MODES)
        check_choice("low_bits", self.low_bits, LOW_BITS)
        for name in ("lr_match", "inherit", "bias_correction"):
            check_flag(name, getattr(self, name))
        _check_number("sample_ratio", self.sample_ratio, above=0.0, at_most=1.0)
        _check_number("quantile", self.quantile, at_most=1.0)
        _check_number("epsilon", self.epsilon, above=0.0)
        for name in ("beta_m", "beta_v", "beta_rho"):
            _check_number(name, getattr(self, name), below=1.0)
        _check_number("min_share", self.min_share, at_most=1.0)
        for name in ("gamma", "preference"):
            _check_number(name, getattr(self, name))
        if self.tau is not None:
            _check_number("tau", self.tau, at_most=1.0)
        if self.stable_within is not None:
            _check_number("stable_within", self.stable_within, above=0.0)
        find_risk(self.risk)
        parsed: dict[str, Any] = {
            "candidates": _parsed_candidates(self.candidates),
            "anchors": _parsed_anchors(self.anchors),
            "weights": named_weights("weights", self.weights, TERMS),
            "diagnostic_weights": named_weights("diagnostic_weights", self.diagnostic_weights, DIAGNOSTICS),
        }
        # a configuration that is no candidate may be forbidden all the same
        check_patterns("forbid", self.forbid, (*parsed["candidates"], *CATALOG, *EXTENDED))
        check_patterns("prefer", self.prefer, parsed["candidates"])
        parsed["times"] = parsed_times(self.times, parsed["candidates"])
        if not isinstance(self.warmup_base, Plan) and self.warmup_base != WITHIN_BUDGET:
            try:
                parsed["warmup_base"] = parse(self.warmup_base)
            except ConfigurationError as error:
                raise ConfigurationError(
                    f"warmup_base must be a configuration, a baoc.Plan or {WITHIN_BUDGET!r}: {error}"
                ) from error
        for name, value in parsed.items():
            object.__setattr__(self, name, value)

    counts_tokens: ClassVar[bool] = False
    reads_gradients: ClassVar[bool] = True

    def initial_plan(self, model: ModelFacts, budget: Budget) -> Plan:
        """Return what the warm-up runs on.

        Args:
            model: what is known about the model.
            budget: what the plan may hold.

        Raises:
            PlanError: no plan of this planner fits the budget.
        """
        # made in any case: a budget that no plan fits is refused here, not after the warm-up
        # samples count only where the warm-up is to stay within the budget
        is_base = self.warmup_base == WITHIN_BUDGET
        own = budget if is_base else dataclasses.replace(budget, reserved=budget.reserved - budget.planner_bytes)
        within_budget = self.problem(model, per_rank=budget.is_per_rank).plan(own)
        if is_base:
            return within_budget
        base = self.warmup_base
        if not isinstance(base, Plan):
            base = Plan.uniform(base, model.shapes, {name: model.role(name) for name in model.shapes})
        return base.with_low_bits(model.low_precision, DEFAULT_WEIGHT if self.low_bits == AUTO else self.low_bits)

    def plan(self, statistics: GradientStatistics, model: ModelFacts, budget: Budget) -> Plan:
        """Return the plan for gradient statistics within a budget (Alg. 1, allocation).

        Args:
            statistics: of the warm-up.
            model: facts about the model.
            budget: for its state.

        Raises:
            PlanError: no plan fits the budget, or ``times`` is ``"measure"``: a planner does not measure by itself.
        """
        return self.problem(model, statistics, per_rank=budget.is_per_rank).plan(budget)

    def problem(
        self,
        model: ModelFacts,
        statistics: GradientStatistics | None = None,
        *,
        per_rank: bool = False,
    ) -> PaperProblem:
        """Return what does not depend on the budget, to plan for several of them.

        Args:
            model: facts about the model.
            statistics: of its gradients; without them all blocks have the metrics of a typical one.
            per_rank: count the bytes of the rank that holds most of sharded parameters, not of all ranks.
        """
        return PaperProblem(self, model, statistics, per_rank=per_rank)

    @property
    def metric_settings(self) -> MetricSettings:
        """How metrics are computed from samples."""
        return MetricSettings(self.beta_rho, self.bias_correction, self.epsilon)

    def start(self, params: Mapping[str, Tensor], model: ModelFacts) -> PaperSession:
        """Begin a run: draw the coordinates to sample.

        Args:
            params: the parameters to plan, by name.
            model: what is known about the model.

        Returns:
            The session of the run.
        """
        return PaperSession(self, params, model)


class PaperSession:
    """The warm-up of one run: its samples, and whether it has seen enough."""

    def __init__(self, planner: PaperPlanner, params: Mapping[str, Tensor], model: ModelFacts) -> None:
        self._planner = planner
        self._sampler: Sampler | None = Sampler(
            params,
            ratio=planner.sample_ratio,
            floor=planner.sample_floor,
            seed=planner.seed,
            betas=(planner.beta_m, planner.beta_v),
            beta_rho=planner.beta_rho,
            granularity=unit_granularity(planner.granularity),
        )
        self._times: UpdateTimes | None = None  # those of the first rank, since the first plan
        self._is_renamed = False
        self._diagnostics: list[list[float]] | None = None  # (units, 5), when they were last looked at
        self.statistics: GradientStatistics | None = None
        """Those that the last plan was made from."""

    @property
    def nbytes(self) -> int:
        return 0 if self._sampler is None else self._sampler.nbytes

    @property
    def is_watching(self) -> bool:
        return self._sampler is not None

    @property
    def needs_times(self) -> bool:
        """Whether :meth:`plan` must be given measured times: the planner asks for them, and there are none yet."""
        return self._planner.times == MEASURE and self._times is None

    def is_of(self, params: Mapping[str, Tensor]) -> bool:
        """Return whether its samples, if it has any, are of these parameters."""
        return self._sampler is None or (not self._is_renamed and self._sampler.names == tuple(params))

    def forget_names(self) -> None:
        """Note that parameters have other names now: samples are not theirs any more."""
        self._is_renamed = True

    def observe(self, params: Mapping[str, Tensor]) -> None:
        if self._sampler is not None:
            self._sampler.observe({name: params[name] for name in self._sampler.names if name in params})

    def is_due(self, progress: Progress, params: Mapping[str, Tensor], model: ModelFacts) -> bool:
        if progress.planned_at is None:
            return progress.steps >= self._planner.warmup or self._is_stable(progress.steps, params, model)
        interval = self._planner.replan_every or (self._planner.warmup if progress.failed else None)
        return interval is not None and progress.since_plan >= interval

    def plan(
        self,
        params: Mapping[str, Tensor],
        model: ModelFacts,
        budget: Budget,
        statistics: GradientStatistics | None = None,
        times: UpdateTimes | None = None,
    ) -> Plan:
        statistics = statistics or self.current_statistics(params, model)
        times = self._times or times
        planner = self._planner if times is None else dataclasses.replace(self._planner, times=times)
        return planner.plan(statistics, model, budget)

    def current_statistics(self, params: Mapping[str, Tensor], model: ModelFacts) -> GradientStatistics:
        """Return what the samples say now, or said when the last plan was made. All ranks must call it.

        Raises:
            StatisticsError: nothing was sampled.
        """
        if self._sampler is not None and self._sampler.steps:
            mine = {name: params[name] for name in self._sampler.names if name in params}
            self.statistics = GradientStatistics.from_sampler(self._sampler, mine, model)
        if self.statistics is None:
            raise StatisticsError(
                "there are no gradient statistics: no step with finite gradients was sampled in this process. Pass "
                "statistics=, or set replan_every so that sampling goes on after the warm-up."
            )
        return self.statistics

    def take_over(self, other: Session) -> None:
        """Go on with the samples of another session."""
        if isinstance(other, PaperSession):
            self._sampler, self.statistics = other._sampler, other.statistics
            if self._planner.candidates == other._planner.candidates:
                self._times = other._times

    def planned(self, plan: Plan) -> None:
        """Keep the times of the plan, and drop the samples once nothing needs them: they take device memory."""
        if self._planner.times == MEASURE and isinstance(plan.settings.get("times"), Mapping):
            self._times = UpdateTimes(**plan.settings["times"])
        if self._planner.replan_every is None:
            self._sampler = None

    def state_dict(self) -> dict[str, Any]:
        sampler = None if self._sampler is None else self._sampler.state_dict()
        times = None if self._times is None else dataclasses.asdict(self._times)
        return {"sampler": sampler, "diagnostics": self._diagnostics, "times": times}

    def load_state_dict(self, state: Mapping[str, Any], params: Mapping[str, Tensor]) -> None:
        self._diagnostics = state["diagnostics"]
        self._times = None if state["times"] is None else UpdateTimes(**state["times"])
        if state["sampler"] is not None:
            self._sampler = None  # frees its memory
            self._sampler = Sampler.from_state_dict(state["sampler"], params)
        elif self._planner.replan_every is None:  # else sampling goes on, from the beginning
            self._sampler = None

    def _is_stable(self, steps: int, params: Mapping[str, Tensor], model: ModelFacts) -> bool:
        limit = self._planner.stable_within
        if limit is None or steps % _CHECK_EVERY or self._sampler is None or not self._sampler.steps:
            return False
        statistics = self.current_statistics(params, model)
        now = unit_diagnostics(statistics, model, self._planner)
        change = change_of(now, self._diagnostics, statistics)
        self._diagnostics = now.tolist()
        return change < limit


def _parsed_candidates(candidates: object) -> tuple[Configuration, ...]:
    if not isinstance(candidates, (str, Configuration, Iterable)):
        raise ValueError(f"candidates must be a list of configurations such as ['adamw-8', 'sgd'], got {candidates!r}.")
    try:
        return parsed_candidates(candidates if isinstance(candidates, (str, Configuration)) else tuple(candidates))
    except ConfigurationError as error:
        raise ConfigurationError(f"candidates must be configurations: {error}") from error


def _parsed_anchors(anchors: object) -> Anchors:
    if isinstance(anchors, Mapping):  # as a checkpoint has them
        unknown = [name for name in anchors if name not in {field.name for field in dataclasses.fields(Anchors)}]
        if unknown:
            raise ValueError(f"anchors names {unknown[0]!r}, which is not one of anisotropy, stability, snr.")
        return Anchors(**anchors)
    if not isinstance(anchors, Anchors):
        raise ValueError(
            "anchors must be baoc.planners.paper.risk.Anchors or a mapping such as {'anisotropy': (0.7, 2.3)}, got "
            f"{anchors!r}."
        )
    return anchors


def _check_number(
    name: str, value: object, *, above: float | None = None, at_most: float = math.inf, below: float = math.inf
) -> None:
    least = "above 0" if above is not None else "of at least 0"
    is_above = is_number(value) and (value > above if above is not None else value >= 0)  # type: ignore[operator]
    if not is_above or not (value <= at_most and value < below):  # type: ignore[operator]
        most = f" and at most {at_most:g}" if math.isfinite(at_most) else ""
        most = f" and below {below:g}" if math.isfinite(below) else most
        raise ValueError(f"{name} must be a number {least}{most}, got {value!r}.")

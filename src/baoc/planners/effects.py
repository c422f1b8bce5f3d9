"""``EffectPlanner``, the default: the plan with the least predicted loss, by measured effects of configurations.

It reads no gradients, so the plan is there when the optimizer is built: no samples, no warm-up, no migration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from baoc.core.configuration import Configuration, parse
from baoc.core.plan import Plan
from baoc.planners import patterns
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
from baoc.planners.effect_table import EffectTable
from baoc.planners.model_facts import REGIMES, ModelFacts
from baoc.planners.patterns import Patterns
from baoc.planners.weights import LOW_BITS

if TYPE_CHECKING:
    from baoc.planners.paper.statistics import GradientStatistics

from baoc.planners.effect_problem import EffectProblem


@dataclass(frozen=True, kw_only=True)
class EffectPlanner:
    """Plans by the effect table: the measured change of the loss by role, configuration and regime.

    Differences below ``tolerance`` are ties. Ties go to fewer bytes, then to fewer distinct configurations per role,
    then to contiguous layers, so a plan may hold less than its budget.

    Args:
        time: how long a training step may become, relative to one with AdamW16; ``math.inf`` for no limit. It is
            estimated from the bytes and operations of a step, never measured.
        regime: "scratch", "finetune", "general" (a model without normalization layers), or "auto" to read it off the
            model.
        table: a file with effects that ``baoc calibrate`` wrote; by default the table that ships.
        tolerance: percent of the loss below which two plans are a tie. The default is the standard error of
            ``adamw-8`` against ``adamw-32``, which differ by less than any run can tell. From scratch it shrinks with
            size and length as the effects of formats do.
        tokens: that a step trains on; by default they are counted in the forward passes before the first step.
        steps: of the whole training, which with ``tokens`` say how long it is; by default it trains on 20 tokens per
            parameter. Effects shrink with size and length, see `docs/results/scaling.md`.
        candidates: configurations to choose from; by default those of the table.
        forbid: configurations that must not be used: "sgd*", or by a pattern on parameters, {"head.*": "muon*"}.
        prefer: configurations to prefer, likewise.
        preference: percent of the loss that a preference is worth for a whole role.
        lr_multipliers: whether embeddings, heads over a vocabulary and vectors get a higher learning rate from scratch.
            Off in any case where param groups have learning rates of their own.
        low_bits: format of the low bits of 16-bit parameters, slot ``w``: "16", "8", "sr" (stochastic rounding), "none"
            (rounding to nearest loses small updates), or "auto": "8" where the budget allows it, else "sr".
        replan_every: plan again after this many steps.

    Raises:
        ValueError: if a setting is invalid. The message names it.

    Example:
        >>> from torch import nn
        >>> facts = ModelFacts.of(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.Linear(128, 64)))
        >>> plan = EffectPlanner(tokens=65536).initial_plan(facts, Budget(0.5))
        >>> plan.state_bytes <= 0.5 * plan.reference_bytes
        True
    """

    time: float = 1.1
    regime: str = AUTO
    table: str | None = None
    tolerance: float = 0.2
    tokens: int | None = None
    steps: int | None = None
    candidates: Sequence[Configuration | str] | None = None
    forbid: Patterns = ()
    prefer: Patterns = ()
    preference: float = 0.5
    lr_multipliers: bool = True
    low_bits: str = AUTO
    replan_every: int | None = None

    reads_gradients: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_time(self.time)
        check_choice("regime", self.regime, (AUTO, *REGIMES))
        check_choice("low_bits", self.low_bits, LOW_BITS)
        for name in ("tolerance", "preference"):
            value = getattr(self, name)
            if not is_number(value) or value < 0:
                raise ValueError(f"{name} must be a non-negative number (percent of the loss), got {value!r}.")
        for name in ("tokens", "steps", "replan_every"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1)
        for name in ("forbid", "prefer"):
            patterns.check_patterns(name, getattr(self, name))
        check_flag("lr_multipliers", self.lr_multipliers)
        if self.candidates is not None:
            object.__setattr__(self, "candidates", parsed_candidates(self.candidates))
        EffectTable.load(self.table)

    def initial_plan(self, model: ModelFacts, budget: Budget) -> Plan:
        """Return the plan for a model within a budget.

        Args:
            model: what is known about the model.
            budget: what the plan may hold.

        Raises:
            PlanError: no plan fits; the message has the smallest budget that one fits.
        """
        return self.problem(model, per_rank=budget.is_per_rank).plan(budget)

    @property
    def counts_tokens(self) -> bool:
        """Whether the plan depends on tokens that are still to be counted."""
        return self.tokens is None

    def start(self, params: Mapping[str, Tensor], model: ModelFacts) -> EffectSession:
        """Begin a run. There is nothing to learn in it.

        Args:
            params: the parameters to plan, by name.
            model: what is known about the model.

        Returns:
            A session that never plans again, unless tokens were not counted before.
        """
        return EffectSession(self)

    def problem(
        self, model: ModelFacts, statistics: GradientStatistics | None = None, *, per_rank: bool = False
    ) -> EffectProblem:
        """Return what does not depend on the budget, to plan for several of them.

        Args:
            model: facts about the model.
            statistics: not used: effects do not depend on gradients.
            per_rank: count the bytes of the rank that holds most of sharded parameters, not of all ranks.
        """
        return EffectProblem(self, model, per_rank)


@dataclass(frozen=True)
class EffectSession:
    """A run of an :class:`EffectPlanner`, which reads no gradients."""

    planner: EffectPlanner
    nbytes: int = 0

    @property
    def is_watching(self) -> bool:
        return self.planner.replan_every is not None

    def observe(self, params: Mapping[str, Tensor]) -> None:
        pass

    def is_due(self, progress: Progress, params: Mapping[str, Tensor], model: ModelFacts) -> bool:
        every = self.planner.replan_every
        return every is not None and progress.since_plan >= every

    def plan(
        self, params: Mapping[str, Tensor], model: ModelFacts, budget: Budget, statistics: object | None = None
    ) -> Plan:
        if statistics is not None:
            raise ValueError("EffectPlanner reads no gradients, so statistics= would do nothing. Leave it out.")
        return self.planner.initial_plan(model, budget)

    def take_over(self, other: Session) -> None:
        pass

    def planned(self, plan: Plan) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any], params: Mapping[str, Tensor]) -> None:
        pass


def parsed_candidates(candidates: Sequence[Configuration | str] | Configuration | str) -> tuple[Configuration, ...]:
    """Read configurations to choose from."""
    given = (candidates,) if isinstance(candidates, (str, Configuration)) else tuple(candidates)
    if not given:
        raise ValueError("candidates must name at least one configuration.")
    return tuple(map(parse, given))

"""The protocol between the optimizer and what plans for it, and the budget that both speak of."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from baoc.core.budget import is_per_rank, memory_budget
from baoc.core.configuration import Configuration
from baoc.core.plan import Plan, PlanError
from baoc.planners.model_facts import ModelFacts

AUTO = "auto"
"""As a memory budget: no ceiling. The plan is the smallest that is predicted to be as good as any."""

Memory = float | int | str
_MOST = 1 << 62  # fits into the integers of torch and numpy


@dataclass(frozen=True)
class Budget:
    """How many bytes of optimizer state a plan may hold. A ceiling, not a target.

    Args:
        memory: a share of AdamW16's state (0.5 or "50%"), bytes (an int), a size ("1.5GiB"), what the rank with the
            most may hold ("2GiB/rank"), 0.0 for the smallest plan there is, or "auto" for no ceiling.
        host_memory: likewise, for state in host memory; ``memory`` is then for what the device holds.
        reserved: bytes of ``memory`` that something else needs, such as parameters that are not planned.
        planner_bytes: how many of these the planner itself needs for now.

    Raises:
        PlanError: if a budget cannot be read, or the two contradict each other.

    Example:
        >>> Budget(0.5).device_bytes(1000), Budget("auto").device_bytes(1000)
        (500, None)
    """

    memory: Memory = AUTO
    host_memory: Memory | None = None
    reserved: int = 0
    planner_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("memory", "host_memory"):
            if isinstance(value := getattr(self, name), np.generic):
                object.__setattr__(self, name, value.item())  # checkpoints hold plain numbers
        if self.memory != AUTO:
            memory_budget(self.memory, 1)
        if self.host_memory is None:
            return
        memory_budget(self.host_memory, 1, "host_memory")
        if self.memory == AUTO:
            raise PlanError(
                f"memory='auto' sets no limit for the device, so host_memory={self.host_memory!r} would stay unused. "
                "Give memory= a size or a share, or leave host_memory= out."
            )
        if is_per_rank(self.memory) != is_per_rank(self.host_memory):
            raise PlanError(
                f"memory={self.memory!r} and host_memory={self.host_memory!r}: one is for each rank, the other for all "
                "of them. Write '/rank' after both, or after neither."
            )

    @property
    def is_per_rank(self) -> bool:
        """Whether it is what each rank may hold, rather than all of them together."""
        return is_per_rank(self.memory)

    def device_bytes(self, reference_bytes: int) -> int | None:
        """Bytes that a plan may hold on the device; ``None``: no ceiling.

        Args:
            reference_bytes: AdamW16's state, which shares refer to.

        Returns:
            The bytes.
        """
        return None if self.memory == AUTO else memory_budget(self.memory, reference_bytes) - self.reserved

    def host_bytes(self, reference_bytes: int) -> int:
        """Bytes that a plan may hold in host memory.

        Args:
            reference_bytes: AdamW16's state, which shares refer to.

        Returns:
            The bytes; 0 without a budget for host memory.
        """
        return 0 if self.host_memory is None else memory_budget(self.host_memory, reference_bytes, "host_memory")


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    steps: int = 0
    """Steps that were made."""
    planned_at: int | None = None
    """The step at which the last plan was made or tried; ``None`` until the first one after the initial plan."""
    failed: bool = False
    """Whether the last plan could not be made, so that it must be tried again."""

    @property
    def since_plan(self) -> int:
        return self.steps - (self.planned_at or 0)


class Session(Protocol):
    """What a planner does and learns during one run.

    Example:
        >>> import torch
        >>> from baoc import EffectPlanner
        >>> params = {"weight": torch.nn.Parameter(torch.ones(64, 64))}
        >>> session = EffectPlanner().start(params, ModelFacts.of(params))
        >>> session.nbytes, session.is_watching
        (0, False)
    """

    @property
    def nbytes(self) -> int:
        """Bytes that it holds on the parameters' device now."""

    @property
    def is_watching(self) -> bool:
        """Whether it must see every step. If not, :meth:`observe` and :meth:`is_due` are not called."""

    def observe(self, params: Mapping[str, Tensor]) -> None:
        """Read the gradients of a step that was made. All ranks call it.

        Args:
            params: the parameters with their gradients, by name.
        """

    def is_due(self, progress: Progress, params: Mapping[str, Tensor], model: ModelFacts) -> bool:
        """Whether to plan now. All ranks call it.

        Args:
            progress: how far the run is.
            params: the parameters to plan, by name.
            model: what is known about the model.
        """

    def plan(
        self, params: Mapping[str, Tensor], model: ModelFacts, budget: Budget, statistics: Any | None = None
    ) -> Plan:
        """Return the plan for what was learned so far, or for gradient statistics from elsewhere.

        Args:
            params: the parameters to plan, by name.
            model: what is known about the model.
            budget: what the plan may hold.
            statistics: gradient statistics to use instead of what was learned.

        Raises:
            PlanError: no plan fits.
            StatisticsError: there is not enough to plan from.
        """

    def take_over(self, other: Session) -> None:
        """Go on with what another session has learned, if it is of the same kind.

        Args:
            other: the session of the planner that was used until now.
        """

    def planned(self, plan: Plan) -> None:
        """Take note of the plan that all ranks have now, and forget what only making it needed.

        Args:
            plan: the plan.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return its part of a checkpoint: nested dicts and lists of plain values and tensors.

        Parameters go by their position in ``params``: their names may differ in the run that loads it.
        """

    def load_state_dict(self, state: Mapping[str, Any], params: Mapping[str, Tensor]) -> None:
        """Go on from another session's ``state_dict``, in which tensors may be ``None``: then they are made anew.

        Args:
            state: what ``state_dict`` of the other session returned.
            params: the parameters to plan, by name.
        """


class Planner(Protocol):
    """Turns a model and a budget into a plan.

    A planner is settings only: a frozen dataclass, so one object can serve several optimizers. What one run learns is
    in its :class:`Session`. Both are pure functions of what they are given: every rank comes to the same plan.

    Example:
        >>> from baoc import EffectPlanner
        >>> planner: Planner = EffectPlanner(tolerance=0.1)
        >>> planner.reads_gradients
        False
    """

    @property
    def reads_gradients(self) -> bool:
        """Whether plans depend on gradients. If not, ranks that agree on the model need not agree on each plan."""

    @property
    def counts_tokens(self) -> bool:
        """Whether the initial plan changes with the tokens of a step, which are counted until the first one."""

    def initial_plan(self, model: ModelFacts, budget: Budget) -> Plan:
        """Return the plan that training starts with, before any gradient.

        Args:
            model: what is known about the model.
            budget: what the plan may hold.

        Raises:
            PlanError: no plan fits the budget; the message has the smallest budget that one fits.
        """

    def start(self, params: Mapping[str, Tensor], model: ModelFacts) -> Session:
        """Begin a run over named parameters.

        Args:
            params: the parameters to plan, by name.
            model: what is known about the model.

        Returns:
            What the run learns and plans with.
        """


def check_planner(planner: Planner) -> Planner:
    """Return a planner, or raise if it is something else."""
    is_planner = dataclasses.is_dataclass(planner) and hasattr(planner, "initial_plan") and hasattr(planner, "start")
    if isinstance(planner, type) or not is_planner:
        raise TypeError(
            "planner must be an object such as baoc.EffectPlanner() or baoc.PaperPlanner(), or a frozen dataclass with "
            f"the methods of baoc.planners.base.Planner; got {planner!r}."
        )
    return planner


def check_time(time: object) -> None:
    """Raise unless a time budget is a positive ratio; ``math.inf`` lifts it."""
    if not (is_number(time) or time == math.inf) or not time > 0:  # type: ignore[operator]
        raise PlanError(
            f"time must be a positive ratio to AdamW16's time, such as 1.3, or math.inf for no limit; got {time!r}."
        )


def is_number(value: object) -> bool:
    """Return whether a setting is a finite number that a float can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raise unless a setting has one of its values."""
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}. Choose one of {', '.join(known)}.")


def check_count(name: str, value: object, least: int) -> None:
    """Raise unless a setting is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")
    if value > _MOST:
        raise ValueError(f"{name} must be at most 2**62, got a number of {value.bit_length()} bits.")


def check_flag(name: str, value: object) -> None:
    """Raise unless a setting is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}.")


def plain_settings(planner: Any) -> dict[str, Any]:
    """Return a planner's settings as JSON values, with its class under ``"planner"``."""
    values = {field.name: getattr(planner, field.name) for field in dataclasses.fields(planner)}
    plain: dict[str, Any] = json.loads(json.dumps({"planner": type(planner).__name__, **values}, default=_plain))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Configuration):
        return str(value)
    if isinstance(value, Plan):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return getattr(value, "__qualname__", repr(value))

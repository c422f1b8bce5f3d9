"""``BAOC``: the optimizer that configures itself (Alg. 1): it warms up, plans, moves its state over and goes on."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch  # noqa: F401 - the docstring example needs it
from numpy.typing import NDArray
from torch import Tensor, nn

from baoc.core.configuration import Configuration
from baoc.core.mechanisms import known_settings
from baoc.core.plan import Block, Plan, PlanError, memory_budget
from baoc.core.spec import DEFAULT_BETAS, Hyper
from baoc.core.text import human_bytes
from baoc.optim import groups
from baoc.optim.groups import Member
from baoc.optim.optimizer import BlockOptimizer
from baoc.optim.timing import StepRunner
from baoc.planning import partition
from baoc.planning.cost import TimeModel
from baoc.planning.planner import DEFAULT_MEMORY, DEFAULT_TIME, Planner, Settings, unit_vectors
from baoc.profiling.coordinates import RATIO
from baoc.profiling.profile import Profile
from baoc.profiling.sampling import Sampler

logger = logging.getLogger("baoc")

WARMUP = 50
SAMPLER = "baoc.sampler"
"""Where the sampler's tensors live in ``state`` while it samples, so that they are counted like everything else."""
_REPORT_EVERY = 10


class BAOC(BlockOptimizer):
    """An optimizer within a budget. The training loop does not change.

    Args:
        params: a module, ``model.parameters()``, ``model.named_parameters()``, or param groups. A module or names give
            the structural scan its boundaries; bare parameters are one unit per tensor.
        lr, betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``.
        memory: the budget for state: a share of AdamW16's (0.5 or "50%"), bytes (an int), or a size ("1.5GiB"). It
            holds from the first step on, the sampler included.
        time: the budget for the mean update-time ratio to AdamW16.
        warmup: steps of sampling before the plan is made.
        warmup_base: what the warm-up runs on; by default the plan that fits the budget if nothing is known of the
            gradients. The paper's is "adamw-16", which breaks a budget below 1.
        sample_ratio, seed: which share of each tensor is followed, and which coordinates.
        settle: end the warm-up early once the normalised diagnostics change by less than this in ten steps, on average.
        replan_every: make a new plan every so many steps; sampling then goes on.
        kernel: as in :class:`BlockOptimizer`.
        settings: those of :class:`~baoc.planning.planner.Settings`, such as ``forbid``, ``prefer``, ``risk`` or
            ``granularity``, and those that belong to mechanisms, as in :class:`BlockOptimizer`.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        >>> optimizer = BAOC(model, lr=1e-3, memory=0.8, warmup=3)
        >>> for _ in range(4):
        ...     model(torch.randn(8, 64)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.plan.state_bytes <= 0.8 * optimizer.plan.reference_bytes
        True
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = DEFAULT_BETAS,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        memory: float | int | str = DEFAULT_MEMORY,
        time: float = DEFAULT_TIME,
        warmup: int = WARMUP,
        warmup_base: Plan | Configuration | str | None = None,
        sample_ratio: float = RATIO,
        seed: int = 0,
        settle: float | None = None,
        replan_every: int | None = None,
        maximize: bool = False,
        kernel: str = "auto",
        **settings: Any,
    ) -> None:
        if warmup < 1:
            raise ValueError(f"warmup is {warmup} steps; at least one gradient must be seen before planning.")
        if replan_every is not None and replan_every < 1:
            raise ValueError(f"replan_every is {replan_every}; it must be at least 1, or None for one plan only.")
        own = {name: settings.pop(name) for name in known_settings() if name in settings}
        chosen = Settings.of("BAOC", settings)
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, kernel=kernel, **own)
        self._memory, self._time, self._warmup, self._replan_every = memory, time, warmup, replan_every
        self._settings = chosen
        self._settle = settle
        self._last_diagnostics: NDArray[np.float64] | None = None
        self._times: TimeModel | None = None
        self.profile: Profile | None = None
        """What the last warm-up learned; it saves to one file and answers any budget."""
        self._names = [member.name for member in self.members()]  # parameters that join later are not planned
        self._sampler: Sampler | None = Sampler(self._params(), ratio=sample_ratio, seed=seed, betas=betas)
        base = self._best_plan(None, memory, time, self._settings) if warmup_base is None else warmup_base
        self._adopt(base, inherit=False)
        logger.info(
            "warming up for %d steps on %s of state, with %s of samples",
            warmup,
            human_bytes(self.plan.state_bytes),
            human_bytes(self._sampler.nbytes),
        )

    def replan(
        self,
        memory: float | int | str | None = None,
        time: float | None = None,
        *,
        profile: Profile | None = None,
        inherit: bool = True,
        **settings: Any,
    ) -> Plan:
        """Make and adopt a new plan now: another budget, other settings, or newer gradients.

        What is not given stays as it was. State is inherited; ``inherit=False`` restarts it.
        """
        profile = profile or self._newest_profile()
        if profile is None:
            raise RuntimeError(
                "there is no profile to plan from: no gradient was sampled in this process. Pass profile=, or set "
                "replan_every so that sampling goes on."
            )
        memory = self._memory if memory is None else memory
        time = self._time if time is None else time
        changed = self._settings.changed("replan", settings)
        plan = self._best_plan(profile, memory, time, changed)
        self._memory, self._time, self._settings, self.profile = memory, time, changed, profile
        self._adopt(plan, inherit=inherit)
        logger.info("planned %d blocks with %s of state", len(plan.blocks), human_bytes(plan.state_bytes))
        return plan

    def _adopt(self, plan: Plan | Configuration | str, *, inherit: bool) -> None:
        if isinstance(plan, Plan):
            plan = dataclasses.replace(plan, blocks=(*plan.blocks, *self._later_blocks()))
        self.set_plan(plan, inherit=inherit)
        self._plan_given = False  # a checkpoint's plan knows more than this process, and is taken over

    # ---- the warm-up ----

    def _before_update(self, stepping: Sequence[Member]) -> None:
        if self._sampler is None:
            return
        if not self._sampler.observe(self._params()):
            logger.warning("skipped the samples of a step with non-finite gradients (%d so far)", self._sampler.skipped)
        elif self._sampler.steps <= self._warmup and self._sampler.steps % _REPORT_EVERY == 0:
            logger.info("warm-up: step %d of %d", self._sampler.steps, self._warmup)
        self.state[SAMPLER] = self._sampler.state_dict()  # type: ignore[index]

    def _after_update(self) -> None:
        if self._sampler is None:
            return
        if self._sampler.steps < self._warmup and self._has_settled():
            logger.info("the diagnostics have settled after %d steps", self._sampler.steps)
            self._warmup = self._sampler.steps
        if not self._is_due(self._sampler.steps - self._warmup):
            return
        profile = self._newest_profile()
        if self._replan_every is None:  # make room before state moves
            self._sampler = None
            del self.state[SAMPLER]  # type: ignore[arg-type]
        self.replan(profile=profile)

    def _has_settled(self) -> bool:
        profile = self._newest_profile() if self._settle is not None else None
        if profile is None or profile.steps % _REPORT_EVERY:
            return False
        units = partition.structural_units(profile.shapes)
        hyper = self._hyper()
        last, now = self._last_diagnostics, unit_vectors(units, profile, hyper, self._settings.anchors)
        self._last_diagnostics = now
        if last is None:
            return False
        weights = np.array([[float(unit.numel)] for unit in units]) * np.isfinite(now - last)
        change = np.nansum(weights * np.abs(now - last)) / max(1.0, weights.sum())
        return bool(change < cast(float, self._settle))

    def _is_due(self, steps_since_warmup: int) -> bool:
        if steps_since_warmup <= 0 or self._replan_every is None:
            return steps_since_warmup == 0
        return steps_since_warmup % self._replan_every == 0

    def _newest_profile(self) -> Profile | None:
        if self._sampler is not None and self._sampler.steps:
            return Profile.from_sampler(self._sampler, self._params())
        return self.profile

    def _best_plan(self, profile: Profile | None, memory: float | int | str, time: float, settings: Settings) -> Plan:
        """The plan of least risk in the budget less what the samples and parameters that joined later hold."""
        if self._times is None:
            self._times = TimeModel(StepRunner(self.members()[0].param.device, self._kernel_request))
        hyper = self._hyper()
        shapes = {name: shape for name, shape in self._shapes().items() if name in set(self._names)}
        samples = self._sampler.nbytes if self._sampler else 0
        later = sum(block.state_bytes for block in self._later_blocks())
        room = memory_budget(memory, self.plan.reference_bytes) - samples - later
        try:
            return Planner(shapes, profile, hyper, self._times, settings).plan(room, time)
        except PlanError as error:
            used = f" Of memory={memory!r}, {human_bytes(samples)} are for samples." if samples else ""
            hint = (
                f" An int is read as bytes: write {memory}.0 for a share."
                if isinstance(memory, int) and memory in (1, 2)
                else ""
            )
            raise PlanError(f"{error}{used}{hint}") from error

    def _hyper(self) -> Hyper:
        """The first group's settings, with the largest decay: what decay risks counts if any group has some."""
        hypers = [groups.hyper(group, f"param group {index}") for index, group in enumerate(self.param_groups)]
        return dataclasses.replace(hypers[0], weight_decay=max(hyper.weight_decay for hyper in hypers))

    def _later_blocks(self) -> list[Block]:
        return [block for block in self.plan.blocks if not block.parameters.keys() & set(self._names)]

    def _params(self) -> dict[str, Tensor]:
        return {member.name: member.param for member in self.members()}

    # ---- checkpoints and copies ----

    def state_dict(self) -> dict[str, Any]:
        """As in torch. Samples travel in the first group: distributed checkpoints take only parameters for state."""
        packed = super().state_dict()
        if SAMPLER in packed["state"]:
            packed["param_groups"][0][SAMPLER] = packed["state"].pop(SAMPLER)
        return packed

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_sampler" in state:  # a copy
            return
        saved = self.param_groups[0].pop(SAMPLER, None)
        if saved is not None:
            self._sampler = Sampler.from_state_dict(saved, self._params())
            self.state[SAMPLER] = self._sampler.state_dict()  # type: ignore[index]
        elif self.plan.settings.get("warmup_steps"):  # a checkpoint from after the warm-up
            self._sampler = None

    def __getstate__(self) -> dict[str, Any]:
        own = (
            "_memory",
            "_time",
            "_warmup",
            "_replan_every",
            "_settings",
            "_settle",
            "_last_diagnostics",
            "_sampler",
            "_names",
            "profile",
        )
        return super().__getstate__() | {name: self.__dict__[name] for name in own} | {"_times": None}

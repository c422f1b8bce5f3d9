"""``BAOC``: the optimizer that configures itself (Alg. 1): it warms up, plans, moves its state over and goes on."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch  # noqa: F401 - the docstring example needs it
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from baoc.core.configuration import Configuration
from baoc.core.mechanisms import known_settings
from baoc.core.plan import Block, Plan, PlanError
from baoc.core.spec import DEFAULT_BETAS, Hyper
from baoc.core.text import human_bytes
from baoc.optim import groups
from baoc.optim.groups import Member
from baoc.optim.optimizer import BlockOptimizer
from baoc.planning import partition
from baoc.planning import risk as risks
from baoc.planning.planner import DEFAULT_MEMORY, Planner, unit_vectors
from baoc.planning.settings import Settings
from baoc.profiling.coordinates import FLOOR, RATIO
from baoc.profiling.facts import Facts, TokenCounter
from baoc.profiling.profile import Profile
from baoc.profiling.sampling import Sampler

logger = logging.getLogger("baoc")

WARMUP = 50
SAMPLER = "baoc.sampler"
"""Where the sampler's tensors live in ``state`` while it samples, so that they are counted like everything else."""
_REPORT_EVERY = 10
_SAMPLES_SHARE = 0.1  # of the budget, at most, where a plan can do without


class BAOC(BlockOptimizer):
    """An optimizer within a budget. The training loop does not change.

    Args:
        params: a module, ``model.parameters()``, ``model.named_parameters()``, or param groups. A module or names give
            the structural scan its boundaries; bare parameters are one unit per tensor.
        lr, betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``.
        memory: the budget for state: a share of AdamW16's (0.5 or "50%"), bytes (an int), a size ("1.5GiB"), 0.0 for
            the cheapest plan there is, or "auto" for the smallest that is expected to be as good as any, within
            ``tolerance`` percent of loss. It holds from the first step on, the sampler included.
        time: how long a training step may become, relative to one with AdamW16; ``math.inf`` lifts it. It is estimated
            from the operations of a step, never timed. In the paper's space, the mean of update-time ratios.
        warmup: steps of sampling before the plan is made.
        warmup_base: what the warm-up runs on; by default the best plan that can be made without gradients. The paper's
            is "adamw-16", which breaks a budget below 1.
        sample_ratio, seed: which share of each tensor is followed, and which coordinates.
        settle: end the warm-up early once the normalised diagnostics change by less than this in ten steps, on average.
        replan_every: make a new plan every so many steps; sampling then goes on.
        kernel: as in :class:`BlockOptimizer`.
        settings: those of :class:`~baoc.planning.planner.Settings`, such as ``space``, ``regime``, ``forbid`` or
            ``prefer``, and those that belong to mechanisms, as in :class:`BlockOptimizer`.

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

    _plans_later = True

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = DEFAULT_BETAS,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        memory: float | int | str = DEFAULT_MEMORY,
        time: float | None = None,
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
        self._facts = Facts.of(params if isinstance(params, nn.Module) else self._params())
        # ranks may see batches of different lengths, and all must make one plan
        is_counted = isinstance(params, nn.Module) and chosen.tokens is None and not _is_one_of_many()
        self._tokens = TokenCounter(cast(nn.Module, params)) if is_counted else None
        self.profile: Profile | None = None
        """What the last warm-up learned; it saves to one file and answers any budget."""
        self._names = [member.name for member in self.members()]  # parameters that join later are not planned
        needs_samples = self._needs_samples or warmup_base is not None  # else the warm-up would not end
        self._sampler = self._fitting_sampler(sample_ratio, seed, betas, needs_samples)
        base = self._best_plan(None, memory, time, self._settings) if warmup_base is None else warmup_base
        self._adopt(base, inherit=False)
        samples = human_bytes(self._sampler.nbytes) if self._sampler else "nothing"
        logger.info("%s of state, and %s for samples", human_bytes(self.plan.state_bytes), samples)

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
        if profile is None and self._needs_samples:
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

    @property
    def _needs_samples(self) -> bool:
        return self._settings.chosen_risk != risks.MEASURED

    def _fitting_sampler(
        self, ratio: float, seed: int, betas: tuple[float, float], needs_samples: bool
    ) -> Sampler | None:
        """One that leaves room for a plan: of a small model fewer coordinates are followed, or none if none are needed.

        Where nothing fits, the plan that is made next says so.
        """
        planner = self._planner(None, self._settings)
        budget = planner.budget(self._memory, self._time)
        room = budget - planner.least_bytes(self._time)
        if not needs_samples:
            room = min(room, int(_SAMPLES_SHARE * budget))
        for floor in (FLOOR, FLOOR // 4, FLOOR // 16):
            sampler = Sampler(self._params(), ratio=ratio, floor=floor, seed=seed, betas=betas)
            if sampler.nbytes <= room:
                return sampler
        return sampler if needs_samples else None

    def _before_update(self, stepping: Sequence[Member]) -> None:
        if self._sampler is None:
            return
        if not self._sampler.observe(self._params()):
            logger.warning("skipped the samples of a step with non-finite gradients (%d so far)", self._sampler.skipped)
        elif self._sampler.steps <= self._warmup and self._sampler.steps % _REPORT_EVERY == 0:
            logger.info("warm-up: step %d of %d", self._sampler.steps, self._warmup)
        self.state[SAMPLER] = self._sampler.state_dict()  # type: ignore[index]

    def _after_update(self) -> None:
        if self._tokens is not None:
            self._count_tokens(self._tokens)
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

    def _count_tokens(self, counter: TokenCounter) -> None:
        """After the first step: how long a step is decides what an update may cost."""
        self._facts, self._tokens = self._facts.with_tokens(counter.stop()), None
        if self._needs_samples or self._facts.tokens is None or "expected_loss" not in self.plan.settings:
            return
        plan = self._best_plan(self.profile, self._memory, self._time, self._settings)
        if any(self.plan.block_of(name).configuration != block.configuration for name, block in plan.by_parameter):
            logger.info("planned anew for steps of %d tokens", self._facts.tokens)
            self._adopt(plan, inherit=True)

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
            return Profile.from_sampler(self._sampler, self._params(), self._facts)
        return self.profile

    def _planner(self, profile: Profile | None, settings: Settings) -> Planner:
        shapes = {name: shape for name, shape in self._shapes().items() if name in set(self._names)}
        return Planner(shapes, profile, self._hyper(), settings, self._facts)

    def _best_plan(
        self, profile: Profile | None, memory: float | int | str, time: float | None, settings: Settings
    ) -> Plan:
        """The plan of least risk in the budget less what the samples and parameters that joined later hold."""
        samples = self._sampler.nbytes if self._sampler else 0
        later = sum(block.state_bytes for block in self._later_blocks())
        try:
            return self._planner(profile, settings).plan(memory, time, taken=samples + later)
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
        known = self.plan.settings  # the weights of a run that goes on do not tell how it began
        if known.get("regime") in risks.REGIMES:
            self._facts = dataclasses.replace(self._facts, regime=known["regime"])
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
            "_facts",
            "_tokens",
            "profile",
        )
        return super().__getstate__() | {name: self.__dict__[name] for name in own}


def _is_one_of_many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

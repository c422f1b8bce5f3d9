"""An optimizer that knows the best plan within its budgets, and how to move to it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Sequence

from baoc.configurator import agreement
from baoc.configurator.resumable import Resumable
from baoc.configurator.wishes import Wishes
from baoc.core.budget import is_per_rank
from baoc.core.configuration import Configuration
from baoc.core.plan import Block, Plan, PlanError
from baoc.core.spec import Hyper
from baoc.optim import groups
from baoc.planning import risk as risks
from baoc.planning.planner import Planner
from baoc.profiling.profile import Profile

logger = logging.getLogger("baoc")

_SAMPLES_SHARE = 0.1  # of the budget, at most, in a warm-up whose plan can do without
_KEPT_SHARE = 0.01  # likewise, after it


class Budgeted(Resumable):
    """What fits, what is best, and adopting it; when that is done is up to ``BAOC``."""

    def _planner(self, profile: Profile | None, wishes: Wishes) -> Planner:
        shapes = {name: shape for name, shape in self._shapes().items() if name in set(self._names)}
        rows = self._rows_per_rank() if is_per_rank(wishes.memory) else {}
        return Planner(shapes, profile, self._hyper(), wishes.settings, self._facts, rows)

    def _budgets(self, planner: Planner, wishes: Wishes) -> tuple[int, int]:
        """Bytes of state on the device and in host memory; those of the device are all there are without the other."""
        host = planner.host_budget(wishes.host_memory)
        return planner.budget(wishes.memory, wishes.time, divided=host > 0), host

    def _room_for_samples(self, is_base_given: bool) -> int:
        planner, wishes = self._planner(None, self._wishes), self._wishes
        budget, host = self._budgets(planner, wishes)
        least = planner.least_bytes(wishes.time)
        room = budget if host >= least else max(0, budget - least)  # on the host there is room for all state, or none
        is_needed = needs_samples(wishes) or is_base_given
        return room if is_needed else min(room, int(_SAMPLES_SHARE * budget))

    def _fits(self, plan: Plan) -> bool:
        """Whether a plan of the parameters there are keeps the budgets, beside the samples."""
        wishes, samples = self._wishes, self._sampler.nbytes if self._sampler else 0
        device, host = self._budgets(self._planner(None, wishes), wishes)
        plan = dataclasses.replace(plan, rows=self._rows_per_rank())
        on_host = plan.host_bytes_per_rank if is_per_rank(wishes.memory) else plan.host_bytes
        return self._device_bytes(plan.blocks, wishes) + samples <= device and on_host <= host

    def _device_bytes(self, blocks: Sequence[Block], wishes: Wishes) -> int:
        """What some blocks hold on the device, on all ranks or on one, as the budget is meant."""
        plan = Plan(tuple(blocks), rows=self._rows_per_rank())
        return plan.device_bytes_per_rank if is_per_rank(wishes.memory) else plan.device_bytes

    def _best_plan(self, profile: Profile | None, wishes: Wishes) -> tuple[Plan, bool]:
        """The plan of least risk in what the budget leaves, and whether samples have room beside it.

        While they are of use, or cost next to nothing, the plan makes room for them, if it can.
        """
        planner = self._planner(profile, wishes)
        later = self._later_blocks()
        taken = self._device_bytes(later, wishes)
        samples = self._sampler.nbytes if self._sampler else 0
        (budget, _), both = self._budgets(planner, wishes), {"host_memory": wishes.host_memory}
        is_worth_it = self._is_sampling(wishes) or needs_samples(wishes) or samples <= _KEPT_SHARE * budget
        plan, keeps = None, samples > 0
        if keeps and is_worth_it:
            with contextlib.suppress(PlanError):  # samples are not worth a budget that cannot be kept
                plan = planner.plan(wishes.memory, wishes.time, **both, taken=taken + samples)
        if plan is None:
            plan = planner.plan(wishes.memory, wishes.time, **both, taken=taken)
            keeps = 0 < samples <= budget - taken - self._device_bytes(plan.blocks, wishes)
        return dataclasses.replace(plan, blocks=(*plan.blocks, *later)), keeps

    def _decided_plan(self, profile: Profile | None, wishes: Wishes, *, needs_profile: bool) -> tuple[Plan, bool]:
        """The best plan as the first rank sees it."""

        def decide() -> tuple[str, bool]:
            if profile is None and needs_profile:
                raise RuntimeError(
                    "there is no profile to plan from: no finite gradient was sampled, or what was sampled was given "
                    "up for room. Pass profile=, or set replan_every so that sampling goes on."
                )
            plan, keeps_samples = self._best_plan(profile, wishes)
            return plan.to_json(), keeps_samples

        text, keeps_samples = agreement.first_decides(decide, self._group)
        return Plan.from_json(text), keeps_samples

    def _adopt(self, plan: Plan | Configuration | str, *, inherit: bool, keeps_samples: bool = True) -> None:
        if not keeps_samples and self._sampler is not None:  # make room before state moves
            self._hide_samples()
            self._sampler = None
            logger.info("there is no room to keep the samples of the warm-up beside the plan")
        self.set_plan(plan, inherit=inherit)
        self._plan_given = False  # a checkpoint's plan knows more than this process, and is taken over

    def _hyper(self) -> Hyper:
        """The first group's settings, with the largest decay: what decay risks counts if any group has some."""
        hypers = [groups.hyper(group, f"param group {index}") for index, group in enumerate(self.param_groups)]
        return dataclasses.replace(hypers[0], weight_decay=max(hyper.weight_decay for hyper in hypers))

    def _later_blocks(self) -> list[Block]:
        """Of parameters that joined with a configuration of their own."""
        planned = set(self._names)
        return [block for block in self.plan.blocks if not block.parameters.keys() & planned]

    def _is_sampling(self, wishes: Wishes) -> bool:
        if self._sampler is None:
            return False
        return self._progress.since_plan is None or wishes.replan_every is not None or self._progress.failed


def needs_samples(wishes: Wishes) -> bool:
    """Whether plans are made from sampled gradients."""
    return wishes.settings.chosen_risk != risks.MEASURED

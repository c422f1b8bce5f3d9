"""``BAOC``: the optimizer that configures itself (Alg. 1): it warms up, plans, moves its state over and goes on."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from baoc.configurator import agreement
from baoc.configurator.budgeted import Budgeted, needs_samples
from baoc.configurator.promotion import MANY, is_due, promoted
from baoc.configurator.resume import Progress
from baoc.configurator.warmup import Diagnostics, fitting_sampler
from baoc.configurator.wishes import WARMUP, Wishes, is_count, is_number
from baoc.core.configuration import Configuration
from baoc.core.mechanisms import known_settings
from baoc.core.notice import notice
from baoc.core.plan import Block, Plan, PlanError, one_line
from baoc.core.roles import role_of
from baoc.core.spec import DEFAULT_BETAS, real_shape
from baoc.core.text import check_names, human_bytes
from baoc.optim import checkpoint
from baoc.optim.groups import Group, Member
from baoc.optim.offload import BUCKET_BYTES
from baoc.optim.rehearsal import REHEARSERS, is_called_by
from baoc.optim.watch import strained_shares
from baoc.planning import rates
from baoc.planning.planner import DEFAULT_MEMORY
from baoc.planning.settings import Settings
from baoc.profiling.coordinates import RATIO
from baoc.profiling.facts import Facts, TokenCounter
from baoc.profiling.profile import Profile

logger = logging.getLogger("baoc")

_ARGUMENTS = (
    *(
        "params",
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "memory",
        "host_memory",
        "time",
        "warmup",
        "warmup_base",
        "sample_ratio",
        "seed",
    ),
    *("settle", "replan_every", "maximize", "kernel", "on_nonfinite", "promote", "quiet", "process_group"),
    "offload_bucket",
)
_REPORT_EVERY = 10


class BAOC(Budgeted):
    """An optimizer within a budget. The training loop does not change.

    Args:
        params: a module, ``model.parameters()``, ``model.named_parameters()``, or param groups. A module or names give
            the structural scan its boundaries; bare parameters are one unit per tensor.
        lr, betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``.
        memory: the budget for state: a share of AdamW16's (0.5 or "50%"), bytes (an int), a size ("1.5GiB"), 0.0 for
            the cheapest plan there is, or "auto" for the smallest that is expected to be as good as any, within
            ``tolerance`` percent of loss. It holds from the first step on, the sampler included. Of sharded parameters
            it is what all ranks hold together, so that the plan does not depend on their number, or, with "2GiB/rank",
            what the fullest may hold.
        host_memory: a budget for state in host memory, likewise. Then ``memory`` is for what the device holds, what
            each block has is chosen for both together, and where it is so that a step copies as little as it can. Such
            blocks are updated on the host, which takes its time: it is not counted in ``time``.
        time: how long a training step may become, relative to one with AdamW16; ``math.inf`` lifts it. It is estimated
            from the operations of a step, never timed. In the paper's space, the mean of update-time ratios.
        warmup: steps before the plan is made, whose gradients are sampled.
        warmup_base: what the warm-up runs on; by default the best plan that can be made without gradients. The paper's
            is "adamw-16", which breaks a budget below 1.
        sample_ratio, seed: which share of each tensor is followed, and which coordinates. Fewer are where the budget
            has no room, or none; then the plan that is made without gradients stays.
        settle: end the warm-up early once the normalised diagnostics change by less than this in ten steps, on average.
        replan_every: make a new plan every so many steps; sampling then goes on. A plan that cannot be made at its
            moment is logged and tried again after as many steps (without ``replan_every``, after another ``warmup``);
            until then training goes on with the plan it has.
        kernel, on_nonfinite, offload_bucket: as in :class:`BlockOptimizer`. A step that is skipped is none of the
            warm-up.
        promote: after 1, 10 and every 100 steps of a plan, give wider codes to a block half of whose int8 or int4
            groups are strained, if the budget has room: ``int4`` becomes ``int8``, and that ``bf16``. The next plan
            that is made starts anew. With ``forbid``, or ``candidates`` that have no such codes, nothing is promoted.
        quiet: say nothing on stderr when the warm-up begins and when the plan is made. Where logging is set up, or with
            ``BAOC_QUIET=1`` in the environment, nothing is said there either way.
        process_group: the ranks that train the same model, by default all; the first of them plans for all.
        settings: those of :class:`~baoc.planning.planner.Settings`, such as ``space``, ``regime``, ``forbid`` or
            ``prefer``, and those that belong to mechanisms, as in :class:`BlockOptimizer`.

    A checkpoint carries all of this. Where the script that loads it asks for the same as the one that began, the run
    goes on as it was, with what ``replan`` has changed since; where it asks for something else, it gets that at the
    next step.

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
        host_memory: float | int | str | None = None,
        time: float | None = None,
        warmup: int = WARMUP,
        warmup_base: Plan | Configuration | str | None = None,
        sample_ratio: float = RATIO,
        seed: int = 0,
        settle: float | None = None,
        replan_every: int | None = None,
        maximize: bool = False,
        kernel: str = "auto",
        on_nonfinite: str = "step",
        offload_bucket: int | str = BUCKET_BYTES,
        promote: bool = True,
        quiet: bool = False,
        process_group: agreement.Group = None,
        **settings: Any,
    ) -> None:
        own = {name: settings.pop(name) for name in known_settings() if name in settings}
        check_names(settings, "BAOC", (*_ARGUMENTS, *known_settings(), *(each.name for each in fields(Settings))))
        asked = Wishes(memory, time, warmup, settle, replan_every, Settings.of("BAOC", settings), host_memory)
        if not is_count(seed, at_least=0):
            raise ValueError(f"seed is {seed!r}; it must be a whole number of at least 0.")
        if not is_number(sample_ratio):
            raise ValueError(f"the sampling ratio is {sample_ratio!r}; it must be a number above 0 and at most 1.")
        self._asked = self._wishes = asked
        self._group = process_group
        self._quiet, self._promotes, self._promotions = quiet, promote, 0
        common: dict[str, Any] = {"maximize": maximize, "kernel": kernel, "on_nonfinite": on_nonfinite}
        common |= {"offload_bucket": offload_bucket}
        super().__init__(params, lr, betas, eps, weight_decay, **common, **own)
        if asked.settings.lr_match is None and len({float(group["lr"]) for group in self.param_groups}) > 1:
            # whoever gives groups learning rates of their own has thought about roles
            asked = asked.changed("BAOC", {}, {"lr_match": rates.BY_LENGTH})
            self._asked = self._wishes = asked
        self._facts = Facts.of(params if isinstance(params, nn.Module) else self._params())
        self._module = self._tokens = None
        if isinstance(params, nn.Module) and asked.settings.tokens is None:
            self._module, self._tokens = weakref.ref(params), TokenCounter(params)
        self._names = [member.name for member in self.members()]
        self._sampler = fitting_sampler(
            self._params(), self._room_for_samples(warmup_base is not None), sample_ratio, seed, betas
        )
        is_final = self._sampler is None and warmup_base is None  # there is nothing to wait for
        self._progress = Progress(since_plan=0 if is_final else None)
        self._agreed = False
        self._is_told = False
        best, _ = self._best_plan(None, asked)  # made in any case: a budget that cannot be kept is refused here
        self._adopt(best if warmup_base is None else warmup_base, inherit=False)
        samples = human_bytes(self._sampler.nbytes) if self._sampler else "nothing"
        logger.info("%s of state, and %s for samples", human_bytes(self.plan.state_bytes), samples)

    def metrics(self) -> dict[str, float]:
        """As in :class:`BlockOptimizer`, with the steps that were made, whether they are still of the warm-up (1 or
        0), the budget in bytes, and how many blocks were given wider codes.
        """
        self.settle()
        device, host = self._budgets(self._planner(None, self._wishes), self._wishes)
        own = {
            "steps": self._progress.steps,
            "warmup": self._progress.since_plan is None,
            "budget_bytes": device,
            "promotions": self._promotions,
        }
        if self._wishes.host_memory is not None:
            own["host_budget_bytes"] = host
        return {key: float(number) for key, number in own.items()} | super().metrics()

    def replan(
        self,
        memory: float | int | str | None = None,
        time: float | None = None,
        *,
        host_memory: float | int | str | None = None,
        profile: Profile | None = None,
        inherit: bool = True,
        **settings: Any,
    ) -> Plan:
        """Make and adopt a new plan now: another budget, other settings, or newer gradients.

        What is not given stays as it was; ``host_memory=0`` takes all state back to the device. State is inherited;
        ``inherit=False`` restarts it. With several ranks, all must call it.
        """
        budgets = {"memory": memory, "time": time, "host_memory": host_memory}
        changed = self._wishes.changed("replan", budgets, settings)
        plan, keeps_samples = self._decided_plan(
            profile or self._profile(), changed, needs_profile=needs_samples(changed)
        )
        self._wishes = changed
        self._adopt(plan, inherit=inherit, keeps_samples=keeps_samples)
        return self.plan

    def add_param_group(self, param_group: Group) -> None:
        """As in torch. The budget holds for all parameters: those that there are make room for the new ones.

        A group without a ``configuration`` is planned with the rest, unless plans need samples, which it has none of.
        """
        if "_progress" not in self.__dict__:  # torch's constructor
            super().add_param_group(param_group)
            checkpoint.reserve(self.param_groups, checkpoint.PLANNER)
            return
        plan, names, facts = self.plan, self._names, self._facts
        given = self._plan_given
        super().add_param_group(param_group)
        self._plan_given = given
        new = {member.name: real_shape(member.param) for member in self.members() if member.name not in plan}
        try:
            if "configuration" not in param_group and not needs_samples(self._wishes):
                roles = {name: role_of(shape, name) for name, shape in new.items()}
                self._names, self._facts = [*names, *new], dataclasses.replace(facts, roles={**facts.roles, **roles})
            elif self._fits(self.plan):
                return
            best, keeps_samples = self._best_plan(self._profile(), self._wishes)
            self._adopt(best, inherit=True, keeps_samples=keeps_samples)
        except PlanError as error:
            del self.param_groups[-1]
            self._plan, self._names, self._facts = plan, names, facts
            raise PlanError(f"there is no room for the {len(new)} parameters of another group: {error}") from error
        finally:
            self._agreed = False

    # ---- plans ----

    def _plan_now(self, *, only_if_other: bool = False) -> None:
        """Make a plan as the training goes. If there is none, the one there is stays, and it is tried again."""
        needs_profile = self._sampler is not None and needs_samples(self._wishes)
        try:
            plan, keeps_samples = self._decided_plan(self._profile(), self._wishes, needs_profile=needs_profile)
        except Exception as error:
            self._progress = dataclasses.replace(self._progress, failed=True)
            logger.warning(
                "no plan could be made, so training goes on with the one it has, and it is tried again in %d steps: %s",
                self._wishes.replan_every or self._wishes.warmup,
                error,
                exc_info=not isinstance(error, (PlanError, RuntimeError)),
            )
            return
        self._progress = dataclasses.replace(self._progress, failed=False)
        ours = self.plan
        if only_if_other and all(_is_alike(ours.block_of(name), block) for name, block in plan.by_parameter):
            return
        self._adopt(plan, inherit=True, keeps_samples=keeps_samples)
        if only_if_other:
            logger.info("tokens of a step change the plan: %s", one_line(self.plan))
        else:
            done = _steps(self._progress.steps)
            self._say(f"planned after {done}: {one_line(self.plan)}. print(optimizer.plan) shows it")

    # ---- steps ----

    @property
    def is_warming_up(self) -> bool:
        return self._progress.since_plan is None

    def _before_step(self) -> None:
        if (self._agreed and not self._progress.stale) or is_called_by(REHEARSERS):
            return
        if not self._agreed:
            self._agree()
        if self._progress.stale:
            self._progress = dataclasses.replace(self._progress, stale=False)
            self._plan_now()

    def _before_update(self, stepping: Sequence[Member]) -> None:
        if not stepping:
            return
        self._tell_of_warmup()
        self._progress = self._progress.stepped()
        if self._sampler is None:
            return
        if self._is_sampling(self._wishes):
            if not self._sampler.observe(self._params()):
                skipped = self._sampler.skipped
                logger.warning("skipped the samples of a step with non-finite gradients (%d so far)", skipped)
            elif self._progress.since_plan is None and self._progress.steps % _REPORT_EVERY == 0:
                logger.info("warm-up: step %d of %d", self._progress.steps, self._wishes.warmup)
        self._show_samples()

    def _promote(self) -> None:
        """Give wider codes to blocks that need them, as the first rank sees it, of configurations a plan may choose."""
        settings = self._wishes.settings
        strained = agreement.from_first(strained_shares(self.members(), self.state), self._group)
        if settings.forbid or max(strained.values(), default=0.0) < MANY:
            return
        plan, told = promoted(self.plan, strained, settings.named_candidates, self._fits)
        if told:
            self._adopt(plan, inherit=True)
            self._promotions += len(told)
            self._say("; ".join(told))

    def _tell_of_warmup(self) -> None:
        """When the first step of this process is made."""
        if self._is_told:
            return
        self._is_told = True
        made, warmup = self._progress.steps, self._wishes.warmup
        if self._progress.since_plan is None:
            when = f"plans after {_steps(warmup)}" + (f", {made} of which are made" if made else "")
            self._say(f"{when}; until then {one_line(self.plan)}")
        elif not made:
            self._say(f"planned without a warm-up: {one_line(self.plan)}. print(optimizer.plan) shows it")

    def _say(self, message: str) -> None:
        notice(message, quiet=self._quiet)

    def _after_skip(self) -> None:
        if self._tokens is not None:  # they are those of one step
            self._tokens.restart()

    def _may_learn_late(self) -> bool:
        """Samples, tokens, plans and promotions are of real steps: where one is to come, each is judged first."""
        has_plan = self._progress.since_plan is not None and not self._progress.failed
        looks = self._promotes and is_due(self._progress.of_plan + 1)
        return has_plan and self._wishes.replan_every is None and not looks and self._tokens is None

    def _after_late_skip(self) -> None:
        self._progress = self._progress.taken_back()

    def _after_update(self) -> None:
        if not self._progress.steps:
            return
        if self._tokens is not None:
            self._count_tokens(self._tokens)
        if self._is_due():
            self._progress = dataclasses.replace(self._progress, since_plan=0)
            self._plan_now()
        elif self._promotes and is_due(self._progress.of_plan):
            self._promote()

    def _is_due(self) -> bool:
        steps, since, wishes = self._progress.steps, self._progress.since_plan, self._wishes
        if since is None:
            return steps >= wishes.warmup or self._has_settled()
        interval = wishes.replan_every or (wishes.warmup if self._progress.failed else None)
        return interval is not None and since >= interval

    def _count_tokens(self, counter: TokenCounter) -> None:
        """After the first step: how long a step is decides what an update may cost."""
        tokens = agreement.from_first(self._over_shards(counter.stop()), self._group)
        self._facts, self._tokens = self._facts.with_tokens(tokens), None
        if not needs_samples(self._wishes) and tokens is not None and "expected_loss" in self.plan.settings:
            self._plan_now(only_if_other=True)

    def _over_shards(self, tokens: int | None) -> int | None:
        """Ranks that share an update share the data that it is for: their tokens are one step's."""
        sharded = next((member for member in self.members() if member.place.ranks is not None), None)
        if sharded is None:
            return tokens
        return int(sharded.place.sum(torch.tensor(tokens or 0, device=sharded.param.device))) or None

    def _has_settled(self) -> bool:
        settle, steps = self._wishes.settle, self._progress.steps
        if settle is None or steps % _REPORT_EVERY:
            return False
        change, profile = float("inf"), self._profile()
        if profile is not None:
            now = Diagnostics(profile, self._hyper(), self._wishes.settings.anchors)
            change = now.change_since(self._progress.diagnostics)
            self._progress = dataclasses.replace(self._progress, diagnostics=now.table)
        has_settled = agreement.from_first(change < settle, self._group)
        if has_settled:
            logger.info("the diagnostics have settled after %d steps", steps)
        return has_settled

    # ---- ranks ----

    def _agree(self) -> None:
        """All ranks must train one model by the same wishes; what they found out for themselves is the first one's."""
        self._agreed = True
        if not agreement.is_one_of_many(self._group):
            return
        named = [f"{member.name} of {member.shape}" for member in self.members()]
        wishes = [f"{key}={value!r}" for key, value in self._wishes.plain().items()]
        numbers = [
            f"{key}={group[key]!r} in param group {index}"
            for index, group in enumerate(self.param_groups)
            for key in sorted(self.defaults)
            if key in group and not isinstance(group[key], Tensor)
        ]
        progress = [f"{self._progress.steps} steps behind it", f"samples: {self._sampler is not None}"]
        agreement.check_alike(
            {"parameters": named, "settings": wishes, "hyper-parameters": numbers, "progress": progress}, self._group
        )
        text = self.plan.to_json()
        self._facts, first_plan = agreement.from_first((self._facts, text), self._group)
        if first_plan != text:
            self._adopt(Plan.from_json(first_plan), inherit=True)


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def _is_alike(one: Block, other: Block) -> bool:
    return one.configuration == other.configuration and one.host is other.host

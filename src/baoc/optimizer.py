"""``BAOC``: a ``BlockOptimizer`` that holds a planner, which chooses its plan within a memory budget."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import baoc.resume as resume
from baoc.core.mechanisms import known_settings
from baoc.core.plan import Block, Plan, PlanError
from baoc.core.roles import role_of
from baoc.core.sharding import local
from baoc.core.spec import DEFAULT_BETAS
from baoc.core.splits import Request, matched
from baoc.core.text import names_checked, notice, one_line
from baoc.optim import agreement, checkpoint, groups, migrate
from baoc.optim.groups import Group
from baoc.optim.optimizer import BlockOptimizer
from baoc.optim.state import SAMPLES
from baoc.plan import measured_times
from baoc.planners.base import AUTO, Budget, Memory, Planner, Progress
from baoc.planners.effects import EffectPlanner
from baoc.planners.model_facts import ModelFacts, TokenCounter
from baoc.planners.paper.planner import PaperPlanner, PaperSession
from baoc.planners.paper.statistics import GradientStatistics, StatisticsError
from baoc.planners.total import Tensors, Total
from baoc.resume import Settings

logger = logging.getLogger("baoc")


def _moved() -> dict[str, str]:
    """Where keyword arguments belong that are not of ``BAOC`` itself."""
    where = {name: f"a key of a param group: [{{'params': ..., {name!r}: ...}}]" for name in known_settings()}
    for planner in (PaperPlanner, EffectPlanner):
        for field in dataclasses.fields(planner):
            where[field.name] = f"planner=baoc.{planner.__name__}({field.name}=...)"
    where["space"] = "planner=baoc.PaperPlanner() or planner=baoc.EffectPlanner()"
    where["quiet"] = "verbose=False"
    return where


class BAOC(BlockOptimizer):
    """An optimizer within a memory budget. The training loop does not change.

    The plan is there when the optimizer is built: :attr:`plan` says what each parameter is updated with, how many bytes
    that holds, and what the loss is predicted to be.

    Args:
        params: a module, ``model.parameters()``, ``model.named_parameters()``, or param groups. Pass the module if you
            can: it says what each parameter is.
        lr: learning rate, as you would give it to ``torch.optim.AdamW``.
        betas: as in ``torch.optim.AdamW``.
        eps: as in ``torch.optim.AdamW``.
        weight_decay: as in ``torch.optim.AdamW``.
        memory: a ceiling for optimizer state: a share of AdamW16's (0.25 or "25%"), a size ("1.5GiB"), bytes (an int of
            at least 4096), 0.0 for the smallest plan there is, or "auto" for the smallest plan that is predicted to be
            as good as any. Of sharded parameters it is what all ranks hold together, or, with "2GiB/rank", what the
            rank with the most may hold.
        planner: chooses the plan: :class:`~baoc.EffectPlanner` (the default) by measured effects,
            :class:`~baoc.PaperPlanner` by the paper's Algorithm 1.
        total_memory: instead of ``memory``, a budget for weights, gradients, activations and state of each rank, such
            as "20GiB". What the others leave is for state. :attr:`total` shows all of it, and ``optimizer.plan.advice``
            what would free more.
        activations: with ``total_memory``, what the forward pass needs: a size, or bytes.
        gradients: with ``total_memory``, "keep", or "release" if you call :func:`~baoc.release_gradients`.
        host_memory: a budget for state in host memory, likewise; ``memory`` is then for what the device holds. Such
            blocks are updated on the host.
        maximize: maximize the objective instead of minimizing it.
        kernel: "auto", "native", "triton", "compiled" or "eager"; see :attr:`kernel`.
        on_nonfinite: what to do with a step that has non-finite gradients: "step", "skip" or "raise".
        split: parameters that are several matrices, each of which Muon and its like treat by itself: ``None`` (detected
            in the module), ``False`` (none), "heads" (detected, one matrix for each attention head), or a mapping such
            as ``{"*.qkv.weight": (768, 768, 768)}``; see :class:`~baoc.BlockOptimizer`.
        verbose: print a line to stderr when a plan is made, unless logging is set up or ``BAOC_QUIET=1`` is set.
        process_group: the ranks that train the same model; by default all.

    Raises:
        PlanError: if no plan fits the budget. The message names the smallest budget that one fits.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        >>> optimizer = BAOC(model, lr=1e-3, memory=0.8, verbose=False)
        >>> optimizer.plan.state_bytes <= 0.8 * optimizer.plan.reference_bytes
        True
        >>> for _ in range(4):
        ...     model(torch.randn(8, 64)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    @names_checked("BAOC", _moved)
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = DEFAULT_BETAS,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        memory: Memory = "auto",
        planner: Planner | None = None,
        host_memory: Memory | None = None,
        total_memory: int | str | None = None,
        activations: int | str = 0,
        gradients: str = "keep",
        maximize: bool = False,
        kernel: str = "auto",
        on_nonfinite: str = "step",
        split: Request = None,
        verbose: bool = True,
        process_group: agreement.Group = None,
    ) -> None:
        if total_memory is not None and memory != AUTO:
            raise PlanError(
                f"memory={memory!r} and total_memory={total_memory!r} are both given. Give one of them: total_memory "
                "is for weights, gradients, activations and state, and memory for state alone."
            )
        if total_memory is None and (activations or gradients != "keep"):
            raise PlanError("activations= and gradients= are for total_memory=, which is not given. Leave them out.")
        self._total: Total | None = None
        self._requested = self._settings = Settings(Budget(memory, host_memory), EffectPlanner()).changed(
            planner=planner
        )
        self._verbose, self._peers = verbose, agreement.Peers(process_group)
        self._names: list[str] = []  # parameters to plan: all but those of groups with a configuration of their own
        self._planned_at: int | None = None
        self._failed = self._is_stale = self._is_ready = False
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        self._setup(params, defaults, {}, kernel=kernel, on_nonfinite=on_nonfinite, split=split, peers=self._peers)
        if total_memory is not None:
            everything = params.parameters() if isinstance(params, nn.Module) else ()
            frozen = sum(local(param).nbytes for param in everything if not param.requires_grad)
            self._total = Total(total_memory, self._tensors(frozen), activations, gradients)
            self._requested = self._settings = self._settings.changed(memory=self._left)
        facts = ModelFacts.of(params if isinstance(params, nn.Module) else self._params())
        self._facts = dataclasses.replace(facts, splits=matched(self._splits, self._shapes()))
        self._session = self._settings.planner.start(self._params(), self._model())
        self._install(self._starting_plan(), inherit=False)
        counts = self._settings.planner.counts_tokens
        self._tokens = TokenCounter(params) if isinstance(params, nn.Module) and counts else None
        until = ", until the warm-up ends" if self.is_warming_up else ""
        notice(f"{one_line(self.plan)}{until}. print(optimizer.plan) shows it", quiet=not verbose)

    # ---- steps ----

    @torch.no_grad()
    def _make_step(self, *, must_know: bool = False) -> bool:
        self._begin()
        is_watching = self._session.is_watching
        was_made = super()._make_step(must_know=must_know or is_watching)
        if was_made and is_watching:
            self._observe()
        return was_made

    def _begin(self) -> None:
        if not self._is_ready:
            self._prepare_step()

    @property
    def _obstacle_to_release(self) -> str | None:
        name = type(self._settings.planner).__name__
        if not self._settings.planner.reads_gradients:
            return None
        return f"{name} samples them in optimizer.step(). Use the default planner, or baoc.make_plan(...) beforehand."

    def _prepare_step(self) -> None:
        """Before the first step, and after a load: agree with other ranks, and plan if the plan is out of date."""
        self._peers.find_wrappers(member.param for member in self.members())
        self._agree()
        if self.is_warming_up and not self._steps:  # the model may have moved to another device
            self._session = self._settings.planner.start(self._params(), self._model())
            self._share_tensors()
        if self._tokens is not None:
            tokens = self._tokens.stop()
            if ranks := self._current_members().ranks:  # they share the update, so their tokens add up
                count = torch.tensor(tokens or 0, dtype=torch.int64, device=self.members()[0].param.device)
                tokens = int(ranks[0].sum(count)) or None
            # where ranks do not answer, their tokens are unknown, and all ranks must make the same plan
            tokens = None if self._peers.exist and not self._peers.answer else self._peers.first(tokens)
            self._facts, self._tokens = self._facts.with_tokens(tokens), None
            counts = self._settings.planner.counts_tokens and not self._plan_given
            self._is_stale |= tokens is not None and counts
        if self._is_stale:
            self._is_stale = False
            if self.is_warming_up:
                self._install(self._peers.decide(self._starting_plan), inherit=True, attempt=self._together())
            else:
                self._plan_again()
        self._is_ready = True

    def _observe(self) -> None:
        """Let the planner read the gradients of a step that was made, and plan when it is time."""
        self._follow_samples()
        params = self._params()
        self._session.observe(params)
        is_due = self._session.is_due(self._progress, params, self._model())
        if self._settings.planner.reads_gradients:
            is_due = self._peers.first(is_due)
        if is_due:
            self._plan_again()

    def _follow_samples(self) -> None:
        """Sample anew if parameters have left the optimizer since sampling began."""
        params = self._params()
        if isinstance(self._session, PaperSession) and not self._session.is_of(params):
            self._session = self._settings.planner.start(params, self._model())
            self._share_tensors()

    def _rename(self, names: Mapping[str, str]) -> None:
        super()._rename(names)
        if "_session" not in self.__dict__:  # torch's constructor
            return
        self._names = [names[name] for name in self._names if name in names]
        self._facts = self._facts.renamed(names)
        if isinstance(self._session, PaperSession):
            self._session.forget_names()

    # ---- plans ----

    def replan(
        self,
        memory: Memory | None = None,
        *,
        host_memory: Memory | None = None,
        planner: Planner | None = None,
        statistics: GradientStatistics | None = None,
        inherit: bool = True,
    ) -> Plan:
        """Make and install a new plan now. With several ranks, all must call it. It ends a warm-up.

        Args:
            memory: another budget; by default it stays.
            host_memory: likewise; 0 takes all state back to the device.
            planner: other settings, or another planner; by default it stays.
            statistics: gradient statistics for a :class:`~baoc.PaperPlanner`; by default those of this run.
            inherit: migrate state to the new plan. ``False`` restarts it.

        Returns:
            The new plan.

        Raises:
            PlanError: no plan fits. Nothing has changed.
            StatisticsError: a ``PaperPlanner`` has no gradient statistics. Nothing has changed.
        """
        before = self._settings, self._session
        try:
            self._settings = self._settings.changed(memory, host_memory, planner)
            if self._release is not None and self._obstacle_to_release:
                raise PlanError(f"gradients are released: {self._obstacle_to_release}")
            if planner is not None:
                self._session = planner.start(self._params(), self._model())
                self._session.take_over(before[1])
            plan = self._peers.decide(lambda: self._current_plan(statistics))
            self._install(plan, inherit=inherit, attempt=self._together())
        except BaseException:
            self._settings, self._session = before
            raise
        self._note_plan()
        return self.plan

    @property
    def statistics(self) -> GradientStatistics:
        """Gradient statistics of this run, from a :class:`~baoc.PaperPlanner`. With sharded parameters, all ranks ask.

        Raises:
            StatisticsError: the planner reads no gradients, or has seen none.
        """
        if not isinstance(self._session, PaperSession):
            raise StatisticsError(
                f"{type(self._settings.planner).__name__} reads no gradients. Use planner=baoc.PaperPlanner(), or "
                "baoc.collect_statistics(...) apart from training."
            )
        return self._session.current_statistics(self._params(), self._model())

    @property
    def is_warming_up(self) -> bool:
        """Whether the planner is still to make the plan that training goes on with."""
        is_open = self._planned_at is None or self._failed
        return is_open and self._settings.planner.reads_gradients and self._session.is_watching

    def metrics(self) -> dict[str, float]:
        """As in :class:`BlockOptimizer`, with more numbers.

        - ``steps``: steps that were made; ``warmup``: 1 while the planner warms up, else 0.
        - ``planner_bytes``: bytes that the planner holds on the device, such as samples. ``state_bytes`` is without
          them.
        - ``budget_bytes`` and ``host_budget_bytes``: the budgets, where there are some.

        Returns:
            Numbers by name.
        """
        numbers = super().metrics() | {"steps": float(self._steps), "warmup": float(self.is_warming_up)}
        budget = self._settings.budget
        reference = self._model().reference_bytes(per_rank=budget.is_per_rank)
        more = {
            "planner_bytes": self._session.nbytes,
            "budget_bytes": budget.device_bytes(reference),
            "host_budget_bytes": budget.host_bytes(reference),
        }
        return numbers | {key: float(number) for key, number in more.items() if number}

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, as in torch. The budget holds for all parameters: the others make room for the new ones.

        A group with a ``configuration`` keeps it. Any other is planned with the rest, unless the planner has begun to
        sample gradients: then it gets ``adamw-32``.

        Args:
            param_group: the parameters and their settings, as in ``torch.optim``.

        Raises:
            PlanError: no plan fits with the new parameters. The group is not added.
        """
        is_planned = "configuration" not in param_group
        if "_session" not in self.__dict__:  # torch's constructor
            new = self._join_group(param_group)
            self._names += new if is_planned else []
            checkpoint.reserve(self.param_groups, checkpoint.PLANNER)
            return
        kept = (
            "_plan",
            "_names",
            "_facts",
            "_session",
            "_settings",
            "_total",
            "_plan_given",
            "_is_planned",
            "_is_ready",
        )
        before, count = {name: self.__dict__[name] for name in kept}, len(self.param_groups)
        joined: Plan | None = None
        try:
            self._is_planned = False  # allocates nothing until all parameters have a plan
            new = self._join_group(param_group)
            joined = self._plan
            self._count_new_tensors()
            is_planned = is_planned and not (self._settings.planner.reads_gradients and self._steps)
            if is_planned:
                self._plan_for(new)
            make = self._starting_plan if self.is_warming_up else self._current_plan
            self._is_ready = False
            self._install(make() if is_planned or not self._fits(joined) else joined, inherit=True)
        except BaseException as error:
            del self.param_groups[count:]
            if joined is not None and self._plan is not joined:
                before.pop("_plan")  # some state was converted, and the plan says which
            self.__dict__.update(before)
            if isinstance(error, PlanError):
                raise PlanError(f"there is no room for the parameters of another group: {error}") from error
            raise

    def _plan_for(self, new: list[str]) -> None:
        """Let plans be for new parameters too."""
        shapes = {name: shape for name, shape in self._shapes().items() if name in new}
        roles = {name: role_of(shape, name) for name, shape in shapes.items()}
        self._names = [*self._names, *new]
        self._facts = dataclasses.replace(
            self._facts,
            roles={**self._facts.roles, **roles},
            splits={**self._facts.splits, **matched(self._splits, shapes)},
        )
        if self.is_warming_up:
            self._session = self._settings.planner.start(self._params(), self._model())

    def _plan_again(self) -> None:
        """Plan as the training goes. If no plan can be made, training goes on with the current one."""
        try:
            # without gradients all ranks come to one plan by themselves, even those that others no longer wait for
            is_shared = self._settings.planner.reads_gradients or not self._steps
            plan = self._peers.decide(self._current_plan) if is_shared else self._current_plan()
        except Exception as error:
            self._planned_at, self._failed = self._steps, True
            logger.warning("no plan could be made, so training goes on with the current one: %s", error)
            return
        is_new = self._install(plan, inherit=not self._restarts(plan), attempt=self._together())
        self._note_plan()
        if is_new:
            text = f"new plan at step {self._steps}: {one_line(self.plan)}. print(optimizer.plan) shows it"
            notice(text, quiet=not self._verbose)

    def _restarts(self, plan: Plan) -> bool:
        """Whether state is to start anew with a plan. The first one always takes over the state of the warm-up."""
        restarts = self._planned_at is not None and not getattr(self._settings.planner, "inherit", True)
        return restarts and _assignment(plan) != _assignment(self._plan)

    def _note_plan(self) -> None:
        self._planned_at, self._failed = self._steps, False
        self._session.planned(self.plan)
        self._share_tensors()

    def _starting_plan(self) -> Plan:
        """The plan before any gradient."""
        budget = self._budget(self._session.nbytes)
        return self._with_later(self._settings.planner.initial_plan(self._model(), budget))

    def _current_plan(self, statistics: GradientStatistics | None = None) -> Plan:
        """The plan for what is known now."""
        params, model, session = self._params(), self._model(), self._session
        measured: dict[str, Any] = {}
        if isinstance(session, PaperSession) and session.needs_times:
            first, planner = next(iter(params.values())), self._settings.planner
            dtype = first.dtype if first.dtype.is_floating_point else torch.float32
            measured["times"] = measured_times(planner, model, first.device, dtype)  # type: ignore[arg-type]
        return self._with_later(session.plan(params, model, self._budget(), statistics, **measured))

    def _together(self) -> migrate.Attempt:
        """Return what calls the parts of a change of plans: what fails on one rank fails on all."""
        members = self._current_members()
        if not members.all:
            return migrate.alone
        device = members.all[0].param.device
        return lambda function: self._peers.attempt(function, device)

    def _install(self, plan: Plan, *, inherit: bool, attempt: migrate.Attempt = migrate.alone) -> bool:
        """Set a plan, and return whether any state is stored or updated in another way."""
        is_new = not inherit or _assignment(plan) != _assignment(self._plan)
        if is_new:
            self._change_plan(plan, inherit=inherit, attempt=attempt)
        else:
            self._install_plan(plan)
        self._plan_given = False  # a checkpoint's plan is taken over, and migrated only if the settings differ
        self._share_tensors()
        return is_new

    # ---- what planners are told ----

    @property
    def total(self) -> str:
        """With ``total_memory``: bytes per parameter of weights, gradients and state, what each saves, and advice."""
        return "" if self._total is None else self._total.table(self.plan)

    @property
    def _left(self) -> str:
        """What a total budget leaves for state."""
        assert self._total is not None
        return self._total.memory(is_sharded=bool(self._current_members().ranks))

    def _count_new_tensors(self) -> None:
        """Let weights and gradients of another group count in a total budget."""
        if self._total is None:
            return
        before, tensors = self._left, self._total.tensors
        self._total = dataclasses.replace(self._total, tensors=self._tensors(tensors.frozen))
        if self._settings.budget.memory == before:  # replan(memory=...) may have set another one
            self._settings = self._settings.changed(memory=self._left)

    def _tensors(self, frozen: int) -> Tensors:
        dtypes = {member.name: member.param.dtype for member in self.members()}
        return Tensors.of(self._shapes(), dtypes, self._rows_per_rank(), frozen)

    @property
    def _progress(self) -> Progress:
        return Progress(self._steps, self._planned_at, self._failed)

    def _params(self) -> dict[str, Tensor]:
        """Parameters that plans are made for."""
        planned = set(self._names)
        return {member.name: member.param for member in self.members() if member.name in planned}

    def _model(self) -> ModelFacts:
        planned = set(self._names)
        shapes = {name: shape for name, shape in self._shapes().items() if name in planned}
        hyper, one_lr = resume.typical_hyper(self.param_groups)
        facts = dataclasses.replace(self._facts, low_precision=self._low_precision() & planned)
        return dataclasses.replace(facts, shapes=shapes, hyper=hyper, one_lr=one_lr, rows=self._rows_per_rank())

    def _budget(self, held: int = 0) -> Budget:
        """What is left for the parameters that are planned, besides ``held`` bytes of the planner."""
        budget = self._settings.budget
        taken = self._device_bytes(Plan(tuple(self._later_blocks())))
        return dataclasses.replace(budget, reserved=taken + held, planner_bytes=held)

    def _fits(self, plan: Plan) -> bool:
        budget = self._settings.budget
        allowed = budget.device_bytes(self._model().reference_bytes(per_rank=budget.is_per_rank))
        return allowed is None or self._device_bytes(plan) <= allowed

    def _device_bytes(self, plan: Plan) -> int:
        """Bytes that the budget is for."""
        plan = dataclasses.replace(plan, rows=self._rows_per_rank())
        return plan.device_bytes_per_rank if self._settings.budget.is_per_rank else plan.device_bytes

    def _later_blocks(self) -> list[Block]:
        """Blocks of parameters that are not planned: they keep their configuration."""
        planned = set(self._names)
        parts = [{n: s for n, s in block.parameters.items() if n not in planned} for block in self._plan.blocks]
        return [dataclasses.replace(b, parameters=part) for b, part in zip(self._plan.blocks, parts) if part]

    def _with_later(self, plan: Plan) -> Plan:
        blocks = (*plan.blocks, *self._later_blocks())
        assigned = [(name, shape, block) for block in blocks for name, shape in block.parameters.items()]
        advice = {} if self._total is None else {"advice": list(self._total.advice)}
        return groups.plan_of(assigned, {**plan.settings, **advice})

    # ---- ranks ----

    def _agree(self) -> None:
        """Check that all ranks train one model with the same settings, and take the first rank's plan."""
        if not self._peers.answer:
            if self._peers.exist:
                logger.warning(
                    "join() is in use, so ranks that run out of data do not answer: ranks do not compare their "
                    "settings, and each makes its plans by itself, from the gradients that DDP reduces."
                )
            return
        numbers = [
            f"{key}={group[key]!r} in param group {index}"
            for index, group in enumerate(self.param_groups)
            for key in sorted(self.defaults)
            if key in group and not isinstance(group[key], Tensor)
        ]
        alike = {
            "parameters": [f"{member.name} of {member.shape}" for member in self.members()],
            "settings": [f"{key}={value!r}" for key, value in self._settings.plain().items()],
            "splits": [f"{name}: {split}" for name, split in self._facts.splits.items()],
            "hyper-parameters": numbers,
            "progress": [f"{self._steps} steps behind it", f"samples: {self._session.nbytes > 0}"],
        }
        self._peers.check_equal(alike)
        self._facts, first = self._peers.first((self._facts, self._plan))
        # a rank with another plan converts by itself, so in here shards must not wait for the others
        attempt = migrate.alone if self._current_members().ranks else self._together()
        attempt(lambda: first == self._plan or self._install(first, inherit=True))

    # ---- checkpoints and copies ----

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with the plan and the planner's part.

        Returns:
            The state dict.
        """
        self._follow_samples()
        self._share_tensors()
        packed = super().state_dict()
        run = resume.Run(self._settings, self._progress, self._is_stale, self._facts, self._names, self._session)
        text = resume.write(run, self._requested, checkpoint.positions_by_name(self.param_groups))
        checkpoint.write(packed["param_groups"], checkpoint.PLANNER, text)
        return packed

    def _share_tensors(self) -> None:
        """Keep the planner's tensors in the first parameter's state: all checkpoint readers look for tensors there."""
        trained = [member.param for member in self.members() if member.is_trained]
        for param in trained:
            self.state[param].pop(SAMPLES, None)
        if trained and (tensors := resume.tensors_of(self._session)):
            self.state[trained[0]][SAMPLES] = tensors

    def _read_extra(self, loaded: checkpoint.Prepared) -> dict[str, Any]:
        names = [name for name, _ in groups.named_params(self.param_groups)]
        run = resume.read(loaded, self._requested, self._facts, names, self._names)
        # a state dict of step 0 knows no tokens, but this process may have counted them since
        tokens = None if run.facts.tokens or run.progress.steps else self._facts.tokens
        counts = tokens is not None and run.settings.planner.counts_tokens
        facts = run.facts.with_tokens(tokens)
        if self._splits_given:
            facts = dataclasses.replace(facts, splits=matched(self._splits, facts.shapes))
        return {
            "_settings": run.settings,
            "_facts": facts,
            "_names": run.planned,
            "_session": run.session,
            "_steps": run.progress.steps,
            "_planned_at": run.progress.planned_at,
            "_failed": run.progress.failed,
            "_is_stale": run.is_stale or counts,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._is_ready = False
        if "_tokens" not in state and self._tokens is not None and (self._facts.tokens or self._steps):
            self._tokens.stop()  # a resumed run knows them
            self._tokens = None
        self._share_tensors()

    def __getstate__(self) -> dict[str, Any]:
        own = (
            "_requested",
            "_settings",
            "_verbose",
            "_peers",
            "_names",
            "_facts",
            "_session",
            "_tokens",
            "_planned_at",
            "_failed",
            "_is_stale",
            "_total",
        )
        return super().__getstate__() | {name: self.__dict__[name] for name in own}


def _assignment(plan: Plan) -> dict[str, tuple[object, ...]]:
    return {name: (block.configuration, block.host, block.lr_scale) for name, block in plan.by_parameter}

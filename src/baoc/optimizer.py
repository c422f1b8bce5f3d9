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
from baoc.core.plan import Plan, PlanError
from baoc.core.sharding import local
from baoc.core.spec import DEFAULT_BETAS
from baoc.core.splits import Request, matched
from baoc.core.text import names_checked, notice, one_line
from baoc.optim import agreement, checkpoint, groups, migrate
from baoc.optim.groups import Group
from baoc.optim.optimizer import BlockOptimizer
from baoc.optim.state import SAMPLES
from baoc.planners.base import AUTO, Budget, Memory, Planner, Progress
from baoc.planners.effects import EffectPlanner
from baoc.planners.model_facts import ModelFacts, TokenCounter
from baoc.planners.paper.planner import PaperPlanner, PaperSession
from baoc.planners.paper.statistics import GradientStatistics, StatisticsError
from baoc.planners.total import Total
from baoc.planning import Run, Settings, tensors_in

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
        settings = Settings(Budget(memory, host_memory), EffectPlanner()).changed(planner=planner)
        self._verbose, self._peers, self._is_ready = verbose, agreement.Peers(process_group), False
        self._joined: list[str] = []  # parameters to plan, from groups without a configuration of their own
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        self._setup(params, defaults, {}, kernel=kernel, on_nonfinite=on_nonfinite, split=split, peers=self._peers)
        members, total = self._current_members(), None
        if total_memory is not None:
            everything = params.parameters() if isinstance(params, nn.Module) else ()
            frozen = sum(local(param).nbytes for param in everything if not param.requires_grad)
            total = Total(total_memory, tensors_in(members, frozen), activations, gradients)
        planned = self.__dict__.pop("_joined")
        named = {member.name: member.param for member in members.all if member.name in planned}
        facts = ModelFacts.of(params if isinstance(params, nn.Module) else named)
        facts = dataclasses.replace(facts, splits=matched(self._assignment.splits, members.shapes))
        self._run = Run.started(settings, facts, planned, members, total)
        self._requested = self._run.settings
        self._install(self._run.first_plan(members), inherit=False)
        counts = settings.planner.counts_tokens
        self._tokens = TokenCounter(params) if isinstance(params, nn.Module) and counts else None
        until = ", until the warm-up ends" if self.is_warming_up else ""
        notice(f"{one_line(self.plan)}{until}. print(optimizer.plan) shows it", quiet=not verbose)

    # ---- steps ----

    @torch.no_grad()
    def _make_step(self, *, must_know: bool = False) -> bool:
        self._begin()
        is_watching = self._run.session.is_watching
        was_made = super()._make_step(must_know=must_know or is_watching)
        if was_made and is_watching:
            self._observe()
        return was_made

    def _begin(self) -> None:
        if not self._is_ready:
            self._prepare_step()

    @property
    def _obstacle_to_release(self) -> str | None:
        planner = self._run.settings.planner
        if not planner.reads_gradients:
            return None
        name = type(planner).__name__
        return f"{name} samples them in optimizer.step(). Use the default planner, or baoc.make_plan(...) beforehand."

    def _prepare_step(self) -> None:
        """Before the first step, and after a load: agree with other ranks, and plan if the plan is out of date."""
        self._peers.find_wrappers(member.param for member in self.members())
        self._agree()
        if self.is_warming_up and not self._steps:  # the model may have moved to another device
            self._run = self._run.restarted(self._current_members())
            self._share_tensors()
        if self._tokens is not None:
            tokens = self._tokens.stop()
            if ranks := self._current_members().ranks:  # they share the update, so their tokens add up
                count = torch.tensor(tokens or 0, dtype=torch.int64, device=self.members()[0].param.device)
                tokens = int(ranks[0].sum(count)) or None
            # where ranks do not answer, their tokens are unknown, and all ranks must make the same plan
            tokens = None if self._peers.exist and not self._peers.answer else self._peers.first(tokens)
            counts = tokens is not None and self._run.settings.planner.counts_tokens and not self._assignment.is_given
            facts, self._tokens = self._run.facts.with_tokens(tokens), None
            self._run = self._run.changed(facts=facts, is_stale=self._run.is_stale or counts)
        if self._run.is_stale:
            self._run = self._run.changed(is_stale=False)
            if self.is_warming_up:
                plan = self._peers.decide(lambda: self._run.first_plan(self._current_members()))
                self._install(plan, inherit=True, attempt=self._together())
            else:
                self._plan_again()
        self._is_ready = True

    def _observe(self) -> None:
        """Let the planner read the gradients of a step that was made, and plan when it is time."""
        self._follow_samples()
        run, members = self._run, self._current_members()
        params = run.params(members)
        run.session.observe(params)
        is_due = run.session.is_due(self._progress, params, run.model(members))
        if run.settings.planner.reads_gradients:
            is_due = self._peers.first(is_due)
        if is_due:
            self._plan_again()

    def _follow_samples(self) -> None:
        """Sample anew if parameters have left the optimizer since sampling began."""
        session, members = self._run.session, self._current_members()
        if isinstance(session, PaperSession) and not session.is_of(self._run.params(members)):
            self._run = self._run.restarted(members)
            self._share_tensors()

    def _rename(self, names: Mapping[str, str]) -> None:
        if "_run" in self.__dict__:  # else in torch's constructor
            self._run = self._run.renamed(names)

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
        before = self._run
        try:
            self._run = before.changed(settings=before.settings.changed(memory, host_memory, planner))
            if self._release is not None and self._obstacle_to_release:
                raise PlanError(f"gradients are released: {self._obstacle_to_release}")
            if planner is not None:
                self._run = self._run.restarted(self._current_members())
                self._run.session.take_over(before.session)
            plan = self._peers.decide(lambda: self._run.plan(self._current_members(), statistics))
            self._install(plan, inherit=inherit, attempt=self._together())
        except BaseException:
            self._run = before
            raise
        self._note_plan()
        return self.plan

    @property
    def statistics(self) -> GradientStatistics:
        """Gradient statistics of this run, from a :class:`~baoc.PaperPlanner`. With sharded parameters, all ranks ask.

        Raises:
            StatisticsError: the planner reads no gradients, or has seen none.
        """
        session, members = self._run.session, self._current_members()
        if not isinstance(session, PaperSession):
            raise StatisticsError(
                f"{type(self._run.settings.planner).__name__} reads no gradients. Use planner=baoc.PaperPlanner(), or "
                "baoc.collect_statistics(...) apart from training."
            )
        return session.current_statistics(self._run.params(members), self._run.model(members))

    @property
    def is_warming_up(self) -> bool:
        """Whether the planner is still to make the plan that training goes on with."""
        return self._run.is_warming_up

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
        run, budget = self._run, self._run.settings.budget
        reference = run.model(self._current_members()).reference_bytes(per_rank=budget.is_per_rank)
        more = {
            "planner_bytes": run.session.nbytes,
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
        if "_run" not in self.__dict__:  # torch's constructor
            new = self._join_group(param_group)
            self._joined += new if is_planned else []
            checkpoint.reserve(self.param_groups, checkpoint.PLANNER)
            return
        assignment, count = self._assignment, len(self.param_groups)
        kept = {name: getattr(assignment, name) for name in ("plan", "is_given", "is_installed")}
        before = {name: self.__dict__[name] for name in ("_run", "_is_ready")}
        joined: Plan | None = None
        try:
            assignment.is_installed = False  # allocates nothing until all parameters have a plan
            new = self._join_group(param_group)
            joined, members = assignment.plan, self._current_members()
            self._run = self._run.with_new_tensors(members)
            is_planned = is_planned and not (self._run.settings.planner.reads_gradients and self._steps)
            if is_planned:
                self._run = self._run.with_parameters(new, self._assignment.splits, members)
            make = self._run.first_plan if self.is_warming_up else self._run.plan
            self._is_ready = False
            self._install(make(members) if is_planned or not self._run.fits(members, joined) else joined, inherit=True)
        except BaseException as error:
            del self.param_groups[count:]
            if joined is not None and assignment.plan is not joined:
                kept.pop("plan")  # some state was converted, and the plan says which
            assignment.__dict__.update(kept)
            self.__dict__.update(before)
            if isinstance(error, PlanError):
                raise PlanError(f"there is no room for the parameters of another group: {error}") from error
            raise

    def _plan_again(self) -> None:
        """Plan as the training goes. If no plan can be made, training goes on with the current one."""
        try:
            # without gradients all ranks come to one plan by themselves, even those that others no longer wait for
            run, members = self._run, self._current_members()
            is_shared = run.settings.planner.reads_gradients or not self._steps
            plan = self._peers.decide(lambda: run.plan(members)) if is_shared else run.plan(members)
        except Exception as error:
            self._run = self._run.changed(progress=Progress(self._steps, self._steps, failed=True))
            logger.warning("no plan could be made, so training goes on with the current one: %s", error)
            return
        restarts = self._run.restarts and _by_parameter(plan) != _by_parameter(self._assignment.plan)
        is_new = self._install(plan, inherit=not restarts, attempt=self._together())
        self._note_plan()
        if is_new:
            text = f"new plan at step {self._steps}: {one_line(self.plan)}. print(optimizer.plan) shows it"
            notice(text, quiet=not self._verbose)

    def _note_plan(self) -> None:
        self._run = self._run.changed(progress=Progress(self._steps, self._steps))
        self._run.session.planned(self.plan)
        self._share_tensors()

    def _together(self) -> migrate.Attempt:
        """Return what calls the parts of a change of plans: what fails on one rank fails on all."""
        members = self._current_members()
        if not members.all:
            return migrate.alone
        device = members.all[0].param.device
        return lambda function: self._peers.attempt(function, device)

    def _install(self, plan: Plan, *, inherit: bool, attempt: migrate.Attempt = migrate.alone) -> bool:
        """Set a plan, and return whether any state is stored or updated in another way."""
        is_new = not inherit or _by_parameter(plan) != _by_parameter(self._assignment.plan)
        if is_new:
            self._change_plan(plan, inherit=inherit, attempt=attempt)
        else:
            self._install_plan(plan)
        self._assignment.is_given = False  # a checkpoint's plan is taken over, and migrated only if the settings differ
        self._share_tensors()
        return is_new

    # ---- what planners are told ----

    @property
    def total(self) -> str:
        """With ``total_memory``: bytes per parameter of weights, gradients and state, what each saves, and advice."""
        return "" if self._run.total is None else self._run.total.table(self.plan)

    @property
    def _progress(self) -> Progress:
        return dataclasses.replace(self._run.progress, steps=self._steps)

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
            "settings": [f"{key}={value!r}" for key, value in self._run.settings.plain().items()],
            "splits": [f"{name}: {split}" for name, split in self._run.facts.splits.items()],
            "hyper-parameters": numbers,
            "progress": [f"{self._steps} steps behind it", f"samples: {self._run.session.nbytes > 0}"],
        }
        self._peers.check_equal(alike)
        facts, first = self._peers.first((self._run.facts, self._assignment.plan))
        self._run = self._run.changed(facts=facts)
        # a rank with another plan converts by itself, so in here shards must not wait for the others
        attempt = migrate.alone if self._current_members().ranks else self._together()
        attempt(lambda: first == self._assignment.plan or self._install(first, inherit=True))

    # ---- checkpoints and copies ----

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with the plan and the planner's part.

        Returns:
            The state dict.
        """
        self._follow_samples()
        self._share_tensors()
        packed = super().state_dict()
        run = self._run.changed(progress=self._progress)
        text = resume.write(run, self._requested, checkpoint.positions_by_name(self.param_groups))
        checkpoint.write(packed["param_groups"], checkpoint.PLANNER, text)
        return packed

    def _share_tensors(self) -> None:
        """Keep the planner's tensors in the first parameter's state: all checkpoint readers look for tensors there."""
        trained = [member.param for member in self.members() if member.is_trained]
        for param in trained:
            self.state[param].pop(SAMPLES, None)
        if trained and (tensors := resume.tensors_of(self._run.session)):
            self.state[trained[0]][SAMPLES] = tensors

    def _read_extra(self, loaded: checkpoint.Prepared) -> dict[str, Any]:
        names = [name for name, _ in groups.named_params(self.param_groups)]
        own = self._run
        run = resume.read(loaded, self._requested, own.facts, names, own.planned)
        # a state dict of step 0 knows no tokens, but this process may have counted them since
        tokens = None if run.facts.tokens or run.progress.steps else own.facts.tokens
        counts = tokens is not None and run.settings.planner.counts_tokens
        facts = run.facts.with_tokens(tokens)
        if self._assignment.splits_given:
            facts = dataclasses.replace(facts, splits=matched(self._assignment.splits, facts.shapes))
        run = run.changed(facts=facts, is_stale=run.is_stale or counts, total=own.total)
        return {"_run": run, "_steps": run.progress.steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._is_ready = False
        if "_tokens" not in state and self._tokens is not None and (self._run.facts.tokens or self._steps):
            self._tokens.stop()  # a resumed run knows them
            self._tokens = None
        self._share_tensors()

    def __getstate__(self) -> dict[str, Any]:
        own = ("_requested", "_verbose", "_peers", "_tokens", "_run")
        return super().__getstate__() | {name: self.__dict__[name] for name in own}


def _by_parameter(plan: Plan) -> dict[str, tuple[object, ...]]:
    return {name: (block.configuration, block.host, block.lr_scale) for name, block in plan.by_parameter}

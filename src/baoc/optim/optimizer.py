"""``BlockOptimizer``: a ``torch.optim.Optimizer`` that updates each block of parameters with its own configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from baoc.core.configuration import Configuration, parse
from baoc.core.mechanisms import known_settings
from baoc.core.plan import Plan, one_line
from baoc.core.roles import Role, role_of, roles_of
from baoc.core.sharding import fullest
from baoc.core.spec import DEFAULT_BETAS, Hyper, Shape, real_shape
from baoc.core.text import check_names
from baoc.optim import blocks, checkpoint, checks, groups, kernels, migrate
from baoc.optim.engine import Engine
from baoc.optim.groups import Group, Member, Roster
from baoc.optim.guard import Guard
from baoc.optim.kernels import graphs
from baoc.optim.kernels.job import Job, Numbers, advance_ages
from baoc.optim.lr_match import lr_scales
from baoc.optim.measure import held_bytes, state_bytes
from baoc.optim.offload import BUCKET_BYTES, bucket_bytes
from baoc.optim.rehearsal import is_rehearsal
from baoc.optim.state import new_state
from baoc.optim.watch import Watch, strained_shares

DEFAULT_CONFIGURATION = "adamw-32"
_ARGUMENTS = (
    *("params", "lr", "betas", "eps", "weight_decay", "plan", "maximize", "kernel", "on_nonfinite"),
    *("offload", "offload_bucket"),
)


class BlockOptimizer(torch.optim.Optimizer):
    """Updates each block of parameters with its own mechanism and state formats.

    Args:
        params: a module, ``model.parameters()``, ``model.named_parameters()``, or param groups. A group may have a key
            ``configuration`` of its own.
        lr, betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``. SGD's momentum is ``betas[0]``.
        plan: a :class:`~baoc.Plan`, or one configuration for all parameters, such as ``"adamw-8"``, or ``"muon-8 else
            adamw-8"`` where it does not suit all. Without one every parameter gets ``adamw-32``, and
            ``load_state_dict`` takes over the plan of the checkpoint; with one, a checkpoint made under another plan is
            migrated.
        kernel: ``"auto"``, ``"native"``, ``"triton"``, ``"compiled"`` or ``"eager"``; see :attr:`kernel`.
        offload: whether state is in host memory while parameters are on a device: of all blocks (``True``), of none
            (``False``), or of those whose :attr:`~baoc.Block.host` the plan sets. Gradients are then copied in buckets
            to the host, which makes the update, and parameters there and back. On a CPU it changes nothing.
        offload_bucket: how much of host memory a bucket takes, such as ``"64MiB"``; there are three.
        on_nonfinite: what becomes of a step with a gradient that is no finite number: ``"step"`` makes it, as torch
            does; ``"skip"`` leaves weights, state and ages as they are; ``"raise"`` stops before anything has changed.
            Each is counted in :meth:`metrics` and said once. See :class:`~baoc.optim.guard.Guard`.
        settings: hyper-parameters that belong to mechanisms, such as ``update_rms``, ``nesterov_momentum``,
            ``momentum_rise`` and ``newton_schulz`` (``momentum`` and ``ns_coefficients`` of ``torch.optim.Muon``), or
            ``beta2_decay``, ``adafactor_eps`` and ``clip_threshold`` (``beta2_decay``, ``eps`` and ``d`` of
            ``torch.optim.Adafactor``).

    Example:
        >>> model = nn.Linear(256, 128)
        >>> optimizer = BlockOptimizer(model, lr=1e-3, plan="adamw-8")
        >>> model(torch.randn(4, 256)).square().mean().backward()
        >>> optimizer.step()
        >>> print(optimizer.plan)
        block  tensors  params  configuration     state  lr
        -----  -------  ------  -------------  --------  --
        all          2   32.9K  adamw-8        65.2 KiB   -
        65.2 KiB of state, 50.6% of AdamW16's 129.0 KiB
    """

    _plans_later: ClassVar[bool] = False
    """For subclasses: parameters that join get their configuration, and so their state, from a plan made after that."""

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = DEFAULT_BETAS,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        plan: Plan | Configuration | str | None = None,
        maximize: bool = False,
        kernel: str = "auto",
        on_nonfinite: str = "step",
        offload: bool | None = None,
        offload_bucket: int | str = BUCKET_BYTES,
        **settings: Any,
    ) -> None:
        own = {setting.name: setting.default for setting in known_settings().values()}
        check_names(settings, type(self).__name__, (*_ARGUMENTS, *own))
        self._engine = Engine(kernel, bucket_bytes(offload_bucket))
        self._offload = checks.checked_offload(offload)
        self._guard = Guard(on_nonfinite)
        self._watch = Watch()
        self._plan_given = plan is not None
        self._default = parse(DEFAULT_CONFIGURATION if plan is None or isinstance(plan, Plan) else plan)
        self._plan = Plan(())
        self._has_stepped = False
        self._roster: Roster | None = None
        self._complete: Roster | None = None  # the roster all of whose members have state
        self._roles = roles_of(params) if isinstance(params, nn.Module) else {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            **own,
            **settings,
        }
        groups.check_hyper(defaults, "the defaults")
        super().__init__(groups.named(params), defaults)
        shapes = self._shapes()
        if isinstance(plan, Plan):
            checks.refuse_two_answers(self.members(), Plan.uniform(self._default, shapes, self._roles_of(shapes)))
            plan = plan if offload is None else plan.offloaded(host=offload)
            plan.check(shapes)
            checks.refuse_offloading(self.members(), plan)
            self._plan = plan
        else:
            Plan.refuse_unsuited(self._default, shapes, self._roles_of(shapes))
        if plan is not None:
            checks.refuse_idle(self._plan, settings)
        if not self._plans_later:
            self._allocate_sharded()

    # ---- the torch.optim.Optimizer contract ----

    def add_param_group(self, param_group: Group) -> None:
        """As in torch. ``param_group["configuration"]`` says what its parameters are updated with."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        index = len(self.param_groups)
        groups.check_hyper({**self.defaults, **param_group}, f"param group {index}")
        group = dict(param_group)
        configuration = parse(group.pop("configuration", self._default))
        super().add_param_group(group)
        try:
            named = [(name, param) for name, param in groups.named_params(self.param_groups) if name not in self._plan]
            plan = self._extended(self._plan, index, configuration, named)
            checks.refuse_offloading(groups.members(self.param_groups, plan), plan)
        except Exception:
            del self.param_groups[index]  # refused: as if it had never come
            raise
        checkpoint.reserve(self.param_groups, checkpoint.PLAN)
        self._plan_given |= "configuration" in param_group
        self._plan = plan
        if self._complete is not None and not self._plans_later:
            self._allocate_sharded()

    def _extended(
        self, plan: Plan, index: int, configuration: Configuration, named: Iterable[tuple[str, Tensor]]
    ) -> Plan:
        shapes = {name: real_shape(param) for name, param in named}
        return blocks.extended(plan, index, configuration, shapes, self._roles_of(shapes), host=bool(self._offload))

    def _roles_of(self, shapes: Mapping[str, Shape]) -> dict[str, Role]:
        return {name: self._roles.get(name) or role_of(shape, name) for name, shape in shapes.items()}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one optimization step. Everything is checked before anything is changed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.settle()
        self._before_step()
        hypers = {id(group): groups.hyper(group, f"param group {i}") for i, group in enumerate(self.param_groups)}
        stepping = [member for member in self.members() if member.param.grad is not None]
        complete = self._complete is self._roster
        by_device: dict[torch.device, list[Member]] = {}
        for member in stepping:
            checks.check_tensors(member)
            state = self.state.get(member.param)
            device = member.param.device
            by_device.setdefault(device, []).append(member)
            if state:
                checks.check_state(member, member.place.held(state))
            else:
                complete &= not member.layout.formats
        kernel_of = {device: self._engine.kernel_for(device, members) for device, members in by_device.items()}
        if stepping and not complete:
            self._allocate()
        if is_rehearsal(stepping, self.state, hypers.values()):
            return loss
        known: dict[object, Numbers] = {}
        jobs = {
            device: [self._job(member, hypers[id(member.group)], known) for member in members]
            for device, members in by_device.items()
        }
        ranks = dict.fromkeys(member.place.ranks for member in self.members() if member.place.ranks)
        if any(map(graphs.is_capturing, kernel_of)):  # launches are recorded: no step is made
            self._guard.refuse_capture()
            for device, kernel in kernel_of.items():
                kernels.record(kernel, jobs[device])
            return loss
        late = self._may_learn_late() and kernels.reads_flag(kernel_of.values())
        if not self._guard.admits(jobs, ranks, late):
            self._after_skip()
            return loss
        self._before_update(stepping)
        self._watch.begin(stepping)
        flag = self._guard.flag
        suspects = {
            device: jobs[device] for device, kernel in kernel_of.items() if kernels.run(kernel, jobs[device], flag)
        }
        for device in kernel_of:
            advance_ages(jobs[device])
        self._guard.note(suspects)
        self._watch.end()
        self._has_stepped |= bool(stepping) and flag is None
        self._after_update()
        return loss

    def settle(self) -> None:
        """Learn whether the last step was made, where a GPU has decided that by itself (``on_nonfinite="skip"``).

        Whatever reads or writes state through this class does it first. Only who looks into :attr:`state` by hand may
        find ages that count a step which was left out. See ``docs/guard-rails.md``.
        """
        was_made = self._guard.settle()
        if was_made is not None:
            self._has_stepped |= was_made
            if not was_made:
                self._after_late_skip()

    def _before_step(self) -> None:
        """For subclasses: gradients are there, and nothing has been read yet."""

    def _before_update(self, stepping: Sequence[Member]) -> None:
        """For subclasses: gradients as the update will see them."""

    def _after_skip(self) -> None:
        """For subclasses: gradients were not finite, and nothing has changed."""

    def _may_learn_late(self) -> bool:
        """For subclasses: whether nothing that they do needs to know at once if a step is made."""
        return True

    def _after_late_skip(self) -> None:
        """For subclasses: the last update was none."""

    def _after_update(self) -> None:
        """For subclasses: a real step was made."""

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with the plan, and with an empty entry for a stateless parameter: distributed checkpoints would
        miss it.
        """
        self.settle()
        packed = super().state_dict()
        checkpoint.write_plan(packed["param_groups"], self.plan)
        if any(self.state.get(member.param) for member in self.members()):
            for key in (key for group in packed["param_groups"] for key in group["params"]):
                packed["state"].setdefault(key, {})
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, or of ``torch.optim``'s AdamW, Adam, SGD or Adafactor.

        torch's own loader would cast codes and scales to the parameter's dtype, so this one stands in its place, hooks
        included. The checkpoint is checked as a whole before anything is changed. torch's state dicts do not say which
        optimizer wrote them: their state is moved into the configurations this one has.
        """
        self.settle()
        state_dict = checkpoint.copied(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        own_plan = self.plan if self._plan_given else None
        loaded = checkpoint.prepare(state_dict, self.members(), self.param_groups, own_plan, self._offload)
        own = self._read_own(loaded)
        self.__setstate__({"state": loaded.state, "param_groups": loaded.param_groups, "_plan": loaded.plan, **own})
        self._allocate_sharded()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def take_layout(self, state_dict: dict[str, Any]) -> None:
        """Take over the plan of a state dict that has no state yet, and make room for what it would have."""
        self._plan_given = False
        self.load_state_dict(state_dict)
        self._allocate()

    def _read_own(self, loaded: checkpoint.Prepared) -> dict[str, Any]:
        """For subclasses: attributes to be set by a checkpoint; an error refuses all of it."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        own = ("_engine", "_offload", "_guard", "_watch", "_plan_given", "_default", "_plan", "_roles", "_has_stepped")
        return super().__getstate__() | {name: self.__dict__[name] for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._roster = self._complete = None

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ({one_line(self.plan)}"]
        hidden = ("params", "param_names", *checkpoint.CARRIED)
        usual = {"maximize": False} | {setting.name: setting.default for setting in known_settings().values()}
        for index, group in enumerate(self.param_groups):
            shown = {key: group[key] for key in group if key not in hidden}
            numbers = [f"{key}: {value}" for key, value in shown.items() if usual.get(key, self) != value]
            lines.append(f"Parameter Group {index}: {len(group['params'])} tensors, {', '.join(numbers)}")
        return "\n".join([*lines, ")"])

    # ---- plans ----

    @property
    def plan(self) -> Plan:
        """What every parameter is updated with now."""
        rows = self._rows_per_rank()
        return self._plan if self._plan.rows == rows else dataclasses.replace(self._plan, rows=rows)

    @property
    def is_warming_up(self) -> bool:
        """Whether a plan is still to be made: :class:`BAOC` makes its own after a while."""
        return False

    @torch.no_grad()
    def set_plan(self, plan: Plan | Configuration | str, *, inherit: bool = True) -> None:
        """Change configurations in the middle of training.

        State moves over one parameter at a time; ``inherit=False`` restarts it. A block whose ``lr_scale`` is ``None``
        gets the one under which its next update is as long as its last. If it is interrupted, every parameter is
        either in its old block or in its new one, and training can go on. A plan also says what is offloaded; where it
        is spelled, that stays as the optimizer was told.

        >>> model = nn.Linear(64, 64)
        >>> optimizer = BlockOptimizer(model, plan="adamw-32")
        >>> optimizer.set_plan("sgdm-8")
        >>> optimizer.plan.state_bytes
        4416
        """
        self.settle()
        shapes = self._shapes()
        if not isinstance(plan, Plan):
            roles = self._roles_of(shapes)
            Plan.refuse_unsuited(parse(plan), shapes, roles)
            plan = Plan.uniform(plan, shapes, roles).offloaded(host=bool(self._offload))
        plan.check(shapes)
        checks.refuse_offloading(self.members(), plan)
        if inherit:
            self._migrate(plan)
        else:
            for member in self.members():
                self.state.pop(member.param, None)
            self._plan = plan
        self._plan_given = True
        self._allocate_sharded()

    def _migrate(self, plan: Plan) -> None:
        members = self.members()
        holdings = [
            migrate.holding_of(member, self.state.get(member.param, {}), self._has_stepped) for member in members
        ]
        moves = [
            migrate.Move(holding, plan.block_of(member.name), member.lr_scale)
            for holding, member in zip(holdings, members)
        ]
        scales = lr_scales(moves)
        new_blocks = [dataclasses.replace(move.block, lr_scale=scales[move.block.name]) for move in moves]
        in_order = migrate.order(moves)
        left = dict(enumerate(moves))
        del holdings, moves  # or all old state would live to the end
        moved: dict[int, dict[str, Any]] = {}
        try:
            for index in in_order:
                move = left.pop(index)
                moved[index] = move.convert()
                if move.holding.state or moved[index]:
                    self.state[members[index].param] = moved[index]
        finally:  # wherever it was interrupted: what has its new state is in its new block, the rest where it was
            for index, state in moved.items():
                if state or self.state.get(members[index].param):
                    self.state[members[index].param] = state
            assigned = [
                (member.name, member.shape, new_blocks[index] if index in moved else member.block)
                for index, member in enumerate(members)
            ]
            self._plan = blocks.plan_of(assigned, plan.settings if len(moved) == len(members) else self._plan.settings)

    # ---- kernels ----

    @property
    def kernel(self) -> str:
        """Which kernel runs on which device, and why; and what it leaves to torch operations, which are slower."""
        return self._engine.describe(self.members())

    # ---- what a logger shows ----

    def metrics(self) -> dict[str, float]:
        """Numbers of the run so far, flat, for TensorBoard, W&B and the like.

        Bytes of state on this rank, and where blocks are offloaded those in host memory, and those of the buffers
        through which they are updated; steps that were not finite, skipped or clipped; and of every block the RMS of
        its last update (absolute, decay included, from the second call on) and the share of its int8 and int4 groups
        that are strained. All is read off small samples when it is asked for. On a GPU it waits for the device.

        >>> model = nn.Linear(64, 64)
        >>> optimizer = BlockOptimizer(model, plan="adamw-8")
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.metrics()
        {'state_bytes': 8832.0, 'nonfinite_steps': 0.0, 'skipped_steps': 0.0, 'clipped_steps': 0.0, 'strained/all': 0.0}
        """
        self.settle()
        counts = self._guard.counts
        numbers = {
            "state_bytes": state_bytes(self),
            "nonfinite_steps": counts.nonfinite,
            "skipped_steps": counts.skipped,
            "clipped_steps": counts.clipped,
            **self._host_numbers(),
            **{f"update_rms/{block}": rms for block, rms in self._watch.rms().items()},
            **{f"strained/{block}": share for block, share in strained_shares(self.members(), self.state).items()},
        }
        return {key: float(number) for key, number in numbers.items()}

    def _host_numbers(self) -> dict[str, float]:
        on_host = [member for member in self.members() if member.block.host]
        held = [self.state[member.param].get(key) for member in on_host for key in member.layout.buffers]
        return {"host_bytes": held_bytes(held), "staging_bytes": self._engine.staging_bytes} if on_host else {}

    # ---- state ----

    def members(self) -> tuple[Member, ...]:
        """Every parameter with its name, group and block, in order."""
        if self._roster is None or not self._roster.is_current(self.param_groups, self._plan):
            self._follow_groups()
            self._roster = Roster(self.param_groups, self._plan)
        return self._roster.members

    def _follow_groups(self) -> None:
        """Groups may come and go without our being asked: the plan is of the parameters that are there."""
        named = dict(groups.named_params(self.param_groups))
        new = [(name, param) for name, param in named.items() if name not in self._plan]
        if new or len(named) != sum(len(block.parameters) for block in self._plan.blocks):
            kept = blocks.without_others(self._plan, {name: real_shape(param) for name, param in named.items()})
            self._plan = self._extended(kept, len(self.param_groups) - 1, self._default, new)

    def _rows_per_rank(self) -> dict[str, int]:
        """How many rows of every sharded parameter the fullest rank has."""
        places = ((member.name, member.shape, member.place.ranks) for member in self.members())
        return {name: fullest(shape[0], ranks.size) for name, shape, ranks in places if ranks is not None}

    def _shapes(self) -> dict[str, Shape]:
        return {member.name: member.shape for member in self.members()}

    def _allocate_sharded(self) -> None:
        """State of sharded parameters is there from the start: ranks must agree on what a checkpoint has."""
        if any(member.place.ranks for member in self.members()):
            self._allocate()

    def _allocate(self) -> None:
        """Give state to every trainable parameter at once, in its plan's layout.

        A half-filled optimizer could not be told from a damaged one, and distributed checkpoint readers need every
        tensor to be there before they read.
        """
        for member in self.members():
            if not member.layout.formats or self.state.get(member.param):
                continue
            if member.param.requires_grad or member.param.grad is not None:
                self.state[member.param] = new_state(member.layout, member.state_device, member.place)
        self._complete = self._roster

    def _job(self, member: Member, hyper: Hyper, known: dict[object, Numbers]) -> Job:
        param, place = member.param, member.place
        grad = cast(Tensor, param.grad)
        state = self.state.get(param, {})
        if member.needs_view:
            param, grad = place.local(param), place.local(grad)
        settings = member.block.lr_scale, bool(member.group["maximize"])
        return Job.of(
            member.layout, param, grad, state, hyper, *settings, place, member.name, known, member.is_offloaded
        )

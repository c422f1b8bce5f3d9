"""``BlockOptimizer``: a ``torch.optim.Optimizer`` that updates each block of parameters with its own configuration."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from baoc.core.configuration import Configuration, parse
from baoc.core.plan import Block, Plan, PlanError
from baoc.core.spec import DEFAULT_BETAS, Hyper, Mechanism, Shape, rounding_phase
from baoc.core.text import human_bytes
from baoc.optim import checkpoint, groups, kernels, migrate
from baoc.optim.groups import ASSIGNMENTS, PLAN_SETTINGS, Group, Member, Roster
from baoc.optim.kernels.update import Job

logger = logging.getLogger("baoc")

DEFAULT_CONFIGURATION = "adamw-32"


class BlockOptimizer(torch.optim.Optimizer):
    """Updates each block of parameters with its own mechanism and state formats.

    Args:
        params: a module, ``model.parameters()``, ``model.named_parameters()``, or param groups. A group may have a key
            ``configuration`` of its own.
        lr, betas, eps, weight_decay, maximize: as in ``torch.optim.AdamW``. SGD's momentum is ``betas[0]``.
        plan: a :class:`~baoc.Plan`, or one configuration for all parameters. Without one every parameter gets
            ``adamw-32``, and ``load_state_dict`` takes over the plan of the checkpoint; with one, a checkpoint made
            under another plan is migrated.
        beta2_decay, adafactor_eps, clip_threshold: ``beta2_decay``, ``eps`` and ``d`` of ``torch.optim.Adafactor``.
        kernel: ``"auto"``, ``"native"``, ``"compiled"`` or ``"eager"``; see :attr:`kernel`.

    Example:
        >>> model = nn.Linear(256, 128)
        >>> optimizer = BlockOptimizer(model, lr=1e-3, plan="adamw-8")
        >>> model(torch.randn(4, 256)).square().mean().backward()
        >>> optimizer.step()
        >>> print(optimizer.plan)
        block  tensors  parameters  configuration            state  lr scale
        -----  -------  ----------  --------------------  --------  --------
        all          2       32.9K  adamw[m=int8,v=int8]  66.0 KiB         -
        66.0 KiB of state, 51.2% of AdamW16's 129.0 KiB
    """

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
        beta2_decay: float = -0.8,
        adafactor_eps: tuple[float | None, float] = (None, 1e-3),
        clip_threshold: float = 1.0,
        kernel: str = "auto",
    ) -> None:
        kernels.check_request(kernel)
        self._kernel_request = kernel
        self._plan_given = plan is not None
        self._default = parse(DEFAULT_CONFIGURATION if plan is None or isinstance(plan, Plan) else plan)
        self._devices_reported: set[str] = set()
        self._roster: Roster | None = None
        self._complete: Roster | None = None  # the roster all of whose members have state
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "beta2_decay": beta2_decay,
            "adafactor_eps": adafactor_eps,
            "clip_threshold": clip_threshold,
        }
        groups.check_hyper(defaults, "the defaults")
        super().__init__(groups.named(params), defaults)
        if isinstance(plan, Plan):
            self._refuse_two_answers()
            plan.check(self._shapes())
            self._assign(plan, {name: plan.block_of(name) for name in self._shapes()})

    # ---- the torch.optim.Optimizer contract ----

    def add_param_group(self, param_group: Group) -> None:
        """As in torch. ``param_group["configuration"]`` says what its parameters are updated with."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        index = len(self.param_groups)
        groups.check_hyper({**self.defaults, **param_group}, f"param group {index}")
        group = dict(param_group)
        self._plan_given |= "configuration" in group
        configuration = parse(group.pop("configuration", self._default))
        super().add_param_group(group)
        self.param_groups[index].setdefault(PLAN_SETTINGS, {})
        taken = {entry["block"] for earlier in self.param_groups[:index] for entry in earlier[ASSIGNMENTS]}
        block = f"group {index}" if index else "all"
        while block in taken:
            block += "'"
        self.param_groups[index][ASSIGNMENTS] = [
            groups.assignment(Block(block, configuration, {})) for _ in self.param_groups[index]["params"]
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one optimization step. Everything is checked before anything is changed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        hypers = {id(group): groups.hyper(group, f"param group {i}") for i, group in enumerate(self.param_groups)}
        stepping = [member for member in self._members() if member.param.grad is not None]
        complete = self._complete is self._roster
        for member in stepping:
            _check_gradient(member)
            state = self.state.get(member.param)
            complete &= bool(state) or not member.layout.slots
            _check_state(member, state)
        kernel_of = {device: self._kernel_for(device) for device in {member.param.device for member in stepping}}
        if stepping and not complete:
            self._allocate()
        if self._is_rehearsal(stepping, [hypers[id(member.group)] for member in stepping]):
            return loss
        self._before_update(stepping)
        numbers = _Numbers(hypers)
        for device, kernel in kernel_of.items():
            # one parameter after the other, so that each is still in the cache when its job is run
            kernel.run(self._job(member, numbers) for member in stepping if member.param.device == device)
        self._after_update()
        return loss

    def _before_update(self, stepping: Sequence[Member]) -> None:
        """For subclasses: gradients as the update will see them."""

    def _after_update(self) -> None:
        """For subclasses: a real step was made."""

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with an empty entry for a stateless parameter, or distributed checkpoints would miss it."""
        packed = super().state_dict()
        if any(self.state.get(member.param) for member in self._members()):
            for key in (key for group in packed["param_groups"] for key in group["params"]):
                packed["state"].setdefault(key, {})
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, or of ``torch.optim``'s AdamW, Adam, SGD or Adafactor.

        torch's own loader would cast codes and scales to the parameter's dtype, so this one stands in its place, hooks
        included. The checkpoint is checked as a whole before anything is changed. torch's state dicts do not say which
        optimizer wrote them: their state is moved into the configurations this one has.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self.__setstate__(checkpoint.prepare(state_dict, self.param_groups, keep_plan=self._plan_given))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        own = ("_kernel_request", "_plan_given", "_default")
        return super().__getstate__() | {name: self.__dict__[name] for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._devices_reported = set()
        self._roster = self._complete = None

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} ({human_bytes(self.plan.state_bytes)} of state"]
        for index, group in enumerate(self.param_groups):
            configurations = sorted({entry["configuration"] for entry in group[ASSIGNMENTS]})
            lines += ["", f"Parameter Group {index}: {len(group['params'])} tensors, {', '.join(configurations)}"]
            hidden = ("params", "param_names", ASSIGNMENTS, PLAN_SETTINGS)
            lines += [f"    {key}: {group[key]}" for key in sorted(group) if key not in hidden]
        return "\n".join([*lines, ")"])

    # ---- plans ----

    @property
    def plan(self) -> Plan:
        """What every parameter is updated with now."""
        blocks: dict[str, list[Member]] = {}
        for member in self._members():
            blocks.setdefault(member.block, []).append(member)
        return Plan(
            tuple(
                Block(name, first.configuration, {m.name: m.shape for m in mine}, first.lr_scale, first.risk, first.why)
                for name, mine in blocks.items()
                for first in mine[:1]
            ),
            self.param_groups[0].get(PLAN_SETTINGS, {}),
        )

    @torch.no_grad()
    def set_plan(self, plan: Plan | Configuration | str, *, inherit: bool = True) -> None:
        """Change configurations in the middle of training.

        State moves over one tensor at a time; ``inherit=False`` restarts it. A block whose ``lr_scale`` is ``None``
        gets the one under which its next update is as long as its last.

        >>> model = nn.Linear(64, 64)
        >>> optimizer = BlockOptimizer(model, plan="adamw-32")
        >>> optimizer.set_plan("sgdm-8")
        >>> optimizer.plan.state_bytes
        4608
        """
        shapes = self._shapes()
        plan = plan if isinstance(plan, Plan) else Plan.uniform(plan, shapes)
        plan.check(shapes)
        new_blocks = {name: plan.block_of(name) for name in shapes}
        if inherit:
            moves = [
                migrate.Move(migrate.holding_of(m, self.state.get(m.param, {})), new_blocks[m.name], m.lr_scale)
                for m in self._members()
            ]
            scales = migrate.lr_scales(moves)
            params = [member.param for member in self._members()]
            for index in migrate.order(moves):
                if self.state.get(params[index]):
                    move = moves[index]
                    self.state[params[index]] = migrate.convert(move.holding, move.block.configuration)
            new_blocks = {
                name: dataclasses.replace(block, lr_scale=scales[block.name]) for name, block in new_blocks.items()
            }
        else:
            for member in self._members():
                self.state.pop(member.param, None)
        self._assign(plan, new_blocks)
        self._plan_given = True

    def _assign(self, plan: Plan, blocks: Mapping[str, Block]) -> None:
        groups.assign(self.param_groups, blocks)
        for group in self.param_groups:
            group[PLAN_SETTINGS] = dict(plan.settings)

    def _refuse_two_answers(self) -> None:
        asked = next((m for m in self._members() if m.configuration != self._default), None)
        if asked is not None:
            raise PlanError(
                f"parameter {asked.name!r} is in a group that asks for {asked.configuration} while plan= is given as "
                "well. Drop one of them: the plan has a configuration for every parameter."
            )

    # ---- kernels ----

    @property
    def kernel(self) -> str:
        """Which kernel runs on which device, and why."""
        devices = sorted({member.param.device for member in self._members()}, key=str)
        return "; ".join(str(kernels.choose(self._kernel_request, device)) for device in devices)

    def _kernel_for(self, device: torch.device) -> kernels.Kernel:
        choice = kernels.choose(self._kernel_request, device)
        if choice.device not in self._devices_reported:
            self._devices_reported.add(choice.device)
            logger.info("kernel %s", choice)
        return choice.kernel

    # ---- state ----

    def _members(self) -> tuple[Member, ...]:
        if self._roster is None or not self._roster.is_current(self.param_groups):
            self._roster = Roster(self.param_groups)
        return self._roster.members

    def _shapes(self) -> dict[str, Shape]:
        return {member.name: member.shape for member in self._members()}

    def _allocate(self) -> None:
        """Give state to every trainable parameter at once, in its plan's layout.

        A half-filled optimizer could not be told from a damaged one, and distributed checkpoint readers need every
        tensor to be there before they read.
        """
        for member in self._members():
            if not member.layout.slots or self.state.get(member.param):
                continue
            if member.param.requires_grad or member.param.grad is not None:
                self.state[member.param] = migrate.new_state(member.layout, member.param.device)
        self._complete = self._roster

    def _is_rehearsal(self, stepping: Sequence[Member], hypers: Sequence[Hyper]) -> bool:
        """``torch.distributed.checkpoint`` makes state appear by a step with lr 0 and zero gradients: not a step."""
        if any(hyper.lr != 0 for hyper in hypers):
            return False
        ages = (self.state[member.param][stored.age_key] for member in stepping for stored in member.layout.slots)
        return not any(map(int, ages)) and not any(cast(Tensor, member.param.grad).any() for member in stepping)

    def _job(self, member: Member, numbers: _Numbers) -> Job:
        state = self.state.get(member.param, {})
        slots, mechanism, group = member.layout.slots, member.configuration.mechanism, member.group
        ages = []
        for stored in slots:
            age = int(state[stored.age_key]) + 1
            ages.append(age)
            migrate.set_age(state, stored, age)
        scalars, phases = numbers.of(group, mechanism, member.lr_scale, tuple(ages))
        param, grad = member.param, cast(Tensor, member.param.grad)
        if member.needs_view:
            param, grad = groups.real_view(param), groups.real_view(grad)
        return Job(mechanism, slots, param, grad, state, scalars, phases, bool(group["maximize"]))


class _Numbers:
    """The numbers of one step. Parameters of one group, mechanism and age share them."""

    def __init__(self, hypers: Mapping[int, Hyper]) -> None:
        self._hypers = hypers  # by the group's id
        self._known: dict[tuple[object, ...], tuple[dict[str, float], dict[str, int]]] = {}

    def of(
        self, group: Group, mechanism: Mechanism, lr_scale: float | None, ages: tuple[int, ...]
    ) -> tuple[dict[str, float], dict[str, int]]:
        """Scalars and rounding phases."""
        key = id(group), mechanism.name, lr_scale, ages
        known = self._known.get(key)
        if known is None:
            by_slot = {slot.name: age for slot, age in zip(mechanism.slots, ages)}
            hyper = dataclasses.replace(self._hypers[id(group)], lr_scale=lr_scale or 1.0)
            phases = {name: rounding_phase(age, index) for index, (name, age) in enumerate(by_slot.items())}
            known = self._known[key] = mechanism.scalars(hyper, by_slot), phases
        return known


def _check_state(member: Member, state: Mapping[str, Any] | None) -> None:
    """Native code trusts addresses: nothing may reach it that is not what the layout says."""
    if not state:
        return
    for key, buffer in member.layout.buffers.items():
        held = state.get(key)
        if held is None or held.shape != buffer.shape or held.dtype is not buffer.dtype:
            found = None if held is None else (tuple(held.shape), held.dtype)
            raise RuntimeError(
                f"parameter {member.name!r} has shape {member.shape} and needs {key!r} of {buffer.shape} "
                f"{buffer.dtype} for {member.configuration}, but the optimizer holds {found}. Did the parameter "
                "change its shape? Make a new optimizer, or put the old shape back."
            )


def _check_gradient(member: Member) -> None:
    grad = cast(Tensor, member.param.grad)
    if type(grad) is Tensor and grad.layout is torch.strided and grad.shape == member.param.shape:
        return
    if grad.shape != member.param.shape:
        raise RuntimeError(
            f"parameter {member.name!r} has shape {tuple(member.param.shape)}, but its gradient has shape "
            f"{tuple(grad.shape)}. Clear gradients when a parameter is replaced."
        )
    if grad.is_sparse:
        raise RuntimeError(
            f"parameter {member.name!r} has a sparse gradient, which BlockOptimizer does not support. Build its "
            "embedding with sparse=False, or give it to torch.optim.SparseAdam."
        )
    if hasattr(grad, "to_local"):
        raise NotImplementedError(
            f"parameter {member.name!r} is a DTensor. Sharded training is not supported yet; plain local state would "
            "be silently wrong."
        )

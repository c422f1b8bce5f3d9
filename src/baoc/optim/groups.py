"""torch's param groups: names, hyper-parameters, and the block of the plan that each parameter belongs to."""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from baoc.core.configuration import Configuration, Layout
from baoc.core.mechanisms import MECHANISMS, known_settings
from baoc.core.plan import Block, Plan, PlanError
from baoc.core.roles import Role, canonical_name
from baoc.core.sharding import HOST, WHOLE, Place, Ranks, has_own_memory, place_of
from baoc.core.spec import LOW_PRECISION, WEIGHT, Hyper, Shape, real_shape
from baoc.core.splits import Split
from baoc.optim.state import Memo, ParamState, is_fresh, misfit, new_slot, new_state, refuse_shared_memory

Group = dict[str, Any]


# ---- members ----


@dataclass(frozen=True)
class Member:
    """One parameter with its name, group, block and place. Valid until groups, plan or shapes change."""

    name: str
    param: Tensor
    group: Group
    block: Block
    place: Place

    # what a step reads is computed once
    param_shape: torch.Size = field(init=False)  # as torch shows it; gradients must have it too
    shape: Shape = field(init=False)  # the global shape as layouts see it: a complex parameter has a last dim of 2
    layout: Layout = field(init=False)
    split: Split | None = field(init=False)  # if it is several matrices
    needs_view: bool = field(init=False)  # kernels see it, and its gradient, through its place
    memo: Memo = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shape = real_shape(self.param)
        object.__setattr__(self, "param_shape", self.param.shape)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "layout", self.block.configuration.layout(shape, rows=self.place.rows))
        object.__setattr__(self, "split", self.block.splits.get(self.name))
        weight = self.layout.configuration.weight
        if weight and self.param.dtype not in LOW_PRECISION:
            raise PlanError(
                f"{self.configuration} keeps the low bits of 16-bit parameters in slot 'w', but parameter "
                f"{self.name!r} is {self.param.dtype}. Leave out w={weight} for it, or cast it first."
            )
        is_plain = self.place is WHOLE and not self.param.is_complex() and self.param.dim() > 0
        object.__setattr__(self, "needs_view", not is_plain)
        object.__setattr__(self, "memo", Memo())

    @property
    def configuration(self) -> Configuration:
        return self.block.configuration

    @property
    def lr_scale(self) -> float | None:
        return self.block.lr_scale

    @property
    def state_device(self) -> torch.device:
        return HOST if self.block.host else self.param.device

    @property
    def is_offloaded(self) -> bool:
        """Whether its state is in host memory while the parameter is not. Not cached: a model may move."""
        return self.block.host and has_own_memory(self.param.device) and bool(self.layout.formats)

    @property
    def obstacle_to_offloading(self) -> str | None:
        """Why its state cannot be in host memory, or ``None``."""
        if not has_own_memory(self.param.device):
            return None
        if self.place.ranks is not None:
            return "it is sharded, and the state of a DTensor must be on the same device"
        return f"it is a {type(self.param).__name__}" if is_traceable_wrapper_subclass(self.param) else None

    @property
    def is_trained(self) -> bool:
        """Whether it needs state: it is trainable, or was given a gradient by hand."""
        return self.param.requires_grad or self.param.grad is not None

    def refuse_gradient(self, grad: Tensor) -> None:
        """Raise for a gradient that an update cannot read."""
        if grad.shape != self.param.shape:
            raise RuntimeError(
                f"parameter {self.name!r} has shape {tuple(self.param.shape)}, but its gradient has shape "
                f"{tuple(grad.shape)}. Clear gradients when a parameter is replaced."
            )
        raise RuntimeError(
            f"parameter {self.name!r} has a sparse gradient, which BlockOptimizer does not support. Build its "
            "embedding with sparse=False, or give it to torch.optim.SparseAdam."
        )


class Members:
    """All parameters of some groups under a plan. Cached by the optimizer while :meth:`are_current` holds.

    Loading replaces groups, frameworks replace parameters, and parameters change their shapes, all without notice.
    """

    def __init__(self, groups: Sequence[Group], plan: Plan) -> None:
        self.all = tuple(
            Member(name, param, group, plan.block_of(name), place_of(param, name))
            for (name, param), group in zip(named_params(groups), repeated(groups))
        )
        self.ranks: tuple[Ranks, ...] = tuple(
            dict.fromkeys(member.place.ranks for member in self.all if member.place.ranks is not None)
        )
        refuse_shared_memory((member.name, member.param) for member in self.all)
        self._plan = plan
        self._sources = [_sources(group) for group in groups]
        self._given_names = {
            id(param): name for group in groups for param, name in zip(group["params"], group.get("param_names", ()))
        }
        self._geometry = [_geometry(member.param) for member in self.all]

    def mend_names(self, groups: Sequence[Group]) -> None:
        """Drop the names of parameters that were taken out of ``params`` alone."""
        for group in groups:
            is_short = len(group["params"]) < len(group.get("param_names", ()))
            if is_short and all(id(param) in self._given_names for param in group["params"]):
                group["param_names"] = [self._given_names[id(param)] for param in group["params"]]

    def are_current(self, groups: Sequence[Group], plan: Plan) -> bool:
        """Return whether groups hold the same objects, of the same geometry, under the same plan."""
        if plan is not self._plan or len(groups) != len(self._sources):
            return False
        for group, seen in zip(groups, self._sources):
            now = _sources(group)
            if len(now) != len(seen) or not all(map(operator.is_, now, seen)):
                return False
        return [_geometry(member.param) for member in self.all] == self._geometry


def _geometry(param: Tensor) -> tuple[object, ...]:
    """Return what ``param.data = ...`` may change, besides the address."""
    return param.shape, param.stride(), param.dtype


def checked_state(member: Member, states: dict[Any, ParamState]) -> ParamState:
    """Return the state of a parameter after a check against its layout.

    State that does not fit is allocated anew if it has seen no gradient. So parameters may be unfrozen later, and a
    model may move, change its dtype or be sharded before it trains.
    """
    state = states.get(member.param)
    problem = None if state is None else misfit(member.layout, member.place.held(state), member.state_device)
    if state is None or (problem and is_fresh(state)):
        state = states[member.param] = _renewed(member, state or {})
    elif problem:
        raise RuntimeError(
            f"parameter {member.name!r} has shape {member.shape} and {problem} ({member.configuration}). Did the "
            "parameter or its state change its shape or device? Make a new optimizer, or undo the change."
        )
    return state


def _renewed(member: Member, old: ParamState) -> ParamState:
    """Return new state, with the low bits of the weight: they are there before the first gradient."""
    state = new_state(member.layout, member.state_device, member.place)
    for key, buffer in member.layout.buffers.items():
        if key in old and buffer.name != "age" and any(k == key for _, k in _low_bits_keys(member)):
            target, kept = member.place.held(state)[key], member.place.unwrap(old[key], buffer)
            if kept.shape == target.shape and kept.dtype == target.dtype:
                target.copy_(kept)
    return state


def _low_bits_keys(member: Member) -> tuple[tuple[str, str], ...]:
    return tuple(pair for each in member.layout.formats if each.slot.of_weight for pair in each.keys)


def _follow_dtype(member: Member, state: ParamState) -> None:
    """Add slot ``w`` to state that has none, or drop it, as the parameter's dtype needs."""
    formats = [each for each in member.layout.formats if each.slot.of_weight]
    if not formats:
        for key in [key for key in state if key.partition(".")[0] == WEIGHT.name]:
            del state[key]
    for stored in formats:
        if stored.age_key not in state:
            state.update(new_slot(stored, member.state_device, member.place))


def allocate(members: Iterable[Member], state: dict[Any, ParamState]) -> None:
    """Give state to every trainable parameter that has none; drop untouched state of parameters that left.

    Distributed checkpoint readers need every tensor to be there before they read. They also make a step with zero
    gradients if an optimizer has no entries at all, so a stateless parameter has an empty one.
    """
    missing = [member for member in members if member.is_trained and member.param not in state]
    new = {member.param: new_state(member.layout, member.state_device, member.place) for member in missing}
    known = {id(member.param) for member in members}
    left = [key for key in state if isinstance(key, Tensor) and id(key) not in known]
    state.update(new)
    for member in members:  # a model that was cast while it trains has other low bits than before
        if member.param in state and member.param not in new:
            _follow_dtype(member, state[member.param])
    for key in left:
        if is_fresh(state[key]):
            del state[key]


def _sources(group: Group) -> list[object]:
    """Return the objects that say which parameters a group has."""
    return [group, group.get("param_names"), *group["params"]]


# ---- names ----


def named_params(groups: Sequence[Group]) -> Iterator[tuple[str, Any]]:
    """Yield all parameters (or their numbers in a state dict) in order, under distinct names."""
    return _distinct(groups, [names(group, index) for index, group in enumerate(groups)])


def positions(groups: Sequence[Group]) -> list[str]:
    """Return the position of every parameter, such as ``0.3`` for parameter 3 of group 0."""
    return [name for name, _ in _distinct(groups, [_positions(group, index) for index, group in enumerate(groups)])]


def _distinct(groups: Sequence[Group], given: Sequence[Sequence[str]]) -> Iterator[tuple[str, Any]]:
    taken: set[str] = set()
    known: dict[int, str] = {}
    for index, group in enumerate(groups):
        for name, param in zip(given[index], group["params"]):
            key = param if isinstance(param, int) else id(param)
            if key not in known:
                # two models in one optimizer may use the same names
                known[key] = f"{index}.{name}" if name in taken else name
                taken.add(known[key])
            yield known[key], param


def repeated(groups: Sequence[Group]) -> Iterator[Group]:
    """Yield the group of every parameter, in order."""
    return (group for group in groups for _ in group["params"])


def names(group: Group, index: int) -> list[str]:
    """Return the parameter names of a group, or positions like ``0.3`` where it has none."""
    if "param_names" not in group:
        return _positions(group, index)
    if len(group["param_names"]) != len(group["params"]):
        raise ValueError(
            f"param group {index} has {len(group['params'])} parameters and {len(group['param_names'])} names. Name "
            "all parameters of a group, or none."
        )
    return [canonical_name(name) for name in group["param_names"]]


def _positions(group: Group, index: int) -> list[str]:
    return [f"{index}.{position}" for position in range(len(group["params"]))]


def named(params: nn.Module | Iterable[Any]) -> Iterable[Any]:
    """Return what torch's constructor takes: for a module, its trainable parameters with their names."""
    if callable(params) and not isinstance(params, nn.Module):
        name = getattr(params, "__name__", type(params).__name__)
        raise TypeError(
            f"params is the function {name}. Call it first, {name}(...), or pass the model itself, which has names "
            "for its parameters."
        )
    if not isinstance(params, nn.Module):
        return params
    trainable = [(name, param) for name, param in params.named_parameters() if param.requires_grad]
    if not trainable:
        raise ValueError(f"{type(params).__name__} has no trainable parameters: all have requires_grad=False.")
    return trainable


def without_duplicates(group: Group) -> None:
    """Drop every repetition of a parameter from a group, in place: one step updates it once."""
    first = {id(param): index for index, param in reversed(list(enumerate(group["params"])))}
    kept = sorted(first.values())
    if len(kept) < len(group["params"]):
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][index] for index in kept]


# ---- blocks ----


def plan_of(assigned: Sequence[tuple[str, Shape, Block]], settings: Mapping[str, Any]) -> Plan:
    """Return the plan in which each parameter is in the given block.

    Blocks of the same name that differ, as an interrupted change of plans leaves them, get distinct names.

    Args:
        assigned: name, shape and block of every parameter. The parameters that a block lists itself are ignored.
        settings: the settings of the new plan.
    """
    blocks: dict[str, tuple[Block, dict[str, Shape], dict[str, Split]]] = {}
    for name, shape, block in assigned:
        bare = replace(block, parameters={}, splits={})
        while bare.name in blocks and blocks[bare.name][0] != bare:
            bare = replace(bare, name=f"{bare.name}'")
        _, shapes, splits = blocks.setdefault(bare.name, (bare, {}, {}))
        shapes[name] = shape
        if name in block.splits:
            splits[name] = block.splits[name]
    found = (replace(block, parameters=shapes, splits=splits) for block, shapes, splits in blocks.values())
    return Plan(tuple(found), settings)


def extended(
    plan: Plan,
    group: int,
    configuration: Configuration,
    shapes: Mapping[str, Shape],
    roles: Mapping[str, Role],
    dtypes: Mapping[str, torch.dtype],
    *,
    host: bool = False,
) -> Plan:
    """Return a plan with the parameters of one more group, all of one configuration where it suits them."""
    if not shapes:
        return plan
    blocks = list(plan.blocks)
    for block in Plan.uniform(configuration, shapes, roles, dtypes).blocks:
        of_group = f"group {group}" if block.name == "all" else f"group {group} {block.name}"
        name = of_group if group else block.name
        while name in {each.name for each in blocks}:
            name += "'"
        blocks.append(replace(block, name=name, host=host))
    return replace(plan, blocks=tuple(blocks))


def restricted(plan: Plan, shapes: Mapping[str, Shape]) -> Plan:
    """Return a plan without the parameters that are gone."""
    known = [(name, shape, plan.block_of(name)) for name, shape in shapes.items() if name in plan]
    return plan_of(known, plan.settings)


def refuse_two_answers(members: Iterable[Member], defaults: Plan) -> None:
    """Raise if a plan was given and a group asks for a configuration too."""
    given = {member.name: member.configuration for member in members}
    asked = next((name for name, c in given.items() if c != defaults.block_of(name).configuration), None)
    if asked is not None:
        raise PlanError(
            f"parameter {asked!r} is in a group with configuration {given[asked]}, but plan= is given as well. Drop "
            "one of them: the plan has a configuration for every parameter."
        )


def refuse_offloading(members: Iterable[Member], plan: Plan) -> None:
    """Raise if a plan has state in host memory where that is not possible."""
    for member in members:
        obstacle = member.obstacle_to_offloading if plan.block_of(member.name).host else None
        if obstacle:
            raise PlanError(
                f"the state of parameter {member.name!r} cannot be in host memory while it is on "
                f"{member.param.device}: {obstacle}. Leave out offload= and host_memory=, or the host of its block."
            )


# ---- hyper-parameters ----


def refuse_idle(plan: Plan, settings: Mapping[str, Any]) -> None:
    """Raise if a plan is given together with a setting that none of its update rules has."""
    used = {block.configuration.mechanism for block in plan.blocks}
    for name in settings:
        owners = [mechanism.name for mechanism in MECHANISMS.values() if name in known_settings(mechanism)]
        if not any(name in known_settings(mechanism) for mechanism in used):
            raise ValueError(
                f"{name}={settings[name]!r} would do nothing: it is a setting of {', '.join(owners)}, and the plan "
                f"has {', '.join(sorted(mechanism.name for mechanism in used))}. Leave it out, or use one of those "
                "update rules."
            )


def hyper(group: Group, place: str) -> Hyper:
    """Read the hyper-parameters of a group as they are now: schedulers write to them between steps.

    As in torch, only :func:`check_hyper` is strict about ranges: a schedule may leave them for a while.

    Args:
        group: the param group.
        place: what to call the group in an error.
    """
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"{place}: Tensor lr must be 1-element, but it has shape {tuple(lr.shape)}.")
    read = Hyper(
        lr=float(lr),
        beta1=float(betas[0]),
        beta2=float(betas[1]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        settings=group,
    )
    if not math.isfinite(read.lr + read.beta1 + read.beta2 + read.weight_decay):
        numbers = {"lr": read.lr, "betas[0]": read.beta1, "betas[1]": read.beta2, "weight_decay": read.weight_decay}
        for key, value in numbers.items():
            _check(math.isfinite(value), place, key, value, "a finite number")
    return read


def with_plain_numbers(group: Group) -> Group:
    """Return a group whose numpy scalars are plain numbers, which every kind of checkpoint can hold."""
    plain: Group = {key: _plain(group[key]) for key in ("lr", "eps", "weight_decay", "maximize") if key in group}
    betas = group.get("betas")
    return {**group, **plain, **({"betas": tuple(map(_plain, betas))} if isinstance(betas, (tuple, list)) else {})}


def _plain(value: Any) -> Any:
    if isinstance(value, np.bool_):
        return bool(value)
    is_numpy = isinstance(value, numbers.Real) and hasattr(value, "dtype")
    return (int(value) if isinstance(value, numbers.Integral) else float(value)) if is_numpy else value


def check_hyper(group: Group, place: str) -> None:
    """Raise if a setting of a group is out of range, or of a type that is not a plain number."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"{place}: Tensor lr must be 1-element, but it has shape {tuple(lr.shape)}.")
    number = lr.item() if isinstance(lr, Tensor) else lr
    _check(_in_range(number, lambda x: x >= 0), place, "lr", lr, "a finite number >= 0")
    betas = group["betas"]
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    _check(pair, place, "betas", betas, "two numbers in [0, 1), like (0.9, 0.999)")
    for index, beta in enumerate(betas):
        _check(_in_range(beta, lambda x: 0 <= x < 1), place, f"betas[{index}]", beta, "a number in [0, 1)")
    for key in ("eps", "weight_decay"):
        _check(_in_range(group[key], lambda x: x >= 0), place, key, group[key], "a finite number >= 0")
    maximize = group.get("maximize", False)
    _check(isinstance(maximize, bool), place, "maximize", maximize, "True or False")
    for setting in known_settings().values():
        value = group.get(setting.name, setting.default)
        _check(_accepts(setting.accepts, value), place, setting.name, value, setting.wanted)


def _in_range(value: Any, test: Any) -> bool:
    is_number = isinstance(value, (int, float)) and abs(value) <= sys.float_info.max  # False for NaN
    return is_number and bool(test(value))


def _accepts(test: Any, value: Any) -> bool:
    try:
        return bool(test(value)) and (not isinstance(value, int) or math.isfinite(float(value)))
    except (TypeError, ValueError, OverflowError):  # not a number, or not a pair of them
        return False


def _check(right: bool, place: str, key: str, value: object, wanted: str) -> None:
    if not right:
        is_huge = isinstance(value, int) and value.bit_length() > 64
        shown = f"an integer of {value.bit_length()} bits" if is_huge else repr(value)  # type: ignore[attr-defined]
        raise ValueError(f"{place}: invalid {key}: {shown}. It must be {wanted}.")

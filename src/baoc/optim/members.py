"""The parameters of an optimizer under its plan, and their state."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from baoc.core.configuration import Configuration, Layout
from baoc.core.plan import Block, Plan, PlanError
from baoc.core.sharding import HOST, WHOLE, Place, Ranks, has_own_memory, place_of, rows_per_rank
from baoc.core.spec import LOW_PRECISION, WEIGHT, Shape, real_shape
from baoc.core.splits import Split
from baoc.optim.groups import Group, named_params, repeated
from baoc.optim.state import Memo, ParamState, is_fresh, misfit, new_slot, new_state, refuse_shared_memory


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
        self.groups, self.plan = groups, plan
        self._sources = [_sources(group) for group in groups]
        self._given_names = {
            id(param): name for group in groups for param, name in zip(group["params"], group.get("param_names", ()))
        }
        self._geometry = [_geometry(member.param) for member in self.all]

    @property
    def shapes(self) -> dict[str, Shape]:
        """The global shape of every parameter."""
        return {member.name: member.shape for member in self.all}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of every parameter."""
        return {member.name: member.param.dtype for member in self.all}

    @property
    def low_precision(self) -> frozenset[str]:
        """The names of 16-bit parameters."""
        return frozenset(name for name, dtype in self.dtypes.items() if dtype in LOW_PRECISION)

    @property
    def rows(self) -> dict[str, int]:
        """The most rows that a rank has of each sharded parameter."""
        places = ((member.name, member.shape, member.place.ranks) for member in self.all)
        return {name: rows_per_rank(shape[0], ranks.size) for name, shape, ranks in places if ranks is not None}

    def mend_names(self, groups: Sequence[Group]) -> None:
        """Drop the names of parameters that were taken out of ``params`` alone."""
        for group in groups:
            is_short = len(group["params"]) < len(group.get("param_names", ()))
            if is_short and all(id(param) in self._given_names for param in group["params"]):
                group["param_names"] = [self._given_names[id(param)] for param in group["params"]]

    def are_current(self, groups: Sequence[Group], plan: Plan) -> bool:
        """Return whether groups hold the same objects, of the same geometry, under the same plan."""
        if plan is not self.plan or len(groups) != len(self._sources):
            return False
        for group, seen in zip(groups, self._sources):
            now = _sources(group)
            if len(now) != len(seen) or not all(map(operator.is_, now, seen)):
                return False
        return [_geometry(member.param) for member in self.all] == self._geometry


def _sources(group: Group) -> list[object]:
    """Return the objects that say which parameters a group has."""
    return [group, group.get("param_names"), *group["params"]]


def _geometry(param: Tensor) -> tuple[object, ...]:
    """Return what ``param.data = ...`` may change, besides the address."""
    return param.shape, param.stride(), param.dtype


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


# ---- state ----


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

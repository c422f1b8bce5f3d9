"""Checkpoints: a state dict is checked as a whole first, and then converted into the plan of the optimizer."""

from __future__ import annotations

import copy
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baoc.core.configuration import Configuration, Layout
from baoc.core.plan import Block, Plan, PlanError
from baoc.core.spec import LOW_PRECISION, SMALLEST_WEIGHT, Reach
from baoc.core.splits import Split
from baoc.optim import groups, low_bits, torch_state
from baoc.optim.conversion import Holding, Move, lr_scales
from baoc.optim.groups import Group
from baoc.optim.members import Member
from baoc.optim.state import SAMPLES, ParamState

PLAN = "plan"
"""The key of the first group with parameters under which a state dict holds the text of the plan file, once. Readers of
distributed checkpoints treat it as one value, so a plan is replaced as a whole and never mixed with another. They ask
the live group for its keys, so the key is there too, with an empty text. The plan names parameters by their positions:
names may differ between two optimizers that continue from one checkpoint."""
PLANNER = "planner"
"""The same for a text that only the optimizer's planner can read."""
NORMS = "gradient_norms"
"""The same for what released gradients remember of the last step."""
WEIGHTS = "weights_of_low_bits"
"""The same for what tells whether low bits and weights belong together."""
CARRIED = (PLAN, PLANNER, NORMS, WEIGHTS)
_WRAPPERS = ("module.", "model.")
_MOST = torch.finfo(torch.float32).max


class CheckpointError(ValueError):
    """A checkpoint that does not fit the optimizer."""


class Prepared(NamedTuple):
    """What a checkpoint installs."""

    state: dict[Any, Any]
    param_groups: list[Group]
    plan: Plan
    planner: str = ""
    samples: Mapping[str, Any] = MappingProxyType({})
    norms: str = ""
    weights: tuple[int, ...] = ()
    splits: Mapping[str, Split | None] = MappingProxyType({})
    """By name, those of all parameters whose saved update rule works on whole matrices; ``None``: not split."""


def reserve(param_groups: Sequence[Group], key: str) -> None:
    """Add a key to the group that will carry its text."""
    carrier = next((group for group in param_groups if group["params"]), None)
    if carrier is not None:
        carrier.setdefault(key, "")


def write(packed_groups: Sequence[Group], key: str, text: str) -> None:
    """Write a text into the group of a state dict that carries it."""
    for group in packed_groups:
        if key in group:
            group[key] = text


def write_plan(packed_groups: Sequence[Group], plan: Plan) -> None:
    """Write a plan into the groups of a state dict."""
    write(packed_groups, PLAN, plan.renamed(positions_by_name(packed_groups)).to_json())


def positions_by_name(param_groups: Sequence[Group]) -> dict[str, str]:
    """Return the position of each parameter, by which a checkpoint identifies it."""
    return dict(zip((name for name, _ in groups.named_params(param_groups)), groups.positions(param_groups)))


def copied(state_dict: Any) -> dict[str, Any]:
    """Return a shallow copy of a state dict, for hooks to write to."""
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(
            f"a state dict must be a mapping, got a {type(state_dict).__name__}. Pass the result of "
            "optimizer.state_dict()."
        )
    return dict(state_dict)


def prepare(
    state_dict: Mapping[str, Any],
    members: Sequence[Member],
    current: Sequence[Group],
    own_plan: Plan | None,
    offload: bool | None = None,
    states: Mapping[Any, ParamState] = MappingProxyType({}),
) -> Prepared:
    """Return what ``load_state_dict`` installs, with state for every trainable parameter. Nothing is changed.

    Args:
        state_dict: the checkpoint.
        members: the parameters of the optimizer.
        current: its param groups.
        own_plan: the plan to keep; the state of the checkpoint is migrated into it. ``None``: take over the plan of the
            checkpoint, if it has one.
        offload: whether the state of a plan that is taken over is in host memory. ``None``: where it was.
        states: the state so far. Low bits of weights stay if the checkpoint, such as one of fp32 training, has none.

    Raises:
        CheckpointError: the checkpoint is damaged or does not fit the optimizer.
    """
    try:
        return _prepare(state_dict, members, current, own_plan, offload, states)
    except (CheckpointError, torch.OutOfMemoryError):
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    except (TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"the checkpoint is damaged ({type(error).__name__}: {error}). Load another one."
        ) from error


def _prepare(
    state_dict: Mapping[str, Any],
    members: Sequence[Member],
    current: Sequence[Group],
    own_plan: Plan | None,
    offload: bool | None,
    states: Mapping[Any, ParamState],
) -> Prepared:
    saved = _read_groups(state_dict)
    _check_groups(saved, current)
    saved_plan = _read_plan(saved)
    planner, norms, weights = (
        next(filter(None, [group.pop(key, "") for group in saved]), "") for key in (PLANNER, NORMS, WEIGHTS)
    )
    _check_norms(norms)
    keys = [key for group in saved for key in group["params"]]
    state = state_dict["state"]
    loaded = [{**own, **group, **_who(own)} for group, own in zip(saved, current)]
    for index, group in enumerate(loaded):
        groups.check_hyper(group, f"the checkpoint's group {index}")
    saved_blocks = _blocks(saved, saved_plan, [member.name for member in members])
    any_state = any(state.get(key) for key in keys)
    samples: dict[str, Any] = {}
    moves = []
    for member, group, key, theirs in zip(members, groups.repeated(loaded), keys, saved_blocks):
        if key not in state and any_state and _must_have_state(member, theirs):
            raise CheckpointError(
                f"the checkpoint has no state of parameter {member.name!r}, though it has that of others: it is "
                "damaged. Load another one, or start without state."
            )
        entry = _entry(state, key, member)
        found = entry.pop(SAMPLES, {})
        if not isinstance(found, dict):
            raise CheckpointError(f"the checkpoint's samples are a {type(found).__name__}: it is damaged.")
        samples = found or samples
        taken_over = None if theirs is None or own_plan is not None else _placed(theirs, member, offload)
        moves.append(_move(replace(member, group=group), entry, theirs, taken_over))
    scales = lr_scales(moves)
    others = {key: value for key, value in state.items() if key not in set(keys)}
    stray = next((key for key in others if isinstance(key, int)), None)  # torch's numbers for parameters
    if stray is not None:
        raise CheckpointError(
            f"the checkpoint has state of a parameter {stray} that none of its groups has: it is damaged."
        )
    held: defaultdict[Any, Any] = defaultdict(dict)
    held.update(others)
    for member, move in zip(members, moves):
        if move.holding.state or member.is_trained:
            held[member.param] = move.convert() | low_bits.kept(move.holding.layout, move.layout, states, member)
    names = [name for name, _ in groups.named_params(loaded)]
    assigned = [
        (name, member.shape, _only(move.block, member, name, scales[move.block.name]))
        for name, member, move in zip(names, members, moves)
    ]
    settings = next((plan.settings for plan in (own_plan, saved_plan) if plan is not None), {})
    plan = groups.plan_of(assigned, settings)
    splits = {
        name: block.splits.get(member.name)
        for name, member, block in zip(names, members, saved_blocks)
        if block is not None and block.configuration.mechanism.reach is Reach.MATRIX
    }
    return Prepared(held, loaded, plan, planner, samples, norms, low_bits.read(weights), splits)


def _who(group: Group) -> Group:
    """Return the entries that say which parameters are in a group: an optimizer that has names keeps them."""
    return {key: group[key] for key in ("params", "param_names") if key in group}


def _read_groups(state_dict: Mapping[str, Any]) -> list[Group]:
    """Return the saved groups, checked, with our names for torch's settings."""
    for key, kind in (("param_groups", list), ("state", dict)):
        if not isinstance(state_dict.get(key), kind):
            raise CheckpointError(
                f"this is not an optimizer's state dict: it has no {key!r}. Pass what optimizer.state_dict() gave."
            )
    for index, group in enumerate(state_dict["param_groups"]):
        if not isinstance(group, dict) or not isinstance(group.get("params"), (list, tuple)):
            raise CheckpointError(f"the checkpoint's param group {index} has no 'params': it is damaged.")
    saved = [torch_state.read_group(copy.deepcopy(group)) for group in state_dict["param_groups"]]
    for index, group in enumerate(saved):
        try:
            groups.names(group, index)
        except ValueError as error:
            raise CheckpointError(f"the checkpoint is damaged: {error}") from None
    return saved


def _check_groups(saved: Sequence[Group], current: Sequence[Group]) -> None:
    if len(saved) != len(current):
        raise CheckpointError(
            f"loaded state dict has a different number of parameter groups: {len(saved)} instead of {len(current)}. "
            "Build the optimizer with the param groups it was saved with."
        )
    for index, (group, own) in enumerate(zip(saved, current)):
        if len(group["params"]) != len(own["params"]):
            raise CheckpointError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: group "
                f"{index} has {len(group['params'])} parameters in the checkpoint and {len(own['params'])} here. Is "
                "the checkpoint of another model?"
            )
        if "param_names" not in group or "param_names" not in own:
            continue
        theirs, ours = _bare(groups.names(group, index)), _bare(groups.names(own, index))
        if theirs != ours and sorted(theirs) == sorted(ours):
            first = next(pair for pair in zip(theirs, ours) if pair[0] != pair[1])
            raise CheckpointError(
                f"the parameters of group {index} are in another order than in the checkpoint: {first[1]!r} stands "
                f"where {first[0]!r} was saved. Pass them in the order they were saved in."
            )


def _bare(names: Sequence[str]) -> list[str]:
    """Return names without the prefixes of wrappers."""
    bare = list(names)
    while bare and any(all(name.startswith(prefix) for name in bare) for prefix in _WRAPPERS):
        bare = [name.partition(".")[2] for name in bare]
    return bare


def _read_plan(saved: Sequence[Group]) -> Plan | None:
    """Take the plan out of saved groups; ``None`` if they are torch's."""
    texts = [group.pop(PLAN) for group in saved if PLAN in group]
    if not any(texts):
        return None
    try:
        return Plan.from_json(next(text for text in texts if text))
    except PlanError as error:
        raise CheckpointError(f"the checkpoint's plan is damaged: {error}") from None


def _blocks(saved: Sequence[Group], plan: Plan | None, names: Sequence[str]) -> list[Block | None]:
    """Return the saved block of every parameter, under its present name; the plan must cover these and no others."""
    positions = groups.positions(saved)
    if plan is None:
        return [None] * len(positions)
    for position, (name, _) in zip(positions, groups.named_params(saved)):
        if position not in plan:
            raise CheckpointError(f"the checkpoint's plan says nothing about parameter {name!r}: it is damaged.")
    surplus = [name for block in plan.blocks for name in block.parameters if name not in positions]
    if surplus:
        raise CheckpointError(
            f"the checkpoint's plan speaks of parameter {surplus[0]!r} (group.position), which its groups do not have: "
            "it is damaged."
        )
    plan = plan.renamed(dict(zip(positions, names)))
    return [plan.block_of(name) for name in names]


def _check_norms(text: str) -> None:
    norms = json.loads(text) if text else []
    known = isinstance(norms, list) and all(isinstance(norm, float) and 0.0 <= norm <= _MOST for norm in norms)
    if not known:
        raise CheckpointError("the checkpoint's gradient norms are not finite numbers >= 0: it is damaged.")


def _must_have_state(member: Member, theirs: Block | None) -> bool:
    """Return whether a missing entry is an error. torch has none without a gradient, and no one for frozen ones."""
    if theirs is None or not member.param.requires_grad:
        return False
    return bool(theirs.configuration.layout(member.shape, rows=member.place.rows).formats)


def _entry(state: Mapping[Any, Any], key: Any, member: Member) -> dict[str, Any]:
    entry = state.get(key, {})
    if not isinstance(entry, dict):
        raise CheckpointError(
            f"the checkpoint's state of parameter {member.name!r} is a {type(entry).__name__}: it is damaged."
        )
    return dict(entry)


def _only(block: Block, member: Member, name: str, lr_scale: float | None) -> Block:
    """Return the block of one parameter, under the name that it has from now on."""
    split = block.splits.get(member.name)
    splits = {} if split is None else {name: split}
    return replace(block, parameters={name: member.shape}, splits=splits, lr_scale=lr_scale)


def _placed(block: Block, member: Member, offload: bool | None) -> Block:
    """Return a saved block for this optimizer.

    State that cannot be offloaded here stays with its parameter. Slot ``w`` is that of the parameter's dtype here.
    """
    host = block.host if offload is None else offload
    saved, own = block.configuration, member.configuration.weight
    weight = (saved.weight or own or SMALLEST_WEIGHT) if member.param.dtype in LOW_PRECISION else None
    if weight != saved.weight:
        block = replace(block, configuration=saved.with_weight(weight))
    return replace(block, host=host and member.obstacle_to_offloading is None)


def _move(member: Member, entry: dict[str, Any], theirs: Block | None, taken_over: Block | None) -> Move:
    """Return what a checkpoint holds for one parameter, and the block it goes to. Raises if it does not fit."""
    block, lr_scale = member.block, None
    if torch_state.is_torch_entry(entry):
        configuration, state = torch_state.read_entry(entry, member.name)
    elif theirs is not None:
        configuration, state, lr_scale = theirs.configuration, dict(entry), theirs.lr_scale
        block = taken_over or block
    elif entry:
        raise CheckpointError(
            f"the checkpoint's state of parameter {member.name!r} has the keys {', '.join(map(repr, entry))}, which "
            "are neither baoc's nor those of torch.optim's AdamW, Adam, SGD or Adafactor. Load it with the optimizer "
            "that wrote it."
        )
    else:
        configuration, state = block.configuration, {}
    layout = configuration.layout(member.shape, rows=member.place.rows)
    fitted = _fitted(replace(member, block=block), configuration, state)
    hyper = groups.hyper(member.group, f"the checkpoint's group of {member.name!r}")
    param = member.place.local(member.param.detach())
    return Move(Holding(param, layout, fitted, hyper, member.place), block, lr_scale)


def _fitted(member: Member, configuration: Configuration, state: ParamState) -> ParamState:
    """Return saved state on the block's device. Every buffer is checked against the layout, and none is cast."""
    if not state:
        return {}
    fitted: ParamState = {}
    layout = configuration.layout(member.shape, rows=member.place.rows)
    state = {key: _unwrapped(member, layout, key, value) for key, value in state.items()}
    for key, buffer in layout.buffers.items():
        tensor = state.get(key)
        held = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else "nothing"
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != buffer.shape or tensor.dtype != buffer.dtype:
            raise CheckpointError(
                f"parameter {member.name!r} has shape {member.shape} and needs {key!r} as {buffer.dtype} of shape "
                f"{buffer.shape} for {configuration}, but the checkpoint holds {held}. Is it of another model?"
            )
        fitted[key] = tensor.clone() if buffer.name == "age" else tensor.to(member.state_device).contiguous()
    for stored in layout.formats:
        fitted.setdefault(stored.age_key, _age(member, state, stored.age_key))
        problem = stored.problem(stored.held_in(fitted))
        if problem:
            raise CheckpointError(
                f"the checkpoint's {stored.slot.name!r} of parameter {member.name!r} has {problem}: it is damaged, or "
                "training had diverged when it was saved. Load another one, or start without state."
            )
    buffers = {key: buffer for key, buffer in layout.buffers.items() if buffer.name != "age"}
    return fitted | {key: member.place.wrap(fitted[key], buffer) for key, buffer in buffers.items()}


def _unwrapped(member: Member, layout: Layout, key: str, value: Any) -> Any:
    """Return this rank's part of a saved tensor."""
    is_buffer = isinstance(value, Tensor) and key in layout.buffers
    return member.place.unwrap(value, layout.buffers[key]) if is_buffer else value


def _age(member: Member, state: ParamState, key: str) -> int:
    value = state.get(key)
    try:
        age = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        age = math.nan
    if not (age >= 0 and age.is_integer()):
        found = "has no" if value is None else f"has {value!r} for its"
        raise CheckpointError(
            f"the checkpoint's state of parameter {member.name!r} {found} {key!r}: it is damaged. Load another one, "
            "or start without state."
        )
    return int(age)

"""From a state dict to an optimizer's state: checked as a whole first, then moved into the plan that is wanted."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baoc.core.configuration import Configuration, Layout, parse
from baoc.core.plan import Block, Plan, PlanError
from baoc.core.spec import real_shape
from baoc.optim import blocks, groups, torch_state
from baoc.optim.groups import Group, Member
from baoc.optim.lr_match import lr_scales
from baoc.optim.migrate import Holding, Move
from baoc.optim.state import ParamState

PLAN = "plan"
"""The key of the first group with parameters under which a state dict has the plan file's own text, once: readers of
distributed checkpoints take it for one value, so a plan is replaced as a whole and never mixed with another. They ask
the live group for the keys that it wants, so the key is there too, without a text. Parameters go by their positions:
names are for people, and may differ between two optimizers that go on from one checkpoint."""
PLANNER = "planner"
"""Likewise, for what an optimizer that plans for itself knows besides; a text that only it can read."""
CARRIED = (PLAN, PLANNER)
SAMPLES = "baoc.samples"
"""The key of the first trainable parameter's state under which such an optimizer has its sampled gradients: only there
do all kinds of checkpoints look for tensors."""
_WRAPPERS = ("module.", "model.")
_ASSIGNMENTS, _SETTINGS = "assignments", "plan_settings"  # how plans were saved before, parameter by parameter


class CheckpointError(ValueError):
    """A checkpoint that does not fit the optimizer."""


class Prepared(NamedTuple):
    """What is to be installed."""

    state: dict[Any, Any]
    param_groups: list[Group]
    plan: Plan
    planner: str = ""
    samples: Mapping[str, Any] = MappingProxyType({})


def reserve(param_groups: Sequence[Group], key: str) -> None:
    """Give the group that will carry a text its key."""
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
    """Where each parameter is, by which a checkpoint knows it."""
    return dict(zip((name for name, _ in groups.named_params(param_groups)), groups.positions(param_groups)))


def copied(state_dict: Any) -> dict[str, Any]:
    """A shallow copy of a state dict, for hooks to write to."""
    if not isinstance(state_dict, Mapping):
        raise CheckpointError(
            f"this is not an optimizer's state dict but a {type(state_dict).__name__}. Pass what "
            "optimizer.state_dict() gave."
        )
    return dict(state_dict)


def prepare(
    state_dict: Mapping[str, Any],
    members: Sequence[Member],
    current: Sequence[Group],
    own_plan: Plan | None,
    offload: bool | None = None,
) -> Prepared:
    """What ``load_state_dict`` is to install; nothing is changed, and whatever is wrong is a :class:`CheckpointError`.

    ``own_plan``: the optimizer's own stays, and the checkpoint's state is migrated into it. Without one, the
    checkpoint's is taken over, if it has one, with state where it was, or where ``offload`` says.
    """
    try:
        return _prepare(state_dict, members, current, own_plan, offload)
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
) -> Prepared:
    saved = _read_groups(state_dict)
    _check_groups(saved, current)
    saved_plan = _read_plan(saved)
    planner = next(filter(None, [group.pop(PLANNER, "") for group in saved]), "")
    keys = [key for group in saved for key in group["params"]]
    state = state_dict["state"]
    loaded = [{**own, **group, **_who(own)} for group, own in zip(saved, current)]
    for index, group in enumerate(loaded):
        groups.check_hyper(group, f"the checkpoint's group {index}")
    saved_blocks = _blocks(saved, saved_plan)
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
        if move.holding.state:
            held[member.param] = move.convert()
    assigned = [
        (name, real_shape(param), replace(move.block, lr_scale=scales[move.block.name]))
        for (name, param), move in zip(groups.named_params(loaded), moves)
    ]
    settings = next((plan.settings for plan in (own_plan, saved_plan) if plan is not None), {})
    return Prepared(held, loaded, blocks.plan_of(assigned, settings), planner, samples)


def _who(group: Group) -> Group:
    """What says who is in a group: an optimizer that has names keeps them."""
    return {key: group[key] for key in ("params", "param_names") if key in group}


def _read_groups(state_dict: Mapping[str, Any]) -> list[Group]:
    """The saved groups, checked for what must be in them, with our names for torch's settings."""
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
    """Names without what wrappers put before all of them."""
    bare = list(names)
    while bare and any(all(name.startswith(prefix) for name in bare) for prefix in _WRAPPERS):
        bare = [name.partition(".")[2] for name in bare]
    return bare


def _read_plan(saved: Sequence[Group]) -> Plan | None:
    """Take the plan out of saved groups; ``None`` if they are torch's."""
    texts = [group.pop(PLAN) for group in saved if PLAN in group]
    settings = [group.pop(_SETTINGS, {}) for group in saved]
    assignments = [group.pop(_ASSIGNMENTS, None) for group in saved]
    if any(texts):
        try:
            return Plan.from_json(next(text for text in texts if text))
        except PlanError as error:
            raise CheckpointError(f"the checkpoint's plan is damaged: {error}") from None
    if all(entries is None for entries in assignments):
        return None
    assigned = []
    positions = iter(groups.positions(saved))
    for index, (group, entries) in enumerate(zip(saved, assignments)):
        if len(entries or ()) != len(group["params"]):
            raise CheckpointError(
                f"the checkpoint's group {index} has {len(group['params'])} parameters and {len(entries or ())} "
                "assignments of configurations: it is damaged."
            )
        for entry in entries or ():
            name = next(positions)
            assigned.append((name, (), _read_assignment(entry, name)))
    return blocks.plan_of(assigned, settings[0])


def _read_assignment(entry: Any, name: str) -> Block:
    """The block of a parameter as it was saved before. Distributed checkpoints lose empty values."""
    try:
        configuration = parse(entry["configuration"])
        return Block(
            str(entry["block"]), configuration, {}, entry.get("lr_scale"), entry.get("risk", {}), entry.get("why", "")
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the checkpoint's assignment of parameter {name!r} cannot be read ({error!r}): it is damaged."
        ) from None


def _blocks(saved: Sequence[Group], plan: Plan | None) -> list[Block | None]:
    """The saved block of every parameter; the plan must speak of these and of no others."""
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
    return [plan.block_of(position) for position in positions]


def _must_have_state(member: Member, theirs: Block | None) -> bool:
    """Torch's optimizers have none for parameters without gradients, and nobody has for frozen ones."""
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


def _placed(block: Block, member: Member, offload: bool | None) -> Block:
    """A saved block as it is taken over: what cannot be offloaded here is not, wherever it was saved."""
    host = block.host if offload is None else offload
    return replace(block, host=host and member.obstacle_to_offloading is None)


def _move(member: Member, entry: dict[str, Any], theirs: Block | None, taken_over: Block | None) -> Move:
    """What a checkpoint holds for one parameter, and the block it goes to. Raises if it does not fit."""
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
    """Saved state where the block has it, every buffer checked against the layout and none of them cast."""
    if not state:
        return {}
    fitted: ParamState = {}
    layout = configuration.layout(member.shape, rows=member.place.rows)
    state = _of_today(layout, {key: _unwrapped(member, layout, key, value) for key, value in state.items()})
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
                f"the checkpoint's {stored.slot.name!r} of parameter {member.name!r} has {problem}: it is damaged. "
                "Load another one, or start without state."
            )
    buffers = {key: buffer for key, buffer in layout.buffers.items() if buffer.name != "age"}
    return fitted | {key: member.place.wrap(fitted[key], buffer) for key, buffer in buffers.items()}


def _unwrapped(member: Member, layout: Layout, key: str, value: Any) -> Any:
    """What of a saved tensor is for this rank."""
    is_buffer = isinstance(value, Tensor) and key in layout.buffers
    return member.place.unwrap(value, layout.buffers[key]) if is_buffer else value


def _of_today(layout: Layout, state: ParamState) -> ParamState:
    """Saved state in which no slot is stored in an earlier way."""
    state = dict(state)
    for stored in layout.formats:
        prefix = stored.slot.name
        names = {key: key[len(prefix) + 1 :] for key in state if key == prefix or key.startswith(f"{prefix}.")}
        tensors = {own: state[key] for key, own in names.items() if key != stored.age_key}
        found = {own: tensor for own, tensor in tensors.items() if isinstance(tensor, Tensor)}
        is_current = {name: tuple(tensor.shape) for name, tensor in found.items()} == {
            buffer.name: buffer.shape for buffer in stored.buffers
        }
        adopted = None if is_current or not found else stored.adopted(found)
        if adopted is not None:
            state |= {stored.key(name): tensor for name, tensor in adopted.items()}
    return state


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

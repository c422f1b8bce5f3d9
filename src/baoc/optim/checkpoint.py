"""From a state dict to an optimizer's state: checked as a whole first, then moved into the plan that is wanted."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from baoc.core.configuration import Configuration
from baoc.core.plan import Block
from baoc.optim import groups, migrate, torch_state
from baoc.optim.groups import ASSIGNMENTS, PLAN_SETTINGS, Assignment, Group, Member
from baoc.optim.migrate import Holding, Move, ParamState


class CheckpointError(ValueError):
    """A checkpoint that does not fit the optimizer."""


def prepare(state_dict: dict[str, Any], current: Sequence[Group], *, keep_plan: bool) -> dict[str, Any]:
    """The ``state`` and ``param_groups`` for ``load_state_dict`` to install.

    ``keep_plan``: the optimizer's own plan stays, and the checkpoint's state is migrated into it. Otherwise the
    checkpoint's plan is taken over, if it has one.
    """
    saved = [torch_state.read_group(copy.deepcopy(group)) for group in state_dict["param_groups"]]
    _check_groups(saved, current)
    keys = [key for group in saved for key in group["params"]]
    assignments = [entry for group in saved for entry in group.get(ASSIGNMENTS, [None] * len(group["params"]))]
    loaded = [{**own, **group, "params": own["params"]} for group, own in zip(saved, current)]
    moves = [
        _move(replace(member, group=group), state_dict["state"].get(key, {}), entry, keep_plan)
        for member, group, key, entry in zip(groups.members(current), _repeated(loaded), keys, assignments)
    ]
    scales = migrate.lr_scales(moves)
    state: defaultdict[Any, Any] = defaultdict(dict)
    state.update({key: value for key, value in state_dict["state"].items() if key not in set(keys)})
    params = [param for group in current for param in group["params"]]
    for param, move in zip(params, moves):
        if move.holding.state:
            state[param] = migrate.convert(move.holding, move.block.configuration)
    written = iter(groups.assignment(replace(move.block, lr_scale=scales[move.block.name])) for move in moves)
    for group, own in zip(loaded, current):
        group[ASSIGNMENTS] = [next(written) for _ in group["params"]]
        if keep_plan:
            group[PLAN_SETTINGS] = own.get(PLAN_SETTINGS, {})
    return {"state": state, "param_groups": loaded}


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
        theirs, ours = groups.names(group, index), groups.names(own, index)
        if theirs != ours and sorted(theirs) == sorted(ours):
            first = next(pair for pair in zip(theirs, ours) if pair[0] != pair[1])
            raise CheckpointError(
                f"the parameters of group {index} are in another order than in the checkpoint: {first[1]!r} stands "
                f"where {first[0]!r} was saved. Pass them in the order they were saved in."
            )


def _repeated(loaded: Sequence[Group]) -> list[Group]:
    """The group of every parameter, in order."""
    return [group for group in loaded for _ in group["params"]]


def _move(member: Member, entry: dict[str, Any], saved: Assignment | None, keep_plan: bool) -> Move:
    """What a checkpoint holds for one parameter, and the block it goes to. Raises if it does not fit."""
    own = Block(member.block, member.configuration, {}, member.lr_scale, member.risk, member.why)
    if torch_state.is_torch_entry(entry):
        configuration, state = torch_state.read_entry(entry, member.name)
        block, lr_scale = own, None
    elif saved is not None:
        theirs = groups.read_assignment(saved)
        configuration, state, lr_scale = theirs.configuration, dict(entry), theirs.lr_scale
        block = own if keep_plan else theirs
    elif entry:
        raise CheckpointError(
            f"the checkpoint's state of parameter {member.name!r} has the keys {', '.join(map(repr, entry))}, which "
            "are neither baoc's nor those of torch.optim's AdamW, Adam, SGD or Adafactor. Load it with the optimizer "
            "that wrote it."
        )
    else:
        configuration, state, lr_scale, block = own.configuration, {}, None, own
    fitted = _fitted(member, configuration, state)
    hyper = groups.hyper(member.group, f"the checkpoint's group of {member.name!r}")
    param = groups.real_view(member.param.detach())
    return Move(Holding(param, member.shape, configuration, fitted, hyper), block, lr_scale)


def _fitted(member: Member, configuration: Configuration, state: ParamState) -> ParamState:
    """Saved state on the parameter's device, every buffer checked against the layout and none of them cast."""
    if not state:
        return {}
    fitted: ParamState = {}
    layout = configuration.layout(member.shape)
    for key, buffer in layout.buffers.items():
        tensor = state.get(key)
        held = f"{tensor.dtype} of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else "nothing"
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != buffer.shape or tensor.dtype != buffer.dtype:
            raise CheckpointError(
                f"parameter {member.name!r} has shape {member.shape} and needs {key!r} as {buffer.dtype} of shape "
                f"{buffer.shape} for {configuration}, but the checkpoint holds {held}. Is it of another model?"
            )
        fitted[key] = tensor.clone() if key.endswith(".age") else tensor.to(member.param.device).contiguous()
    for stored in layout.slots:
        if stored.age_key not in state:
            raise CheckpointError(
                f"the checkpoint's state of parameter {member.name!r} has no {stored.age_key!r}: it is damaged. Load "
                "another one, or start without state."
            )
        fitted.setdefault(stored.age_key, int(state[stored.age_key]))
    return fitted

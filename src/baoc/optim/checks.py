"""What is looked at before anything is changed: plans and settings that do not go together, tensors that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from baoc.core.mechanisms import MECHANISMS, known_settings
from baoc.core.plan import Plan, PlanError
from baoc.optim.groups import Member
from baoc.optim.state import misfit


def refuse_idle(plan: Plan, settings: Mapping[str, Any]) -> None:
    """Whoever names a plan and a setting means the two to go together."""
    used = {block.configuration.mechanism for block in plan.blocks}
    for name in settings:
        owners = [mechanism.name for mechanism in MECHANISMS.values() if name in known_settings(mechanism)]
        if not any(name in known_settings(mechanism) for mechanism in used):
            raise ValueError(
                f"{name}={settings[name]!r} would do nothing: it is a setting of {', '.join(owners)}, and the plan "
                f"has {', '.join(sorted(mechanism.name for mechanism in used))}. Leave it out, or ask for one of "
                "those."
            )


def refuse_two_answers(members: Iterable[Member], defaults: Plan) -> None:
    """A plan was given, and a group must not have asked for anything but what it would have had by default."""
    given = {member.name: member.configuration for member in members}
    asked = next((name for name, c in given.items() if c != defaults.block_of(name).configuration), None)
    if asked is not None:
        raise PlanError(
            f"parameter {asked!r} is in a group that asks for {given[asked]} while plan= is given as "
            "well. Drop one of them: the plan has a configuration for every parameter."
        )


def checked_offload(offload: bool | None) -> bool | None:
    """The argument of this name, or an error."""
    if offload not in (None, True, False):
        raise ValueError(
            f"offload is {offload!r}; it must be True (state of all blocks in host memory), False or None. For some "
            "blocks give a plan that says so, such as plan.offloaded('matrices')."
        )
    return offload


def refuse_offloading(members: Iterable[Member], plan: Plan) -> None:
    """Raise if a plan has state in host memory where that cannot be."""
    for member in members:
        obstacle = member.obstacle_to_offloading if plan.block_of(member.name).host else None
        if obstacle:
            raise PlanError(
                f"the state of parameter {member.name!r} cannot be in host memory while it is on "
                f"{member.param.device}: {obstacle}. Leave out offload= and host_memory=, or its block's host."
            )


def check_state(member: Member, state: Mapping[str, Any]) -> None:
    """Raise if a parameter's state, as its place shows it, is not what its layout says."""
    problem = misfit(member.layout, state, member.state_device)
    if problem:
        raise RuntimeError(
            f"parameter {member.name!r} has shape {member.shape} and {problem} ({member.configuration}). Did the "
            "parameter or its state change its shape or place? Make a new optimizer, or put the old one back."
        )


def check_tensors(member: Member) -> None:
    """Raise if a parameter's gradient is not one that an update can read."""
    param, grad = member.param, cast(Tensor, member.param.grad)
    if grad.shape != param.shape:
        raise RuntimeError(
            f"parameter {member.name!r} has shape {tuple(param.shape)}, but its gradient has shape "
            f"{tuple(grad.shape)}. Clear gradients when a parameter is replaced."
        )
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"parameter {member.name!r} has a sparse gradient, which BlockOptimizer does not support. Build its "
            "embedding with sparse=False, or give it to torch.optim.SparseAdam."
        )

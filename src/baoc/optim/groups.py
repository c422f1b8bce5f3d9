"""torch's param groups: names of parameters, hyper-parameters, and plans that follow them."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from baoc.core.configuration import Configuration
from baoc.core.mechanisms import MECHANISMS, known_settings
from baoc.core.plan import Block, Plan
from baoc.core.roles import Role, canonical_name
from baoc.core.spec import Hyper, Shape
from baoc.core.splits import Split

Group = dict[str, Any]


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

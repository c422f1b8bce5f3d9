"""Reading torch's param groups: names, hyper-parameters, and which block of the plan each parameter is in."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from baoc.core.configuration import Configuration, Layout
from baoc.core.mechanisms import known_settings
from baoc.core.plan import Block, Plan
from baoc.core.roles import canonical_name
from baoc.core.spec import Hyper, Shape, real_shape
from baoc.optim.place import HOST, WHOLE, Place, has_own_memory, place_of

Group = dict[str, Any]


@dataclass(frozen=True)
class Member:
    """One parameter in its place, as groups and plan said when it was read off them: see :class:`Roster`."""

    name: str
    param: Tensor
    group: Group
    block: Block  # of the plan
    place: Place

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
        """It has state, in other memory than itself. Not kept: a model may move to another device."""
        return self.block.host and has_own_memory(self.param.device) and bool(self.layout.formats)

    @property
    def obstacle_to_offloading(self) -> str | None:
        """Why its state cannot be in other memory than itself, or ``None``."""
        if not has_own_memory(self.param.device):
            return None
        if self.place.ranks is not None:
            return "it is sharded, and a DTensor's state must be where it is"
        return f"it is a {type(self.param).__name__}" if is_traceable_wrapper_subclass(self.param) else None

    @functools.cached_property
    def shape(self) -> Shape:
        return real_shape(self.param)

    @functools.cached_property
    def needs_view(self) -> bool:
        """Kernels see it, and its gradient, through its place."""
        return self.place is not WHOLE or self.param.is_complex() or not self.param.dim()

    @functools.cached_property
    def layout(self) -> Layout:
        return self.configuration.layout(self.shape, rows=self.place.rows)


class Roster:
    """All members of some groups, kept for as long as they are what the groups say.

    Loading replaces groups, frameworks replace parameters and parameters change their shapes, so nothing read off the
    groups may be used again without asking :meth:`is_current`.
    """

    def __init__(self, groups: Sequence[Group], plan: Plan) -> None:
        self.members = tuple(members(groups, plan))
        self._shapes = [member.param.shape for member in self.members]
        self._sources = [_sources(group) for group in groups]
        self._plan = plan

    def is_current(self, groups: Sequence[Group], plan: Plan) -> bool:
        if len(groups) != len(self._sources) or plan is not self._plan:
            return False
        for group, seen in zip(groups, self._sources):
            now = _sources(group)
            if len(now) != len(seen) or not all(map(operator.is_, now, seen)):
                return False
        return [member.param.shape for member in self.members] == self._shapes


def _sources(group: Group) -> list[object]:
    """The objects that say who is in a group."""
    return [group, group.get("param_names"), *group["params"]]


def members(groups: Sequence[Group], plan: Plan) -> Iterator[Member]:
    for (name, param), group in zip(named_params(groups), repeated(groups)):
        yield Member(name, param, group, plan.block_of(name), place_of(param, name))


def named_params(groups: Sequence[Group]) -> Iterator[tuple[str, Any]]:
    """All parameters, or their numbers in a state dict, under names that are different from each other, in order."""
    return _distinct(groups, [names(group, index) for index, group in enumerate(groups)])


def positions(groups: Sequence[Group]) -> list[str]:
    """Every parameter's place, which is its name where nobody gave it one: ``0.3`` is parameter 3 of group 0."""
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
    """The group of every parameter, in order."""
    return (group for group in groups for _ in group["params"])


def names(group: Group, index: int) -> list[str]:
    """Parameter names, or places like ``0.3`` (group 0, parameter 3) where none were given."""
    if "param_names" not in group:
        return _positions(group, index)
    if len(group["param_names"]) != len(group["params"]):
        raise ValueError(
            f"param group {index} has {len(group['params'])} parameters and {len(group['param_names'])} names. Give "
            "every parameter a name, or none."
        )
    return [canonical_name(name) for name in group["param_names"]]


def _positions(group: Group, index: int) -> list[str]:
    return [f"{index}.{position}" for position in range(len(group["params"]))]


def named(params: nn.Module | Iterable[Any]) -> Iterable[Any]:
    """What torch's constructor takes: a module becomes its trainable parameters with their names."""
    if callable(params) and not isinstance(params, nn.Module):
        name = getattr(params, "__name__", type(params).__name__)
        raise TypeError(
            f"params is {name}, which is to be called first: pass {name}(...), or the model itself, which has names "
            "for its parameters."
        )
    if not isinstance(params, nn.Module):
        return params
    trainable = [(name, param) for name, param in params.named_parameters() if param.requires_grad]
    if not trainable:
        raise ValueError(f"{type(params).__name__} has no trainable parameters: all have requires_grad=False.")
    return trainable


# ---- hyper-parameters ----


def hyper(group: Group, place: str) -> Hyper:
    """The group's numbers as they are now: schedulers write to them between steps.

    As in torch, only :func:`check_hyper` is strict about ranges: a schedule may leave them for a while.
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
        settings={name: group[name] for name in known_settings() if name in group},
    )
    numbers = {"lr": read.lr, "betas[0]": read.beta1, "betas[1]": read.beta2, "weight_decay": read.weight_decay}
    if not math.isfinite(sum(numbers.values())):
        for key, value in numbers.items():
            _check(math.isfinite(value), place, key, value, "a finite number")
    return read


def check_hyper(group: Group, place: str) -> None:
    """Raise if a group's settings are out of range."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"{place}: Tensor lr must be 1-element, but it has shape {tuple(lr.shape)}.")
    _check(_in_range(lr, lambda x: x >= 0), place, "lr", lr, "a finite number >= 0")
    betas = group["betas"]
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    _check(pair, place, "betas", betas, "two numbers in [0, 1), like (0.9, 0.999)")
    for index, beta in enumerate(betas):
        _check(_in_range(beta, lambda x: 0 <= x < 1), place, f"betas[{index}]", beta, "in [0, 1)")
    for key in ("eps", "weight_decay"):
        _check(_in_range(group[key], lambda x: x >= 0), place, key, group[key], "a finite number >= 0")
    for setting in known_settings().values():
        value = group.get(setting.name, setting.default)
        _check(_accepts(setting.accepts, value), place, setting.name, value, setting.wanted)


def _in_range(value: Any, test: Any) -> bool:
    return _accepts(lambda x: math.isfinite(float(x)) and test(float(x)), value)


def _accepts(test: Any, value: Any) -> bool:
    try:
        return bool(test(value))
    except (TypeError, ValueError):  # not a number, or not a pair of them
        return False


def _check(right: bool, place: str, key: str, value: object, wanted: str) -> None:
    if not right:
        raise ValueError(f"{place}: invalid {key}: {value}. It must be {wanted}.")

"""Reading torch's param groups: names, hyper-parameters, and which configuration each parameter is assigned.

A group's ``assignments`` list runs parallel to its ``params``. Being plain data in the group, it survives checkpoints,
``deepcopy`` and ``pickle``, and it keeps its meaning when FSDP or Accelerate replace the parameter objects.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from baoc.core.configuration import Configuration, Layout, parse
from baoc.core.plan import Block, canonical_name
from baoc.core.spec import Hyper, Shape, real_shape

Group = dict[str, Any]
Assignment = dict[str, Any]
ASSIGNMENTS = "assignments"
PLAN_SETTINGS = "plan_settings"


@dataclass(frozen=True)
class Member:
    """One parameter in its place, as the groups said when it was read off them: see :class:`Roster`."""

    name: str
    param: Tensor
    group: Group
    block: str
    configuration: Configuration
    lr_scale: float | None
    risk: Mapping[str, float]
    why: str

    @functools.cached_property
    def shape(self) -> Shape:
        return real_shape(self.param)

    @functools.cached_property
    def layout(self) -> Layout:
        return self.configuration.layout(self.shape)

    @functools.cached_property
    def needs_view(self) -> bool:
        """Kernels see it through :func:`real_view`."""
        return self.param.is_complex() or not self.param.dim()


class Roster:
    """All members of some groups, kept for as long as they are what the groups say.

    Loading replaces groups, frameworks replace parameters and parameters change their shapes, so nothing read off the
    groups may be used again without asking :meth:`is_current`.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self.members = tuple(members(groups))
        self._shapes = [member.param.shape for member in self.members]
        self._sources = [_sources(group) for group in groups]

    def is_current(self, groups: Sequence[Group]) -> bool:
        if len(groups) != len(self._sources):
            return False
        for group, seen in zip(groups, self._sources):
            now = _sources(group)
            if len(now) != len(seen) or not all(map(operator.is_, now, seen)):
                return False
        return [member.param.shape for member in self.members] == self._shapes


def _sources(group: Group) -> list[object]:
    """The objects that say who is in a group and what becomes of it."""
    return [group, group[ASSIGNMENTS], group.get("param_names"), *group["params"]]


def members(groups: Sequence[Group]) -> Iterator[Member]:
    seen: set[str] = set()
    for index, group in enumerate(groups):
        for name, param, entry in zip(names(group, index), group["params"], group[ASSIGNMENTS]):
            if name in seen:  # two models in one optimizer may use the same names
                name = f"{index}.{name}"
            seen.add(name)
            block = read_assignment(entry)
            yield Member(name, param, group, block.name, block.configuration, block.lr_scale, block.risk, block.why)


def assignment(block: Block) -> Assignment:
    """What a group keeps of a parameter's block: plain values that any checkpoint can carry."""
    return {
        "block": block.name,
        "configuration": str(block.configuration),
        "lr_scale": block.lr_scale,
        "risk": dict(block.risk),
        "why": block.why,
    }


def read_assignment(entry: Assignment) -> Block:
    """The block of an assignment, without its parameters. Distributed checkpoints lose empty values."""
    configuration = parse(entry["configuration"])
    return Block(entry["block"], configuration, {}, entry["lr_scale"], entry.get("risk", {}), entry.get("why", ""))


def assign(groups: Sequence[Group], blocks: Mapping[str, Block]) -> None:
    """Write a block for every parameter name into the groups."""
    chosen = iter([blocks[member.name] for member in members(groups)])
    for group in groups:
        mine = [next(chosen) for _ in group["params"]]
        group[ASSIGNMENTS] = [assignment(block) for block in mine]


def names(group: Group, index: int) -> list[str]:
    """Parameter names, or places like ``0.3`` (group 0, parameter 3) where none were given."""
    if "param_names" in group:
        return [canonical_name(name) for name in group["param_names"]]
    return [f"{index}.{position}" for position in range(len(group["params"]))]


def named(params: nn.Module | Iterable[Any]) -> Iterable[Any]:
    """What torch's constructor takes: a module becomes its trainable parameters with their names."""
    if not isinstance(params, nn.Module):
        return params
    trainable = [(name, param) for name, param in params.named_parameters() if param.requires_grad]
    if not trainable:
        raise ValueError(f"{type(params).__name__} has no trainable parameters: all have requires_grad=False.")
    return trainable


def real_view(tensor: Tensor) -> Tensor:
    """Real-valued and with at least one dim, sharing memory."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor if tensor.dim() else tensor.view(1)


def hyper(group: Group, place: str) -> Hyper:
    """The group's numbers as they are now: schedulers write to them between steps."""
    check_hyper(group, place)
    beta1, beta2 = group["betas"]
    eps1, eps2 = group["adafactor_eps"]
    return Hyper(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        beta2_decay=group["beta2_decay"],
        # torch takes the parameter's own epsilon; all math here is in fp32, whatever the parameter is
        adafactor_eps=(torch.finfo(torch.float32).eps if eps1 is None else eps1, eps2),
        clip_threshold=group["clip_threshold"],
    )


def check_hyper(group: Group, place: str) -> None:
    """Raise if a group's settings are out of range."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"{place}: Tensor lr must be 1-element, but it has shape {tuple(lr.shape)}.")
    _check(math.isfinite(float(lr)) and float(lr) >= 0, place, "lr", lr, "a finite number >= 0")
    _check(len(group["betas"]) == 2, place, "betas", group["betas"], "two numbers in [0, 1)")
    for index, beta in enumerate(group["betas"]):
        _check(0 <= float(beta) < 1, place, f"betas[{index}]", beta, "in [0, 1)")
    for key in ("eps", "weight_decay"):
        _check(float(group[key]) >= 0, place, key, group[key], "a number >= 0")
    _check(group["beta2_decay"] <= 0, place, "beta2_decay", group["beta2_decay"], "a number <= 0")
    _check(group["clip_threshold"] >= 1, place, "clip_threshold", group["clip_threshold"], "a number >= 1")
    eps1, eps2 = group["adafactor_eps"]
    _check((eps1 is None or eps1 >= 0) and eps2 >= 0, place, "adafactor_eps", (eps1, eps2), "two numbers >= 0")


def _check(right: bool, place: str, key: str, value: object, wanted: str) -> None:
    if not right:
        raise ValueError(f"{place}: invalid {key}: {value}. It must be {wanted}.")

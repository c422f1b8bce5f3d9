"""Configurations of ours by role or by parameter, and 32-bit AdamW for all that is not named.

A method's name says it all: ``hidden=muon-8; embedding=colnorm``, or ``transformer.h.3.mlp.c_fc.weight=spectral``.
A last word like ``x2`` is of the learning rate: ``embedding=adamw-8 x2``. Settings of the optimizer may follow:
``hidden=muon-8; weight_decay=0.5; betas=(0.9, 0.95)``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

import baoc
from baoc import Configuration
from baoc.core.plan import Block, Plan
from baoc.core.roles import HIDDEN, Role, canonical_name, roles_of
from baoc.core.spec import Shape
from experiments.methods.base import Method, MethodError, Settings
from experiments.methods.budgeted import lr_scale
from experiments.methods.uniform import arguments

REST = "adamw-32"
SMALL = 4096
"""Embeddings and heads of fewer elements have fp32 state anyway, and keep AdamW."""
ROLES: Mapping[str, frozenset[Role]] = {
    "hidden": frozenset(HIDDEN),
    "embedding": frozenset({Role.EMBEDDING}),
    "head": frozenset({Role.HEAD}),
    "vector": frozenset({Role.VECTOR}),
}
SETTINGS = ("betas", "weight_decay", "update_rms", "max_update_rms")
"""Settings of the optimizer that a spelling may have; no model of ours has parameters of these names."""
_ASSIGNMENT = re.compile(r"\s*([\w.]+)\s*=")  # of a configuration; its own `=` are in brackets
_FACTOR = re.compile(r"\s+x([\d.]+)\s*$")


@dataclass(frozen=True)
class Choice:
    """What a place gets."""

    configuration: Configuration
    lr_factor: float = 1.0

    @property
    def label(self) -> str:
        return self.configuration.alias + (f" x{self.lr_factor:g}" if self.lr_factor != 1 else "")


def is_by_role(name: str) -> bool:
    """Whether a method's name is of this kind.

    >>> is_by_role("hidden=muon-8"), is_by_role("adamw[m=int8,v=factored]"), is_by_role("muon-8; update_rms=0.2")
    (True, False, False)
    """
    return _ASSIGNMENT.match(name) is not None


def by_role(spelling: str) -> Method:
    """The method of a spelling.

    >>> by_role("hidden=muon[m=int8]; embedding=adamw-8").label
    'hidden=muon-8; embedding=adamw-8'
    >>> by_role("hidden=muon-8; weight_decay=0.5").label
    'hidden=muon-8; weight_decay=0.5'
    """
    texts = spelling.split(";")
    others = [text for text in texts if text.partition("=")[0].strip() in SETTINGS]
    chosen = parse(";".join(text for text in texts if text not in others))
    given = arguments(spelling, others)

    def build(model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
        plan = plan_of(model, chosen)
        hyper = {"betas": settings.betas, "weight_decay": settings.weight_decay, **given}
        return baoc.BlockOptimizer(model, lr=lr, plan=plan, **hyper)

    label = "; ".join([*(f"{place}={choice.label}" for place, choice in chosen.items()), *map(str.strip, others)])
    return Method(spelling, label, build, note=f"baoc; {REST} for all that is not named")


def parse(spelling: str) -> dict[str, Choice]:
    """Choices by role or parameter.

    >>> parse("embedding=adamw-8 x2")["embedding"].lr_factor
    2.0
    """
    found: dict[str, Choice] = {}
    for text in spelling.split(";"):
        match = _ASSIGNMENT.match(text)
        if match is None:
            raise MethodError(f"cannot read {text.strip()!r} of {spelling!r}. Write it like 'hidden=muon-8'.")
        if match[1] in found:
            raise MethodError(f"{spelling!r} says twice what {match[1]!r} gets.")
        factor = _FACTOR.search(text)
        configuration = baoc.parse(text[match.end() : factor.start() if factor else None])
        found[match[1]] = Choice(configuration, float(factor[1]) if factor else 1.0)
    return found


def plan_of(model: nn.Module, chosen: Mapping[str, Choice]) -> Plan:
    """One block for each role or parameter that is named, and one for the rest.

    >>> model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    >>> plan = plan_of(model, parse("hidden=spectral; embedding=colnorm"))
    >>> {block.name: (block.configuration.alias, list(block.parameters)) for block in plan.blocks}["hidden"]
    ('spectral', ['1.weight'])
    """
    params = {canonical_name(name): param for name, param in model.named_parameters() if param.requires_grad}
    roles = roles_of(model)
    unknown = [place for place in chosen if place not in ROLES and place not in params]
    if unknown:
        raise MethodError(f"{unknown[0]!r} is neither a parameter of this model nor one of {', '.join(ROLES)}.")
    rest = Choice(baoc.parse(REST))
    blocks: dict[tuple[str, Choice], dict[str, Shape]] = {}
    for name, param in params.items():
        shape = tuple(param.shape)
        place = name if name in chosen else _place(roles[name], param.numel())
        choice = chosen.get(place, rest)
        # not all that a role has suits every mechanism
        choice = replace(choice, configuration=choice.configuration.suited(shape, roles[name]))
        place = "rest" if choice == rest else place
        blocks.setdefault((place, choice), {})[name] = shape
    made: list[Block] = []
    for (place, choice), shapes in blocks.items():
        is_second = any(other.name == place for other in made)
        block = Block(f"{place}, {choice.label}" if is_second else place, choice.configuration, shapes)
        scale = choice.lr_factor * lr_scale(block, [params[name] for name in shapes])
        made.append(replace(block, lr_scale=scale))
    return Plan(tuple(made))


def _place(role: Role, numel: int) -> str:
    place = next((place for place, roles in ROLES.items() if role in roles), "rest")
    return "rest" if place in ("embedding", "head") and numel < SMALL else place

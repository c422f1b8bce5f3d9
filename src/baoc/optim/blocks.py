"""Which block of the plan each parameter is in, as parameters come, move and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from baoc.core.configuration import Configuration
from baoc.core.plan import Block, Plan
from baoc.core.roles import Role
from baoc.core.spec import Shape


def plan_of(assigned: Sequence[tuple[str, Shape, Block]], settings: Mapping[str, Any]) -> Plan:
    """The plan in which each parameter (name, shape) is in its own block, whatever parameters that one named.

    Blocks of one name that differ, as an interrupted change of plans leaves them, are told apart by a mark.
    """
    blocks: dict[str, tuple[Block, dict[str, Shape]]] = {}
    for name, shape, block in assigned:
        bare = replace(block, parameters={})
        while bare.name in blocks and blocks[bare.name][0] != bare:
            bare = replace(bare, name=f"{bare.name}'")
        blocks.setdefault(bare.name, (bare, {}))[1][name] = shape
    return Plan(tuple(replace(block, parameters=mine) for block, mine in blocks.values()), settings)


def extended(
    plan: Plan,
    group: int,
    configuration: Configuration,
    shapes: Mapping[str, Shape],
    roles: Mapping[str, Role],
    *,
    host: bool = False,
) -> Plan:
    """The plan with the parameters of one more param group, all of one configuration where that suits them."""
    if not shapes:
        return plan
    blocks = list(plan.blocks)
    for block in Plan.uniform(configuration, shapes, roles).blocks:
        of_group = f"group {group}" if block.name == "all" else f"group {group} {block.name}"
        name = of_group if group else block.name
        while name in {each.name for each in blocks}:
            name += "'"
        blocks.append(replace(block, name=name, host=host))
    return replace(plan, blocks=tuple(blocks))


def without_others(plan: Plan, shapes: Mapping[str, Shape]) -> Plan:
    """The plan of those of its parameters that are there."""
    known = [(name, shape, plan.block_of(name)) for name, shape in shapes.items() if name in plan]
    return plan_of(known, plan.settings)

"""Which block each parameter is in: the plan of an optimizer, as its groups and parameters change."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from baoc.core.configuration import Configuration, parse
from baoc.core.plan import Plan
from baoc.core.roles import Role, role_of
from baoc.core.spec import DEFAULT_WEIGHT, LOW_PRECISION, SMALLEST_WEIGHT, Shape, real_shape
from baoc.core.splits import Splits, matched
from baoc.optim import groups, low_bits, migrate
from baoc.optim.groups import Group
from baoc.optim.members import Members, allocate, refuse_offloading
from baoc.optim.state import ParamState


class Assignment:
    """A plan that follows param groups: frameworks add, remove, cast and shard parameters without notice.

    Args:
        default: the configuration of parameters of which nothing else is said.
        roles: of parameters, as far as they are known.
        splits: of parameters, by name or pattern.
        splits_given: whether the user said which; a checkpoint does not change these.
        offload: whether state is in host memory: of all blocks, of none, or (``None``) as plans say.
    """

    def __init__(
        self,
        default: Configuration,
        roles: Mapping[str, Role],
        splits: Splits,
        *,
        splits_given: bool = False,
        offload: bool | None = None,
    ) -> None:
        self.default, self.roles, self.offload = default, roles, offload
        self.splits, self.splits_given = splits, splits_given
        self.plan = Plan(())
        self.weight = SMALLEST_WEIGHT  # slot w of parameters that are cast to 16 bits from now on
        self.is_given = False  # a checkpoint of another plan is migrated, rather than its plan taken over
        self.is_installed = False  # all parameters have state
        self._members: Members | None = None
        self._change: migrate.Change | None = None

    def changed(self, **changes: Any) -> Assignment:
        """Return a copy with other attributes, and without what is cached."""
        other = copy.copy(self)
        other.__dict__.update(_members=None, _change=None, **changes)
        return other

    # ---- members ----

    def current(self, param_groups: Sequence[Group]) -> Members | None:
        """Return all members, or ``None`` if groups, parameters, shapes or the plan have changed."""
        self.finish_change()
        is_current = self._members is not None and self._members.are_current(param_groups, self.plan)
        return self._members if is_current else None

    def renamed(self, param_groups: Sequence[Group]) -> dict[str, str]:
        """Follow parameters without names, which are called by their positions, when others leave before them.

        Returns:
            New names by old ones, if any has changed. Parameters that are not there have left.
        """
        if self._members is None:
            return {}
        self._members.mend_names(param_groups)
        before = {id(member.param): member.name for member in self._members.all}
        named = groups.named_params(param_groups)
        names = {before[id(param)]: name for name, param in named if id(param) in before}
        if all(old == name for old, name in names.items()):
            return {}
        plan = self.plan.renamed(names)
        plan = dataclasses.replace(plan, blocks=tuple(block for block in plan.blocks if block.parameters))
        splits = {names.get(pattern, pattern): split for pattern, split in self.splits.items()}
        self.__dict__.update(plan=plan, splits=splits)
        return names

    def follow(self, param_groups: Sequence[Group], state: dict[Any, ParamState]) -> Members:
        """Fit the plan to the parameters that are there, give them state, and return all members."""
        named = dict(groups.named_params(param_groups))
        new = [(name, param) for name, param in named.items() if name not in self.plan]
        if new or len(named) != sum(len(block.parameters) for block in self.plan.blocks):
            kept = groups.restricted(self.plan, {name: real_shape(param) for name, param in named.items()})
            self.plan = self.extended(kept, len(param_groups) - 1, self.default, new)
        narrow = {name for name, param in named.items() if param.dtype in LOW_PRECISION}
        if self.is_installed or self._members is not None:  # the model may have been cast: its plan follows
            self.plan = self.plan.without_low_bits(named.keys() - narrow).with_low_bits(narrow, self.weight)
        self._members = members = Members(param_groups, self.plan)
        if self.is_installed:
            allocate(members.all, state)
            low_bits.take_over(members.all, state)
        return members

    # ---- plans ----

    def extended(
        self, plan: Plan, index: int, configuration: Configuration, named: Iterable[tuple[str, Tensor]]
    ) -> Plan:
        """Return a plan with parameters of one more group."""
        named = list(named)
        shapes = {name: real_shape(param) for name, param in named}
        dtypes = {name: param.dtype for name, param in named}
        roles, host = self.roles_of(shapes), bool(self.offload)
        extended = groups.extended(plan, index, configuration, shapes, roles, dtypes, host=host)
        return extended.split({**matched(self.splits, shapes), **plan.splits})

    def uniform(self, configuration: Configuration | str, members: Members) -> Plan:
        """Return the plan with one configuration for all parameters that it suits."""
        roles = self.roles_of(members.shapes)
        Plan.refuse_unsuited(parse(configuration), members.shapes, roles)
        plan = Plan.uniform(configuration, members.shapes, roles, members.dtypes)
        return plan.offloaded(host=bool(self.offload)).split(self.splits)

    def roles_of(self, shapes: Mapping[str, Shape]) -> dict[str, Role]:
        return {name: self.roles.get(name) or role_of(shape, name) for name, shape in shapes.items()}

    def install(self, plan: Plan, members: Members, weight: str = SMALLEST_WEIGHT) -> None:
        """Set the first plan. State is allocated when members are asked for."""
        refuse_offloading(members.all, plan)
        Members(members.groups, plan)  # refuses slot w of fp32 parameters, which a cast would drop
        self.__dict__.update(plan=plan, weight=weight, is_installed=True, _members=None)

    def change(
        self,
        plan: Plan,
        members: Members,
        state: dict[Any, ParamState],
        weight: str,
        *,
        has_stepped: bool,
        inherit: bool,
        attempt: migrate.Attempt,
    ) -> None:
        """Convert all state to a plan. ``attempt`` calls what may fail for lack of memory and asks no other rank."""
        plan.check(members.shapes)
        plan = plan.with_low_bits(members.low_precision, SMALLEST_WEIGHT)
        refuse_offloading(members.all, plan)
        self.weight = weight
        begin = migrate.alone if members.ranks else attempt  # ranks that share a parameter communicate in here
        self._change = begin(lambda: migrate.Change(members.all, state, plan, has_stepped=has_stepped, inherit=inherit))
        try:
            self._change.run(attempt)
        finally:
            self.finish_change()

    def finish_change(self) -> None:
        """Make the plan say what :meth:`change` did, however far it came.

        Whatever reads the plan calls this first, so an interrupt in here does no harm.
        """
        if self._change is not None:
            self._change.put_back()
            plan = self._change.plan_so_far(self.plan)
            self.__dict__.update(plan=plan, is_given=True, is_installed=True, _change=None)  # cannot be interrupted


def weight_of_casts(plan: Plan | Configuration | str) -> str:
    """Return slot ``w`` of parameters that are cast to 16 bits after a plan was set: as if they were before."""
    return SMALLEST_WEIGHT if isinstance(plan, Plan) else parse(plan).weight or DEFAULT_WEIGHT

"""Moving state between configurations.

What mechanisms have in common is the *mean* that a slot stands for: a slot divided by the mass of its recurrence. Means
are decoded, rescaled and encoded again, a tile at a time and one parameter at a time, so old and new state exist side
by side for one parameter only, and until its new state is complete the old one is as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baoc.core.codecs import Format, SummedFormat
from baoc.core.configuration import Layout
from baoc.core.mechanisms import Evidence, Mechanism
from baoc.core.plan import Block
from baoc.core.rounding import NEAREST
from baoc.core.spec import Hyper
from baoc.optim import groups
from baoc.optim.groups import Member
from baoc.optim.kernels.eager import TILE_NUMEL
from baoc.optim.kernels.update import row_tiles
from baoc.optim.place import HOST, Place
from baoc.optim.state import ParamState, ages_of, new_age, new_slot, new_state, set_age


@dataclass(frozen=True)
class Holding:
    """One parameter, what it is updated with, and the state it has."""

    param: Tensor  # as its place shows it
    layout: Layout
    state: ParamState
    hyper: Hyper
    place: Place
    has_stepped: bool = False  # in this process: what is stateless does not tell

    @property
    def mechanism(self) -> Mechanism:
        return self.layout.mechanism

    @functools.cached_property
    def ages(self) -> dict[str, int]:
        """Of the slots that have seen a gradient."""
        return {name: age for name, age in ages_of(self.layout, self.state).items() if age > 0} if self.state else {}

    @functools.cached_property
    def _held(self) -> Mapping[str, Any]:
        return self.place.held(self.state)

    def tiles(self) -> list[slice]:
        return row_tiles(self.param.shape, TILE_NUMEL)

    def value(self, stored: Format, rows: slice) -> Tensor:
        """fp32 rows of a slot."""
        return stored.decode(stored.held_in(self._held), rows)

    def means(self, rows: slice) -> dict[str, Tensor]:
        """fp32 rows of every slot that has seen a gradient, as weighted means."""
        slots = {stored.slot.name: stored for stored in self.layout.formats}
        mass = self.mechanism.mass
        return {name: self.value(slots[name], rows) / mass(name, age, self.hyper) for name, age in self.ages.items()}


@dataclass(frozen=True)
class Move:
    """A parameter on its way into a block."""

    holding: Holding
    block: Block
    lr_scale: float | None  # so far

    @property
    def layout(self) -> Layout:
        """The new one."""
        return self.block.configuration.layout(self.holding.layout.shape, rows=self.holding.place.rows)

    @property
    def device(self) -> torch.device:
        """Where the new state is to be."""
        return HOST if self.block.host else self.holding.param.device

    def convert(self) -> ParamState:
        return convert(self.holding, self.layout, self.device)


def holding_of(member: Member, state: ParamState, has_stepped: bool = False) -> Holding:
    hyper = groups.hyper(member.group, f"the group of {member.name!r}")
    return Holding(member.place.local(member.param.detach()), member.layout, state, hyper, member.place, has_stepped)


@torch.no_grad()
def convert(old: Holding, layout: Layout, device: torch.device) -> ParamState:
    """The state of a parameter in another layout, on a device. Slots that both have are inherited with their age.

    What need not change is the old tensor itself; nothing is written to the old state.
    """
    if not old.state:
        return _late_start(old, layout, device)
    state: ParamState = {}
    for stored in layout.formats:
        state |= _converted_slot(old, layout.mechanism, stored, device)
    return state


def _late_start(old: Holding, layout: Layout, device: torch.device) -> ParamState:
    """State for a parameter that has had none so far; nothing if it need not be there yet."""
    rms = old.mechanism.typical_rms(Evidence({}, {}, 0.0), old.hyper) if old.has_stepped else None
    if rms is None or not layout.formats:
        return {}
    state = new_state(layout, device, old.place)
    for stored in layout.formats:
        set_age(state, stored, layout.mechanism.late_age(stored.slot.name, rms, old.hyper))
    return state


def order(moves: Sequence[Move]) -> list[int]:
    """In which order to convert, so that old and new state together need as little as possible.

    A parameter's old and new state exist side by side for a moment. Those that shrink go first, small ones before
    large, to make room; of those that grow the largest go first, while there is room. What counts are whole
    parameters: ranks whose shards differ must go in one order.
    """

    def rank(index: int) -> tuple[bool, int]:
        old, new = _whole_bytes(moves[index].holding.layout), _whole_bytes(moves[index].layout)
        return new > old, -old if new > old else new

    return sorted(range(len(moves)), key=rank)


def _whole_bytes(layout: Layout) -> int:
    return layout.configuration.state_bytes(layout.shape)


def is_same_rule(old: Mechanism, new: Mechanism) -> bool:
    """The mechanisms differ in nothing but weight decay."""
    return type(old).direction is type(new).direction and type(old).finish is type(new).finish


def _converted_slot(old: Holding, mechanism: Mechanism, stored: Format, device: torch.device) -> ParamState:
    name = stored.slot.name
    source = next((each for each in old.layout.formats if each.slot.name == name and name in old.ages), None)
    age = old.ages[name] if source else mechanism.inferred_age(name, old.ages, old.hyper)
    if source == stored and _mass_ratio(old, mechanism, name, age) == 1.0:
        state = {key: old.state[key].to(device) for _, key in stored.keys} | new_age(stored)
    else:
        state = new_slot(stored, device, old.place)
        if age:
            _fill(stored, state, _values(old, mechanism, source, name, age), old.place)
    set_age(state, stored, age)
    return state


def _mass_ratio(old: Holding, mechanism: Mechanism, slot: str, age: int) -> float:
    return mechanism.mass(slot, age, old.hyper) / old.mechanism.mass(slot, age, old.hyper)


def _values(
    old: Holding, mechanism: Mechanism, source: Format | None, slot: str, age: int
) -> Iterator[tuple[slice, Tensor]]:
    """A slot's values for a mechanism, tile by tile: inherited from ``source``, or inferred from the other slots."""
    for rows in old.tiles():
        if source:
            yield rows, old.value(source, rows) * _mass_ratio(old, mechanism, slot, age)
            continue
        mean = mechanism.infer(slot, old.means(rows), old.ages, old.hyper)
        assert mean is not None, f"{mechanism.name} gives a fresh {slot!r} an age but no value"
        yield rows, mean * mechanism.mass(slot, age, old.hyper)


def _fill(stored: Format, state: ParamState, values: Iterator[tuple[slice, Tensor]], place: Place) -> None:
    held = stored.held_in(place.held(state))
    device = next(iter(held.values())).device
    if not isinstance(stored, SummedFormat):
        for rows, value in values:
            stored.encode(held, rows, value.to(device), NEAREST)
        return
    nothing = torch.zeros(0, *stored.shape[1:], device=device)
    partial = stored.absorb(held, slice(0, 0), nothing, 0.0, 1.0, NEAREST, None)  # all there is in a shard without rows
    for rows, value in values:
        partial = stored.absorb(held, rows, value.to(device), 0.0, 1.0, NEAREST, partial)
    stored.finish(held, 0.0, 1.0, NEAREST, None if partial is None else place.sum(partial))

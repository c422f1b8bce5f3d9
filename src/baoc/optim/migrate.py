"""Moving state between configurations, and to and from ``torch.optim``'s own optimizers.

What mechanisms have in common is the *mean* that a slot stands for: a slot divided by the mass of its recurrence. Means
are decoded, rescaled and encoded again, a tile at a time and one parameter at a time, so at most one extra parameter's
state exists at any moment.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baoc.core.configuration import Configuration, Layout, StoredSlot
from baoc.core.plan import Block
from baoc.core.spec import NEAREST, Hyper, Mechanism, Shape, WholeCodec
from baoc.optim import groups
from baoc.optim.groups import Member
from baoc.optim.kernels.eager import TILE_NUMEL
from baoc.optim.kernels.update import buffers_of, row_tiles

ParamState = dict[str, Any]  # buffers by their layout key, and "<slot>.age"


@dataclass(frozen=True)
class Holding:
    """One parameter, what it is updated with, and the state it has."""

    param: Tensor  # real-valued view, at least one dim
    shape: Shape  # as layouts see it
    configuration: Configuration
    state: ParamState
    hyper: Hyper

    @property
    def layout(self) -> Layout:
        return self.configuration.layout(self.shape)

    @property
    def ages(self) -> dict[str, int]:
        """Of the slots that have seen a gradient."""
        ages = {stored.slot.name: int(self.state.get(stored.age_key, 0)) for stored in self.layout.slots}
        return {name: age for name, age in ages.items() if age > 0}

    def tiles(self) -> list[slice]:
        return row_tiles(self.param.shape, TILE_NUMEL)

    def value(self, stored: StoredSlot, rows: slice) -> Tensor:
        """fp32 rows of a slot."""
        return stored.codec.decode(buffers_of(stored, self.state), rows)

    def means(self, rows: slice) -> dict[str, Tensor]:
        """fp32 rows of every slot that has seen a gradient, as weighted means."""
        mass = self.configuration.mechanism.mass
        slots = {stored.slot.name: stored for stored in self.layout.slots}
        return {name: self.value(slots[name], rows) / mass(name, age, self.hyper) for name, age in self.ages.items()}


@dataclass(frozen=True)
class Move:
    """A parameter on its way into a block."""

    holding: Holding
    block: Block
    lr_scale: float | None  # so far


def holding_of(member: Member, state: ParamState) -> Holding:
    hyper = groups.hyper(member.group, f"the group of {member.name!r}")
    return Holding(groups.real_view(member.param.detach()), member.shape, member.configuration, state, hyper)


def new_state(layout: Layout, device: torch.device) -> ParamState:
    """Zeroed state in a layout, all ages 0."""
    state: ParamState = {
        key: torch.zeros(buffer.shape, dtype=buffer.dtype, device=None if buffer.name == "age" else device)
        for key, buffer in layout.buffers.items()
    }
    for stored in layout.slots:
        state.setdefault(stored.age_key, 0)
    return state


def set_age(state: ParamState, stored: StoredSlot, age: int) -> None:
    if stored.slot.age_is_state:
        state[stored.age_key].fill_(age)
    else:
        state[stored.age_key] = age


@torch.no_grad()
def convert(old: Holding, configuration: Configuration) -> ParamState:
    """The state of a parameter in another configuration. Slots that both have are inherited with their age.

    Consumes ``old.state``: each old slot is let go as soon as it is converted, so at most one extra tensor exists.
    """
    if not old.state:
        return {}
    layout = configuration.layout(old.shape)
    state: ParamState = {}
    inherited = [stored for stored in layout.slots if stored.slot.name in old.ages]
    fresh = [stored for stored in layout.slots if stored.slot.name not in old.ages]
    for stored in (*fresh, *inherited):  # a fresh slot may be inferred from all the old ones
        state |= _converted_slot(old, configuration.mechanism, stored, layout)
    return state


def order(moves: Sequence[Move]) -> list[int]:
    """In which order to convert, so that old and new state together need as little as possible.

    A parameter's old and new state exist side by side for a moment. Those that shrink go first, small ones before
    large, to make room; of those that grow the largest go first, while there is room.
    """

    def sizes(move: Move) -> tuple[int, int]:
        return move.holding.layout.nbytes, move.block.configuration.state_bytes(move.holding.shape)

    def rank(index: int) -> tuple[bool, int]:
        old, new = sizes(moves[index])
        return new > old, -old if new > old else new

    return sorted(range(len(moves)), key=rank)


def lr_scales(moves: Sequence[Move]) -> dict[str, float | None]:
    """The lr scale of every block after a move: the plan's own, or one that keeps the length of the block's updates."""
    blocks: dict[str, list[Move]] = {}
    for move in moves:
        blocks.setdefault(move.block.name, []).append(move)
    return {name: _lr_scale(block_moves) for name, block_moves in blocks.items()}


def _lr_scale(moves: Sequence[Move]) -> float | None:
    if moves[0].block.lr_scale is not None:
        return moves[0].block.lr_scale
    same_rule = all(_same_rule(m.holding.configuration.mechanism, m.block.configuration.mechanism) for m in moves)
    if all(move.lr_scale is None for move in moves) and (same_rule or not any(move.holding.ages for move in moves)):
        return None
    scales = [move.lr_scale or 1.0 for move in moves]
    mean_scale = scales[0] if len(set(scales)) == 1 else sum(scales) / len(scales)
    if same_rule:
        return mean_scale
    old_square = new_square = 0.0
    for move, scale in zip(moves, scales):
        old_rms = _expected_rms(move.holding, move.holding.configuration.mechanism)
        new_rms = _expected_rms(move.holding, move.block.configuration.mechanism)
        if old_rms is not None and new_rms is not None:
            old_square += move.holding.param.numel() * (scale * old_rms) ** 2
            new_square += move.holding.param.numel() * new_rms**2
    matched = math.sqrt(old_square / new_square) if new_square > 0 else 0.0
    return matched if math.isfinite(matched) and matched > 0 else mean_scale


def _converted_slot(old: Holding, mechanism: Mechanism, stored: StoredSlot, layout: Layout) -> ParamState:
    name = stored.slot.name
    source = next((other for other in old.layout.slots if other.slot.name == name and name in old.ages), None)
    age = old.ages[name] if source else mechanism.inferred_age(name, old.ages, old.hyper)
    if source and source.codec == stored.codec and _mass_ratio(old, mechanism, name, age) == 1.0:
        state = {key: old.state.pop(key) for key in map(stored.key, stored.buffer_names)}
    else:
        keys = [stored.key(buffer) for buffer in stored.buffer_names]
        state = new_state(Layout((stored,), {key: layout.buffers[key] for key in keys}), old.param.device)
        if age:
            _fill(stored, buffers_of(stored, state), _values(old, mechanism, source, name, age))
        if source:
            for buffer in source.buffer_names:
                del old.state[source.key(buffer)]
    state[stored.age_key] = torch.zeros((), dtype=torch.float32) if stored.slot.age_is_state else 0
    set_age(state, stored, age)
    return state


def _mass_ratio(old: Holding, mechanism: Mechanism, slot: str, age: int) -> float:
    return mechanism.mass(slot, age, old.hyper) / old.configuration.mechanism.mass(slot, age, old.hyper)


def _values(
    old: Holding, mechanism: Mechanism, source: StoredSlot | None, slot: str, age: int
) -> Iterator[tuple[slice, Tensor]]:
    """A slot's values for a mechanism, tile by tile: inherited from ``source``, or inferred from the other slots."""
    for rows in old.tiles():
        if source:
            yield rows, old.value(source, rows) * _mass_ratio(old, mechanism, slot, age)
            continue
        mean = mechanism.infer(slot, old.means(rows), old.ages, old.hyper)
        assert mean is not None, f"{mechanism.name} gives a fresh {slot!r} an age but no value"
        yield rows, mean * mechanism.mass(slot, age, old.hyper)


def _fill(stored: StoredSlot, buffers: Mapping[str, Tensor], values: Iterator[tuple[slice, Tensor]]) -> None:
    codec = stored.codec
    if not isinstance(codec, WholeCodec):
        for rows, value in values:
            codec.encode(buffers, rows, value, NEAREST)
        return
    partial = None
    for rows, value in values:
        partial = codec.absorb(buffers, rows, value, 0.0, 1.0, NEAREST, partial)
    codec.finish(buffers, 0.0, 1.0, NEAREST, partial)


def _same_rule(old: Mechanism, new: Mechanism) -> bool:
    """The mechanisms differ in nothing but weight decay."""
    return type(old).direction is type(new).direction


def _expected_rms(holding: Holding, mechanism: Mechanism) -> float | None:
    """RMS of a mechanism's next update in units of lr, given what another one's state tells about the gradients."""
    hyper = dataclasses.replace(holding.hyper, lr=max(holding.hyper.lr, 1e-30), lr_scale=1.0)
    known = dict(holding.ages)
    for slot in mechanism.slots:
        known.setdefault(slot.name, mechanism.inferred_age(slot.name, holding.ages, hyper))
    direction_square = param_square = 0.0
    for rows in holding.tiles():
        means = holding.means(rows)
        for slot in mechanism.slots:
            if slot.name not in means and (mean := mechanism.infer(slot.name, means, holding.ages, hyper)) is not None:
                means[slot.name] = mean
        direction = mechanism.expected_direction(means, known, hyper)
        if direction is None:
            return None
        direction_square += direction.square().sum().item()
        param_square += holding.param[rows].float().square().sum().item()
    numel = max(1, holding.param.numel())
    rms = math.sqrt(direction_square / numel)
    scalars = mechanism.scalars(hyper, {slot.name: known[slot.name] + 1 for slot in mechanism.slots})
    if mechanism.normalizes:
        param_rms = math.sqrt(param_square / numel)
        rms *= mechanism.step_factor(torch.tensor(rms), torch.tensor(param_rms), scalars).item()
    return rms * scalars["step"] / hyper.lr

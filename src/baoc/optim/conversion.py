"""State of a parameter in another configuration, and learning rates under which updates keep their length.

Update rules have in common the *mean* that a slot stands for: a slot divided by the mass of its recurrence. Means are
decoded, rescaled and encoded again, a tile at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baoc.core.codecs import Format, SummedFormat
from baoc.core.codecs.weights import low_bits_as
from baoc.core.configuration import Layout
from baoc.core.mechanisms import Evidence, Mechanism, pooled_rms
from baoc.core.plan import Block
from baoc.core.rounding import NEAREST
from baoc.core.sharding import HOST, Place
from baoc.core.spec import WEIGHT, Hyper
from baoc.optim import groups
from baoc.optim.kernels.eager import TILE_NUMEL
from baoc.optim.kernels.update import row_tiles
from baoc.optim.members import Member
from baoc.optim.state import ParamState, ages_of, new_age, new_slot, set_age


@dataclass(frozen=True)
class Holding:
    """One parameter with its layout and its state."""

    param: Tensor  # as its place shows it
    layout: Layout
    state: ParamState
    hyper: Hyper
    place: Place
    has_stepped: bool = False  # in this process: a stateless configuration does not tell

    @property
    def mechanism(self) -> Mechanism:
        return self.layout.mechanism

    @functools.cached_property
    def ages(self) -> dict[str, int]:
        """The ages of the slots that have seen a gradient. The low bits of a weight see none."""
        ages = ages_of(self.layout, self.state) if self.state else {}
        return {name: age for name, age in ages.items() if age > 0 and name != WEIGHT.name}

    @property
    def seen(self) -> dict[str, Format]:
        """The slots that have seen a gradient."""
        return {stored.slot.name: stored for stored in self.layout.formats if stored.slot.name in self.ages}

    @functools.cached_property
    def _held(self) -> Mapping[str, Any]:
        return self.place.held(self.state)

    def tiles(self) -> list[slice]:
        return row_tiles(self.param.shape, TILE_NUMEL)

    def value(self, stored: Format, rows: slice) -> Tensor:
        """Return fp32 rows of a slot."""
        return stored.decode(stored.held_in(self._held), rows)

    def means(self, rows: slice) -> dict[str, Tensor]:
        """Return fp32 rows of every slot that has seen a gradient, as weighted means."""
        masses = {name: self.mechanism.mass(name, age, self.hyper) for name, age in self.ages.items()}
        return {name: self.value(stored, rows) / masses[name] for name, stored in self.seen.items()}


@dataclass(frozen=True)
class Move:
    """A parameter that changes its block."""

    holding: Holding
    block: Block
    lr_scale: float | None  # so far

    @property
    def layout(self) -> Layout:
        """The new one."""
        return self.block.configuration.layout(self.holding.layout.shape, rows=self.holding.place.rows)

    @property
    def device(self) -> torch.device:
        """Where the new state will be."""
        return HOST if self.block.host else self.holding.param.device

    def replaced(self, *, inherit: bool = True) -> tuple[list[str], int]:
        """Return which tensors of the old state have no place in the new one, and the bytes that replace them."""
        old = self.holding
        inherited = [each for each in self.layout.formats if inherit or each.slot.of_weight]
        kept = [each for each in inherited if is_kept(old, self.layout.mechanism, each)]
        keys = {key for each in kept for _, key in each.keys}
        new = sum(buffer.nbytes for key, buffer in self.layout.buffers.items() if key not in keys)
        gone = [key for key in old.layout.buffers if key in old.state and key not in keys]
        return [key for key in gone if old.layout.buffers[key].name != "age"], new

    def allocate(self, *, inherit: bool = True) -> ParamState:
        """Return the tensors of the new state, for :meth:`fill`."""
        return allocated(self.holding, self.layout, self.device, inherit=inherit)

    def fill(self, state: ParamState, *, inherit: bool = True) -> None:
        """Convert the old state into tensors of :meth:`allocate`. Without ``inherit``, they stay zeros."""
        fill(self.holding, self.layout, state, inherit=inherit)

    def convert(self) -> ParamState:
        """Return the new state."""
        return convert(self.holding, self.layout, self.device)


def holding_of(member: Member, state: ParamState, has_stepped: bool = False) -> Holding:
    hyper = groups.hyper(member.group, f"the group of {member.name!r}")
    return Holding(member.place.local(member.param.detach()), member.layout, state, hyper, member.place, has_stepped)


def convert(old: Holding, layout: Layout, device: torch.device) -> ParamState:
    """Return the state of a parameter in another layout. Slots that both layouts have are inherited with their age.

    Nothing is written to the old state. Tensors that need not change are shared with it.

    Args:
        old: the parameter and its state.
        layout: the new layout.
        device: where the new state will be.
    """
    state = allocated(old, layout, device)
    fill(old, layout, state)
    return state


@torch.no_grad()
def allocated(old: Holding, layout: Layout, device: torch.device, *, inherit: bool = True) -> ParamState:
    """Return the tensors of a new layout: those of the old state that need not change, and zeros.

    Nearly all memory that a conversion needs is allocated in here, and no other rank is asked. So ranks can agree that
    there is enough before :func:`fill`, in which those that share a parameter communicate.
    """
    state: ParamState = {}
    for stored in layout.formats:
        if (inherit or stored.slot.of_weight) and is_kept(old, layout.mechanism, stored):
            state |= {key: old.state[key].to(device) for _, key in stored.keys} | new_age(stored)
        else:
            state |= new_slot(stored, device, old.place)
    return state


@torch.no_grad()
def fill(old: Holding, layout: Layout, state: ParamState, *, inherit: bool = True) -> None:
    """Convert an old state into tensors of :func:`allocated`."""
    if inherit and not old.state:
        _start_late(old, layout, state)
        return
    for stored in layout.formats:
        if stored.slot.of_weight:  # a part of the parameter, which stays
            _convert_low_bits(old, stored, state)
        elif inherit:
            _convert_slot(old, layout.mechanism, stored, state)


def _start_late(old: Holding, layout: Layout, state: ParamState) -> None:
    """Give the zeros of a parameter that has had no state so far ages as if training had gone on for a while."""
    rms = old.mechanism.typical_rms(Evidence({}, {}, 0.0), old.hyper) if old.has_stepped else None
    if rms is not None:
        for stored in layout.formats:
            set_age(state, stored.age_key, layout.mechanism.late_age(stored.slot.name, rms, old.hyper))


# ---- slots ----


def is_same_rule(old: Mechanism, new: Mechanism) -> bool:
    """Return whether two update rules differ in nothing but weight decay."""
    parts = ("direction", "finish", "length")
    return all(getattr(type(old), part) is getattr(type(new), part) for part in parts)


def _convert_slot(old: Holding, mechanism: Mechanism, stored: Format, state: ParamState) -> None:
    name = stored.slot.name
    source = next((each for each in old.layout.formats if each.slot.name == name), None)
    # a slot that was there is as old as it was, even if it has seen nothing yet: after a late start its age is 0
    age = old.ages.get(name, 0) if source else mechanism.inferred_age(name, old.ages, old.hyper)
    if age and not is_kept(old, mechanism, stored):
        _fill(stored, state, _values(old, mechanism, source, name, age), old.place)
    set_age(state, stored.age_key, age)


def _convert_low_bits(old: Holding, stored: Format, state: ParamState) -> None:
    """Convert the low bits of a weight.

    The parameter does not change: it is the rounded weight with any remainder. So the fp32 weight changes by less than
    2^-15 of itself where 16 bits become 8, and not at all where 8 become 16.
    """
    source = next((each for each in old.layout.formats if each.slot.of_weight), None)
    if source is None or not old.state:
        return
    if source.buffers and stored.buffers and type(source) is not type(stored):
        codes, target = (each[WEIGHT.name] for each in (old.place.held(old.state), old.place.held(state)))
        for rows in old.tiles():
            target[rows] = low_bits_as(target.dtype, codes[rows])
    set_age(state, stored.age_key, int(old.state[source.age_key]))


def is_kept(old: Holding, mechanism: Mechanism, stored: Format) -> bool:
    """Return whether a slot has the same format and numbers under the new rule, so that its tensors are taken over."""
    if stored.slot.of_weight:
        return bool(old.state) and type(stored) in map(type, old.layout.formats)
    age = old.ages.get(stored.slot.name, 0)
    return bool(age) and stored in old.layout.formats and _mass_ratio(old, mechanism, stored.slot.name, age) == 1.0


def _mass_ratio(old: Holding, mechanism: Mechanism, slot: str, age: int) -> float:
    return mechanism.mass(slot, age, old.hyper) / old.mechanism.mass(slot, age, old.hyper)


def _values(
    old: Holding, mechanism: Mechanism, source: Format | None, slot: str, age: int
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the values of a slot by tiles: inherited from ``source``, or inferred from the other slots."""
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
    nothing = torch.zeros(0, *stored.shape[1:], dtype=torch.float32, device=device)
    partial = stored.absorb(held, slice(0, 0), nothing, 0.0, 1.0, NEAREST, None)  # all there is in a shard without rows
    for rows, value in values:
        partial = stored.absorb(held, rows, value.to(device), 0.0, 1.0, NEAREST, partial)
    stored.finish(held, 0.0, 1.0, NEAREST, None if partial is None else place.sum(partial))


# ---- learning-rate multipliers ----


def lr_scales(moves: Sequence[Move]) -> dict[str, float | None]:
    """Return the learning-rate multiplier of every block: the plan's, or one that keeps the length of its updates."""
    blocks: dict[str, list[Move]] = {}
    for move in moves:
        blocks.setdefault(move.block.name, []).append(move)
    return {name: _lr_scale(block_moves) for name, block_moves in blocks.items()}


def _lr_scale(moves: Sequence[Move]) -> float | None:
    if moves[0].block.lr_scale is not None:
        return moves[0].block.lr_scale
    same_rule = all(is_same_rule(move.holding.mechanism, move.layout.mechanism) for move in moves)
    if all(move.lr_scale is None for move in moves) and (same_rule or not any(move.holding.ages for move in moves)):
        return None
    scales = [move.lr_scale or 1.0 for move in moves]
    mean_scale = scales[0] if len(set(scales)) == 1 else sum(scales) / len(scales)
    if same_rule:
        return mean_scale
    old_parts, new_parts = [], []
    for move, scale in zip(moves, scales):
        old = _typical_rms(move.holding, move.holding.mechanism)
        new = _typical_rms(move.holding, move.layout.mechanism)
        if old is not None and new is not None:
            numel = move.holding.place.numel(move.holding.param)
            old_parts.append((numel, scale * old))
            new_parts.append((numel, new))
    old_rms, new_rms = pooled_rms(old_parts), pooled_rms(new_parts)
    matched = old_rms / new_rms if new_rms > 0 else 0.0
    return matched if math.isfinite(matched) and matched > 0 else mean_scale


def _typical_rms(holding: Holding, mechanism: Mechanism) -> float | None:
    """Return the RMS of an update rule's next update in units of lr, estimated from the state of another rule."""
    tiles = [(rows, holding.param[rows]) for rows in holding.tiles()]
    param_rms = _over_all_rows(
        holding, [(part.numel(), part.float().square().mean().sqrt().item()) for _, part in tiles]
    )
    assert param_rms is not None
    squares = {name: _mean_square(holding, stored) for name, stored in holding.seen.items()}
    rms_of = functools.partial(mechanism.typical_rms, hyper=holding.hyper)
    lengths = [
        (part.numel(), rms_of(Evidence(holding.means(rows), holding.ages, param_rms, squares))) for rows, part in tiles
    ]
    return _over_all_rows(holding, lengths)


def _mean_square(holding: Holding, stored: Format) -> float:
    """Return the mean square of the gradients that a slot stands for, over the whole parameter."""
    parts = []
    for rows in holding.tiles():
        mean = holding.means(rows)[stored.slot.name]
        square = mean.square() if stored.slot.signed else mean
        parts.append((mean.numel(), math.sqrt(max(square.mean().item(), 0.0))))
    rms = _over_all_rows(holding, parts)
    assert rms is not None
    return rms**2


def _over_all_rows(holding: Holding, parts: Sequence[tuple[int, float | None]]) -> float | None:
    """Return the RMS over a whole parameter from (elements, RMS) of the parts here; ``None`` if one is unknown."""
    unknown = sum(rms is None for _, rms in parts)
    squares = sum(numel * (rms or 0.0) ** 2 for numel, rms in parts)
    sums = torch.tensor([squares, unknown], dtype=torch.float64, device=holding.param.device)
    squares, unknown = holding.place.sum(sums).tolist()
    return None if unknown else math.sqrt(squares / max(1, holding.place.numel(holding.param)))

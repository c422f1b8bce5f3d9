"""State moves between configurations, and learning rates are matched so that updates keep their length.

Update rules have in common the *mean* that a slot stands for: a slot divided by the mass of its recurrence. Means are
decoded, rescaled and encoded again, a tile at a time and one parameter at a time; where the rule stays, one slot at a
time. The old state does not change until the new one is complete. So both exist for a moment, side by side while they
fit into the memory of the larger plan and :data:`SIDE_BY_SIDE`; otherwise the old one is put aside first: state on an
accelerator into host memory, state in host memory into a temporary file.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from baoc.core.codecs import Format, SummedFormat
from baoc.core.codecs.weights import low_bits_as
from baoc.core.configuration import Layout
from baoc.core.mechanisms import Evidence, Mechanism, pooled_rms
from baoc.core.plan import Block, Plan
from baoc.core.rounding import NEAREST
from baoc.core.sharding import HOST, Place, local
from baoc.core.spec import WEIGHT, Hyper
from baoc.optim import groups
from baoc.optim.kernels.eager import TILE_NUMEL
from baoc.optim.kernels.update import row_tiles
from baoc.optim.members import Member
from baoc.optim.state import ParamState, ages_of, new_age, new_slot, put_aside, set_age

logger = logging.getLogger("baoc")
SIDE_BY_SIDE = 16 << 20
"""Bytes that a migration may hold beyond the larger of both plans, apart from a few fp32 tiles."""

Attempt = Callable[[Callable[[], Any]], Any]
"""Calls a function and returns its result. With several ranks it raises on all of them if one fails."""


def alone(function: Callable[[], Any]) -> Any:
    """Call a function on this rank, whatever happens on others."""
    return function()


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


class Change:
    """A change of plans, which can be interrupted at any line.

    The state of each parameter is replaced in one operation, or in one per slot if the update rule stays, and a
    parameter counts as moved exactly if its new state is installed. So :meth:`plan_so_far` is right at any time; some
    parameters may have some slots in the old format and some in the new one, and the old state of one may be aside
    until :meth:`put_back`.

    State that is not aside never exceeds :attr:`most_bytes`: what shrinks goes first, so before and after every
    conversion there is no more than in the larger plan, and during it :meth:`_make_room` sees to it.

    Args:
        members: all parameters.
        state: the state of the optimizer, which :meth:`run` changes.
        plan: the new plan.
        has_stepped: whether a step was made before.
        inherit: convert the old state. Otherwise the new state starts from zeros.
    """

    def __init__(
        self,
        members: Sequence[Member],
        state: dict[Tensor, ParamState],
        plan: Plan,
        *,
        has_stepped: bool,
        inherit: bool,
    ) -> None:
        moves = [
            Move(holding_of(each, state.get(each.param, {}), has_stepped), plan.block_of(each.name), each.lr_scale)
            for each in members
        ]
        scales = lr_scales(moves) if inherit else {block.name: block.lr_scale for block in plan.blocks}
        self._blocks = [replace(move.block, lr_scale=scales[move.block.name]) for move in moves]
        self._members, self._state, self._plan, self._inherit = members, state, plan, inherit
        self._left = {index: moves[index].holding for index in order(moves)}
        self._bytes = sum(move.holding.layout.nbytes for move in moves if move.holding.state)
        new = sum(move.layout.nbytes for move, each in zip(moves, members) if each.is_trained or move.holding.state)
        self.most_bytes = max(self._bytes, new) + SIDE_BY_SIDE
        """The most bytes of state that a run holds on this rank, apart from fp32 tiles of what it converts."""
        # of each parameter, the states that may be installed now, with their blocks; none before its first one is made
        self._reached: list[list[tuple[ParamState | None, Block]]] = [[] for _ in moves]
        self._aside: tuple[int, Block, list[str], ParamState] | None = None  # of which parameter and block, and where

    def run(self, attempt: Attempt = alone) -> None:
        """Convert the state of all parameters, one at a time.

        Args:
            attempt: calls what allocates memory and, for whole parameters, what converts: ranks that share one
                communicate meanwhile. Nothing is replaced before it has returned.
        """
        for index in list(self._left):
            member = self._members[index]
            holding, target = self._left.pop(index), self._blocks[index]  # so that old state is freed when replaced
            if not member.is_trained and member.param not in self._state:
                self._reached[index].append((None, target))
                continue
            now = member.block
            for block in (*(self._on_the_way(member, holding, target) if self._inherit else ()), target):
                holding = attempt(functools.partial(self._make_room, index, holding, now, block))
                move = Move(holding, block, member.lr_scale)
                state = attempt(functools.partial(move.allocate, inherit=self._inherit))
                fill = functools.partial(move.fill, state, inherit=self._inherit)
                fill() if member.place.ranks else attempt(fill)
                self._install(index, state, block)
                self._aside = None
                self._bytes += move.layout.nbytes - (holding.layout.nbytes if holding.state else 0)
                holding, now = replace(holding, layout=move.layout, state=state), block
                del move, fill, state  # which hold tensors that may have to go in the next turn

    def _on_the_way(self, member: Member, holding: Holding, target: Block) -> Iterator[Block]:
        """Yield blocks with one more slot in its new format each, so that slots can be converted one by one."""
        old, new = member.block.configuration, target.configuration
        is_plain = holding.layout.configuration == old and new.layout(holding.layout.shape).configuration == new
        if not holding.ages or not is_plain or old.slots != new.slots or old.mechanism_name != new.mechanism_name:
            return
        before, after = ({f.slot.name: f for f in c.layout(holding.layout.shape).formats} for c in (old, new))
        changed = [name for name in before if before[name] != after[name]]
        changed.sort(key=lambda name: after[name].nbytes - before[name].nbytes)  # what shrinks makes room
        codecs = dict(old.codec_names)
        for name in changed[:-1]:
            codecs[name] = dict(new.codec_names)[name]
            yield replace(member.block, configuration=replace(old, codec_names=tuple(codecs.items())))

    def _make_room(self, index: int, holding: Holding, now: Block, block: Block) -> Holding:
        """Put old tensors aside if the new ones do not fit beside them. Return where the old state is then."""
        member = self._members[index]
        keys, new = Move(holding, block, member.lr_scale).replaced(inherit=self._inherit)
        if self._bytes + new <= self.most_bytes:
            return holding
        held, aside = holding.place.held(holding.state), dict(holding.state)
        try:
            aside |= {key: put_aside(held[key]) for key in keys if held[key].numel() and held[key].is_contiguous()}
        except OSError as error:
            logger.warning(
                "Migrating %r needs %.1f MiB more than the larger plan, because no temporary file can be written: %s. "
                "Set TMPDIR to a folder with free space.",
                *(member.name, (self._bytes + new - self.most_bytes + SIDE_BY_SIDE) / 2**20, error),
            )
            return holding
        self._aside = (index, now, keys, aside)
        self._install(index, aside, now)
        return replace(holding, state=aside)

    def _install(self, index: int, state: ParamState, block: Block) -> None:
        reached = self._reached[index]
        reached.append((state, block))
        self._state[self._members[index].param] = state
        del reached[:-1]

    def put_back(self) -> None:
        """Make state that is still aside after an interrupt usable: on its device, and distributed as before."""
        if self._aside is None:
            return
        index, block, keys, aside = self._aside
        member = self._members[index]
        if self._state.get(member.param) is aside:
            buffers = block.configuration.layout(member.shape, rows=member.place.rows).buffers
            device = HOST if block.host else member.param.device
            back = {key: member.place.wrap(local(aside[key]).to(device), buffers[key]) for key in keys}
            self._install(index, {**aside, **back}, block)
        self._aside = None

    def plan_so_far(self, old: Plan) -> Plan:
        """Return the plan in which every parameter is in the block that its state is for."""
        blocks = [
            next((block for state, block in reached if state is self._state.get(member.param)), member.block)
            for member, reached in zip(self._members, self._reached)
        ]
        assigned = [(member.name, member.shape, block) for member, block in zip(self._members, blocks)]
        is_done = all(block is target for block, target in zip(blocks, self._blocks))
        return groups.plan_of(assigned, (self._plan if is_done else old).settings)


def order(moves: Sequence[Move]) -> list[int]:
    """Return the order in which to convert, so that old and new state together need as little memory as possible.

    The old and new state of a parameter exist side by side for a moment. Parameters whose state shrinks go first, small
    ones before large ones, to make room. Of those whose state grows the largest go first, while there is room. Global
    shapes decide: ranks with different shards must use the same order.
    """

    def rank(index: int) -> tuple[bool, int]:
        old, new = _whole_bytes(moves[index].holding.layout), _whole_bytes(moves[index].layout)
        return new > old, -old if new > old else new

    return sorted(range(len(moves)), key=rank)


def _whole_bytes(layout: Layout) -> int:
    return layout.configuration.state_bytes(layout.shape)


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

"""Changes of plans in the middle of training: state moves between configurations, one parameter at a time.

Where the update rule stays, it is one slot at a time. The old state does not change until the new one is complete. So
both exist for a moment, side by side while they fit into the memory of the larger plan and :data:`SIDE_BY_SIDE`;
otherwise the old one is put aside first: state on an accelerator into host memory, state in host memory into a
temporary file.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from baoc.core.configuration import Layout
from baoc.core.plan import Block, Plan
from baoc.core.sharding import HOST, local
from baoc.optim import groups
from baoc.optim.conversion import Holding, Move, holding_of, lr_scales
from baoc.optim.members import Member
from baoc.optim.state import ParamState, put_aside

logger = logging.getLogger("baoc")
SIDE_BY_SIDE = 16 << 20
"""Bytes that a migration may hold beyond the larger of both plans, apart from a few fp32 tiles."""

Attempt = Callable[[Callable[[], Any]], Any]
"""Calls a function and returns its result. With several ranks it raises on all of them if one fails."""


def alone(function: Callable[[], Any]) -> Any:
    """Call a function on this rank, whatever happens on others."""
    return function()


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

"""Numbers of a run that a logger may want: how far blocks move, and whether their codes suffice.

All of it is read off small samples, when it is asked for: a step that nobody watches pays nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from baoc.core.mechanisms import pooled_rms
from baoc.optim.groups import Member

_TENSORS = 8  # of each block
_ELEMENTS = 512  # of each tensor
_CODES = 1 << 16  # of each tensor


class Watch:
    """How far a sample of every block's elements moved in the last step, decay and rounding included.

    It begins when it is first asked. Nothing is held between steps but one number for each tensor of the sample.
    """

    def __init__(self) -> None:
        self._is_asked = False
        self._before: dict[str, list[tuple[Tensor, Tensor]]] = {}  # by block: (elements, what they were)
        self._rms: dict[str, list[tuple[int, Tensor]]] = {}  # by block: (elements, RMS of their move)

    def begin(self, stepping: Sequence[Member]) -> None:
        if not self._is_asked:
            return
        self._before = {}
        for block, members in _sampled(stepping).items():
            seen = [_thinned(member.place.local(member.param.detach())) for member in members]
            self._before[block] = [(elements, elements.clone()) for elements in seen if elements.numel()]

    def end(self) -> None:
        if not self._before:
            return
        before, self._before = self._before, {}
        self._rms = {
            block: [(now.numel(), (now.float() - then.float()).square().mean().sqrt()) for now, then in pairs]
            for block, pairs in before.items()
        }

    def rms(self) -> dict[str, float]:
        """By block, of the last step; empty when it is asked for the first time."""
        self._is_asked = True
        return {block: pooled_rms((numel, float(rms)) for numel, rms in parts) for block, parts in self._rms.items()}


@torch.no_grad()
def strained_shares(members: Iterable[Member], state: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, float]:
    """By block with grouped codes: which share of a sample of groups is strained.

    See :meth:`~baoc.core.codecs.base.Format.strained`.
    """
    shares: dict[str, float] = {}
    grouped = [member for member in members if any(each.groups for each in member.layout.formats)]
    for block, sample in _sampled(grouped).items():
        found: list[Tensor] = []
        for member in sample:
            held = member.place.held(state.get(member.param) or {})
            for stored in member.layout.formats:
                if stored.groups and held:
                    found.append(stored.strained(stored.held_in(held), _middle(stored.held_shape)).flatten().cpu())
        if found:
            shares[block] = float(torch.cat(found).float().mean().nan_to_num(0.0))
    return shares


def _sampled(members: Sequence[Member]) -> dict[str, list[Member]]:
    """A few members of every block, spread over it."""
    by_block: dict[str, list[Member]] = {}
    for member in members:
        by_block.setdefault(member.block.name, []).append(member)
    return {block: found[:: -(-len(found) // _TENSORS)] for block, found in by_block.items()}


def _thinned(tensor: Tensor) -> Tensor:
    """A view of at most so many elements, spread over all dims.

    >>> _thinned(torch.zeros(1000, 1000)).shape
    torch.Size([22, 22])
    """
    most = max(1, int(_ELEMENTS ** (1 / max(1, tensor.dim()))))
    return tensor[tuple(slice(None, None, max(1, -(-size // most))) for size in tensor.shape)]


def _middle(shape: Sequence[int]) -> slice:
    """Some rows from the middle."""
    rows = shape[0]
    height = min(rows, max(1, _CODES // max(1, math.prod(shape[1:]))))
    first = (rows - height) // 2
    return slice(first, first + height)

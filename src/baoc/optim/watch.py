"""Metrics of a run: how far blocks move, and how many of their quantization groups underflow.

Both are estimated from small samples when they are asked for: a step that nobody watches costs nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from baoc.core.mechanisms import pooled_rms
from baoc.optim.groups import Member

logger = logging.getLogger("baoc")

MANY = 0.5
"""The underflow fraction from which on a block is warned about."""
_TENSORS = 8  # of each block
_ELEMENTS = 512  # of each tensor
_CODES = 1 << 16  # of each tensor


class Watch:
    """Measures how far a sample of every block's elements moved in the last step, decay and rounding included.

    It starts when :meth:`rms` is first called. Between steps it holds one number for each tensor of the sample.
    """

    def __init__(self) -> None:
        self._is_asked = False
        self._before: dict[str, list[tuple[Tensor, Tensor]]] = {}  # by block: (elements, what they were)
        self._rms: dict[str, list[tuple[int, Tensor]]] = {}  # by block: (elements, RMS of their move)
        self._warned: set[str] = set()

    def begin(self, members: Iterable[Member]) -> None:
        """Note where a sample of the parameters with gradients is, before a step."""
        if not self._is_asked:
            return
        self._before = {}
        for block, sample in _sampled([member for member in members if member.param.grad is not None]).items():
            seen = [_thinned(member.place.local(member.param.detach())) for member in sample]
            self._before[block] = [(elements, elements.clone()) for elements in seen if elements.numel()]

    def end(self) -> None:
        """Measure how far the sample moved, after a step."""
        if not self._before:
            return
        before, self._before = self._before, {}
        self._rms = {
            block: [(now.numel(), (now.float() - then.float()).square().mean().sqrt()) for now, then in pairs]
            for block, pairs in before.items()
        }

    def rms(self) -> dict[str, float]:
        """Return the RMS of the last update by block; empty on the first call."""
        self._is_asked = True
        return {block: pooled_rms((numel, float(rms)) for numel, rms in parts) for block, parts in self._rms.items()}

    def numbers(self, members: Iterable[Member], state: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, float]:
        """Return the metrics of all blocks, and warn about those that underflow."""
        fractions = underflow_fractions(members, state)
        self._warn(fractions)
        return {
            **{f"update_rms/{block}": rms for block, rms in self.rms().items()},
            **{f"underflow/{block}": fraction for block, fraction in fractions.items()},
        }

    def _warn(self, fractions: Mapping[str, float]) -> None:
        """Warn once about every block of which at least :data:`MANY` groups underflow."""
        for block, fraction in fractions.items():
            if fraction >= MANY and block not in self._warned:
                self._warned.add(block)
                logger.warning(
                    "%.0f%% of the quantization groups of block %r underflow: a few large elements leave no codes to "
                    "the others. Give the block a wider format with set_plan if its loss suffers.",
                    100 * fraction,
                    block,
                )


@torch.no_grad()
def underflow_fractions(members: Iterable[Member], state: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, float]:
    """Return the fraction of a sample of quantization groups that underflow, for every block that has such groups."""
    fractions: dict[str, float] = {}
    grouped = [member for member in members if any(each.groups for each in member.layout.formats)]
    for block, sample in _sampled(grouped).items():
        found: list[Tensor] = []
        for member in sample:
            held = member.place.held(state.get(member.param) or {})
            for stored in member.layout.formats:
                if stored.groups and held:
                    found.append(stored.underflowed(stored.held_in(held), _middle(stored.held_shape)).flatten().cpu())
        if found:
            fractions[block] = float(torch.cat(found).float().mean().nan_to_num(0.0))
    return fractions


def _sampled(members: Sequence[Member]) -> dict[str, list[Member]]:
    """Return a few members of every block, spread over it."""
    by_block: dict[str, list[Member]] = {}
    for member in members:
        by_block.setdefault(member.block.name, []).append(member)
    return {block: found[:: -(-len(found) // _TENSORS)] for block, found in by_block.items()}


def _thinned(tensor: Tensor) -> Tensor:
    """Return a view of at most ``_ELEMENTS`` elements, spread over all dims.

    >>> _thinned(torch.zeros(1000, 1000)).shape
    torch.Size([22, 22])
    """
    most = max(1, int(_ELEMENTS ** (1 / max(1, tensor.dim()))))
    return tensor[tuple(slice(None, None, max(1, -(-size // most))) for size in tensor.shape)]


def _middle(shape: Sequence[int]) -> slice:
    """Return some rows from the middle."""
    rows = shape[0]
    height = min(rows, max(1, _CODES // max(1, math.prod(shape[1:]))))
    first = (rows - height) // 2
    return slice(first, first + height)

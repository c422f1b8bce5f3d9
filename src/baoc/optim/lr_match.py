"""How a block's learning rate changes with its mechanism: its next update stays as long as its last."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from baoc.core.mechanisms import Evidence, Mechanism, pooled_rms
from baoc.optim.migrate import Holding, Move, is_same_rule


def lr_scales(moves: Sequence[Move]) -> dict[str, float | None]:
    """The lr scale of every block after a move: the plan's own, or one that keeps the length of the block's updates."""
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
    """RMS of a mechanism's next update in units of lr, given what another one's state tells about the gradients."""
    tiles = [(rows, holding.param[rows]) for rows in holding.tiles()]
    param_rms = _over_all_rows(
        holding, [(part.numel(), part.float().square().mean().sqrt().item()) for _, part in tiles]
    )
    assert param_rms is not None
    rms_of = functools.partial(mechanism.typical_rms, hyper=holding.hyper)
    lengths = [(part.numel(), rms_of(Evidence(holding.means(rows), holding.ages, param_rms))) for rows, part in tiles]
    return _over_all_rows(holding, lengths)


def _over_all_rows(holding: Holding, parts: Sequence[tuple[int, float | None]]) -> float | None:
    """The RMS of all of a parameter, from (elements, RMS) of the parts that are here; ``None`` if one has none."""
    unknown = sum(rms is None for _, rms in parts)
    squares = sum(numel * (rms or 0.0) ** 2 for numel, rms in parts)
    sums = torch.tensor([squares, unknown], dtype=torch.float64, device=holding.param.device)
    squares, unknown = holding.place.sum(sums).tolist()
    return None if unknown else math.sqrt(squares / max(1, holding.place.numel(holding.param)))

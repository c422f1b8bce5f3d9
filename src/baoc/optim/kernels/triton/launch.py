"""The launches of a family, from tables that are on the device. Nothing here waits, copies or looks at numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baoc.optim.kernels.triton.device.sums import add_up, measure
from baoc.optim.kernels.triton.device.update import update
from baoc.optim.kernels.triton.families import Family
from baoc.optim.kernels.triton.tables import WARPS, Tables, Tiles

REGISTERS = 128  # at the most for a thread; without a word about it, ptxas saves a few more and spills some


def options(backend: str) -> dict[str, Any]:
    """How kernels are compiled for "cuda" or "hip".

    Products and sums are rounded one by one, as torch's are: results are the same on every device.
    """
    common = {"num_warps": WARPS, "enable_fp_fusion": False}
    return common | {"maxnreg": REGISTERS} if backend == "cuda" else common


_OPTIONS = options("hip" if torch.version.hip else "cuda")


def launch(family: Family, tables: Tables, numbers: Tensor, skip: Tensor, tiles: Tiles) -> None:
    """Update all tensors of a family, unless the number in ``skip`` is not zero."""
    words, owners, blocks = tables.words.tensor, tables.updates.tensor, tables.blocks.tensor
    for index in range(len(family.turns)):
        add_up[(len(blocks),)](words, blocks, numbers, skip, **sums_constants(family, index, tiles), **_OPTIONS)
    if family.relative:
        measure[(len(owners),)](words, owners, numbers, skip, **measure_constants(family, tiles), **_OPTIONS)
    update[(len(owners),)](words, owners, numbers, skip, **update_constants(family, tiles), **_OPTIONS)


def update_constants(family: Family, tiles: Tiles) -> dict[str, Any]:
    """What the update is compiled for."""
    return {
        "MECHANISM": family.mechanism,
        "PARAM": family.param,
        "GRAD": family.grad,
        "M": family.m,
        "V": family.v,
        "NORMS": family.norms,
        "COUPLED": family.coupled,
        "SHARES": family.shares,
        "MOVES": family.moves,
        "ALIGNED": family.aligned,
        "SEGMENTS": tiles.segments,
        "TILES": tiles.tiles,
    }


def sums_constants(family: Family, index: int, tiles: Tiles) -> dict[str, Any]:
    """What the sums of one turn are compiled for."""
    turn, is_balanced = family.turns[index], family.norms != "none"
    other = {"row": "col", "col": "row"}.get(turn, "none")
    return {
        "OF": family.mechanism if is_balanced else "grad",
        "PARAM": family.param if family.coupled else "none",
        "GRAD": family.grad,
        "M": family.m if is_balanced else "none",
        "COUPLED": family.coupled,
        "FACTOR": other if is_balanced and index else "none",
        "BY_ROW": turn != "col",
        "BY_COL": turn != "row",
        "OUT": _means_format(family),
        "ALIGNED": family.aligned,
        "SEGMENTS": tiles.segments,
        "TILES": tiles.blocks,
    }


def measure_constants(family: Family, tiles: Tiles) -> dict[str, Any]:
    """What the lengths of directions and parameters are compiled for."""
    return {
        "MECHANISM": family.mechanism,
        "PARAM": family.param,
        "GRAD": family.grad,
        "V": family.v,
        "SHARES": family.shares,
        "ALIGNED": family.aligned,
        "SEGMENTS": tiles.segments,
        "TILES": tiles.tiles,
    }


def _means_format(family: Family) -> str:
    """What becomes of means: "fp32" or "bf16" factors of v, or what brings lines to one size."""
    if family.norms != "none":
        return "inverse root"
    return "bf16" if family.v == "factored-bf16" else "fp32"

"""The launches of a family, from tables that are on the device. Nothing here waits, copies or looks at numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baoc.optim.kernels.triton.device.sums import add_up, make_means
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


def launch(family: Family, tables: Tables, numbers: Tensor, tiles: Tiles) -> None:
    """Update all tensors of a family."""
    words = tables.words.tensor
    for index, turn in enumerate(family.turns):
        blocks, sums = tables.blocks.tensor, tables.sums[turn]
        add_up[(len(blocks),)](words, blocks, numbers, **sums_constants(family, index, tiles), **_OPTIONS)
        out_format = means_format(family)
        owners = sums.owners.tensor
        make_means[(len(owners),)](sums.words.tensor, owners, numbers, OUT_FORMAT=out_format, **_OPTIONS)
    owners = tables.updates.tensor
    update[(len(owners),)](words, owners, numbers, **update_constants(family, tiles), **_OPTIONS)


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
        "ALIGNED": family.aligned,
        "SEGMENTS": tiles.segments,
        "TILES": tiles.blocks,
    }


def means_format(family: Family) -> str:
    """What becomes of means: "fp32" or "bf16" factors of v, or what brings lines to one size."""
    if family.norms != "none":
        return "inverse root"
    return "bf16" if family.v == "factored-bf16" else "fp32"

"""The launches of a family. They read tables on the device; nothing here waits, copies or reads values back.

This module imports Triton, so it is imported when the first kernel is made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baoc.optim.kernels.triton.device.sums import add_up, measure
from baoc.optim.kernels.triton.device.update import update
from baoc.optim.kernels.triton.families import Family
from baoc.optim.kernels.triton.tables import WARPS, Tables, Tiles

REGISTERS = 128
"""The limit per thread. Without one, ptxas aims for fewer registers and spills."""


def options(backend: str) -> dict[str, Any]:
    """Return the compile options for the backend "cuda" or "hip".

    Products are not fused into sums, so each operation rounds as torch's do, on every device.
    """
    common = {"num_warps": WARPS, "enable_fp_fusion": False}
    return common | {"maxnreg": REGISTERS} if backend == "cuda" else common


_OPTIONS = options("hip" if torch.version.hip else "cuda")


def launch(family: Family, tables: Tables, numbers: Tensor, skip: Tensor, tiles: Tiles) -> None:
    """Update all tensors of a family.

    Args:
        family: The constants that the kernels are compiled for.
        tables: The tensors of the family.
        numbers: The scalars of the step, shape (rows * numbers,).
        skip: Nothing is changed if its first element is not zero.
        tiles: How much of a tensor one program updates.
    """
    words, owners, blocks = tables.words.tensor, tables.updates.tensor, tables.blocks.tensor
    for index in range(len(family.reductions)):
        add_up[(len(blocks),)](words, blocks, numbers, skip, **sums_constants(family, index, tiles), **_OPTIONS)
    if family.uses_rms:
        measure[(len(owners),)](words, owners, numbers, skip, **measure_constants(family, tiles), **_OPTIONS)
    update[(len(owners),)](words, owners, numbers, skip, **update_constants(family, tiles), **_OPTIONS)


def update_constants(family: Family, tiles: Tiles) -> dict[str, Any]:
    """Return the constants of :func:`~baoc.optim.kernels.triton.device.update.update`."""
    return {
        "MECHANISM": family.mechanism,
        "PARAM": family.param,
        "GRAD": family.grad,
        "M": family.m,
        "V": family.v,
        "W": family.w,
        "NORMS": family.norms,
        "COUPLED": family.coupled,
        "SHARES": family.shares,
        "MOVES": family.moves,
        "ALIGNED": family.aligned,
        "SEGMENTS": tiles.segments,
        "TILES": tiles.tiles,
    }


def sums_constants(family: Family, index: int, tiles: Tiles) -> dict[str, Any]:
    """Return the constants of :func:`~baoc.optim.kernels.triton.device.sums.add_up` for one of the reductions."""
    axis, is_balanced = family.reductions[index], family.norms != "none"
    other = {"row": "col", "col": "row"}.get(axis, "none")
    return {
        "OF": family.mechanism if is_balanced else "grad",
        "PARAM": family.param if family.coupled else "none",
        "W": family.w if family.coupled else "none",
        "GRAD": family.grad,
        "M": family.m if is_balanced else "none",
        "COUPLED": family.coupled,
        "FACTOR": other if is_balanced and index else "none",
        "BY_ROW": axis != "col",
        "BY_COL": axis != "row",
        "OUT": _means_format(family),
        "ALIGNED": family.aligned,
        "SEGMENTS": tiles.segments,
        "TILES": tiles.blocks,
    }


def measure_constants(family: Family, tiles: Tiles) -> dict[str, Any]:
    """Return the constants of :func:`~baoc.optim.kernels.triton.device.sums.measure`."""
    return {
        "MECHANISM": family.mechanism,
        "PARAM": family.param,
        "GRAD": family.grad,
        "V": family.v,
        "W": family.w,
        "SHARES": family.shares,
        "ALIGNED": family.aligned,
        "SEGMENTS": tiles.segments,
        "TILES": tiles.tiles,
    }


def _means_format(family: Family) -> str:
    """Return what the means become: "fp32" or "bf16" factors of v, or the factors that normalize rows or columns."""
    if family.norms != "none":
        return "inverse root"
    return "bf16" if family.v == "factored-bf16" else "fp32"

"""Sums over the rows and columns of many matrices, in an order that is always the same.

Two launches: every program adds up one block of a matrix and writes what it has; then each mean is made of those parts,
one after the other. There are no atomic additions, whose order changes from run to run.
"""

import triton
import triton.language as tl

from baoc.core import spec
from baoc.optim.kernels.triton.device.numbers import load_dense, noise_at, quotient, root, store_dense
from baoc.optim.kernels.triton.device.table import (
    COL_PARTS_AT,
    COUPLED_DECAY,
    FIRST_BLOCK_AT,
    NUMBERS,
    PARAM_AT,
    ROW_PARTS_AT,
    ROWS_AT,
    SEGMENT,
    V_ADD,
    V_KEEP,
    V_PHASE,
    elements,
    own_index,
    own_numbers,
    own_tensor,
    row_length,
    segments_in,
)
from baoc.optim.kernels.triton.device.tile import advanced_m, clean, col_number, direction_of, load_grad, row_number
from baoc.optim.kernels.triton.words import Sum

FP32_TINY = tl.constexpr(spec.FP32_TINY)

SUM_WORDS = tl.constexpr(len(Sum))
PARTS_AT = tl.constexpr(int(Sum.PARTS_AT))
PARTS = tl.constexpr(int(Sum.PARTS))
LENGTH = tl.constexpr(int(Sum.LENGTH))
COUNT = tl.constexpr(int(Sum.COUNT))
OUT = tl.constexpr(int(Sum.OUT))
BLOCK_SUMS = tl.constexpr(int(Sum.BLOCKS))
SUM_FIRST_PROGRAM = tl.constexpr(int(Sum.FIRST_PROGRAM))
SUM_NUMBERS = tl.constexpr(int(Sum.NUMBERS))


@triton.jit
def add_up(
    table, owners, numbers,
    OF: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, M: tl.constexpr, COUPLED: tl.constexpr,
    FACTOR: tl.constexpr, BY_ROW: tl.constexpr, BY_COL: tl.constexpr, ALIGNED: tl.constexpr,
    SEGMENTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Squares of the gradient ("grad") or of a balanced direction ("sgd", "ahead"), over parts of rows and of columns.

    A program takes one segment's columns of ``SEGMENTS * TILES`` rows. ``FACTOR`` says which factor a direction has
    already: "none", "row" or "col".
    """
    tensor = own_tensor(table, owners)
    own = own_numbers(tensor, numbers)
    row_len, rows = row_length(tensor, ALIGNED), tl.load(tensor + ROWS_AT)
    parts = segments_in(row_len)
    index = own_index(tensor, FIRST_BLOCK_AT)
    block, part = index // parts, (index % parts) + tl.zeros((SEGMENTS, 1), tl.int32)
    of_cols = tl.zeros((SEGMENT,), tl.float32)
    for turn in range(TILES):
        row = (block * TILES + turn) * SEGMENTS + tl.arange(0, SEGMENTS)[:, None]
        inside = row < rows
        offset, mask = elements(row, part, row_len, inside)
        grad = load_grad(tensor, own, offset, mask, GRAD, ALIGNED)
        if COUPLED:
            param = load_dense(tl.load(tensor + PARAM_AT), offset, mask, PARAM, ALIGNED)
            grad = grad + param * tl.load(own + COUPLED_DECAY)
        x = clean(grad, True)
        if OF != "grad":
            m = x
            if M != "none":
                m = advanced_m(tensor, own, x, row, part, parts, row_len, offset, inside, mask, M, ALIGNED)
            x = direction_of(own, x, m, x, OF)
        if FACTOR == "row":
            x = x * row_number(tensor, row, inside, "fp32")
        elif FACTOR == "col":
            x = x * col_number(tensor, part, mask, "fp32", ALIGNED)
        square = tl.where(mask, x * x, 0.0)
        if BY_ROW:
            to = tl.load(tensor + ROW_PARTS_AT).to(tl.pointer_type(tl.float32)) + part.to(tl.int64) * rows + row
            tl.store(to, tl.sum(square, axis=1, keep_dims=True), mask=inside)
        if BY_COL:
            of_cols += tl.sum(square, axis=0)
    if BY_COL:
        col = (index % parts).to(tl.int64) * SEGMENT + tl.arange(0, SEGMENT)
        to = tl.load(tensor + COL_PARTS_AT).to(tl.pointer_type(tl.float32)) + block.to(tl.int64) * row_len + col
        tl.store(to, of_cols, mask=col < row_len)


@triton.jit
def make_means(sums, owners, numbers, OUT_FORMAT: tl.constexpr):
    """Means of partial sums; every program makes ``SEGMENT`` of them.

    ``OUT_FORMAT`` "fp32" or "bf16": they are taken into a factor of v. "inverse root": what brings lines to one size.
    """
    own = sums + tl.load(owners + tl.program_id(0)).to(tl.int64) * SUM_WORDS
    index = (tl.program_id(0) - tl.load(own + SUM_FIRST_PROGRAM)).to(tl.int32)
    length = tl.load(own + LENGTH)
    at = index.to(tl.int64) * SEGMENT + tl.arange(0, SEGMENT)
    mask = at < length
    parts = tl.load(own + PARTS_AT).to(tl.pointer_type(tl.float32))
    total = tl.zeros((SEGMENT,), tl.float32)
    for part in range(tl.load(own + PARTS).to(tl.int32)):
        total += tl.load(parts + part * length + at, mask=mask, other=0.0)
    mean = quotient(total, tl.load(own + COUNT).to(tl.float32))
    out = tl.load(own + OUT)
    if OUT_FORMAT == "inverse root":
        store_dense(out, at, mask, quotient(1.0, root(tl.maximum(mean, FP32_TINY))), 0, "fp32", False)
    else:
        row = numbers + tl.load(own + SUM_NUMBERS) * NUMBERS
        held = load_dense(out, at, mask, OUT_FORMAT, False)
        value = held * tl.load(row + V_KEEP) + mean * tl.load(row + V_ADD)
        noise = noise_at(at, tl.load(row + V_PHASE).to(tl.int32))
        stored = store_dense(out, at, mask, value, noise, OUT_FORMAT, False)
        blocks = tl.load(own + BLOCK_SUMS)
        if blocks != 0:
            to = blocks.to(tl.pointer_type(tl.float32)) + index
            tl.store(to, tl.sum(tl.where(mask, stored, 0.0), axis=0))

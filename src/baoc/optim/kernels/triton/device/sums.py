"""Sums over rows, columns and whole tensors, each in one launch, always in the same order.

Every program sums its part of a tensor and stores a partial sum. The last program of a sum adds the partial sums in
order. Atomic operations only find out which program is last; atomic additions would change the order from run to run.
"""

import triton
import triton.language as tl

from baoc.core import spec
from baoc.optim.kernels.triton.device.formats import SEGMENT, load_dense, noise_at, quotient, root, store_dense
from baoc.optim.kernels.triton.device.tile import (
    CLIP,
    COL_AT,
    COL_BLOCKS_AT,
    COL_PARTS_AT,
    COL_TICKETS_AT,
    COUPLED_DECAY,
    FIRST_BLOCK_AT,
    FIRST_PROGRAM_AT,
    LENGTH_PARTS_AT,
    LENGTH_TICKET_AT,
    MIN_PARAM_RMS,
    ROW_AT,
    ROW_PARTS_AT,
    ROW_TICKETS_AT,
    ROWS_AT,
    STEP_FACTOR_AT,
    V_ADD,
    V_KEEP,
    V_PHASE,
    advanced_m,
    advanced_v,
    clean,
    col_number,
    direction_of,
    elements,
    fp32_at,
    load_grad,
    load_param,
    mean_of_cols,
    own_index,
    own_numbers,
    own_tensor,
    row_length,
    row_number,
    segments_in,
)

FP32_TINY = tl.constexpr(spec.FP32_TINY)
INFINITE = tl.constexpr(float("inf"))
LANES = tl.constexpr(128)  # partial sums that are added at once


@triton.jit
def add_up(
    table, owners, numbers, skip,
    OF: tl.constexpr, PARAM: tl.constexpr, W: tl.constexpr, GRAD: tl.constexpr, M: tl.constexpr, COUPLED: tl.constexpr,
    FACTOR: tl.constexpr, BY_ROW: tl.constexpr, BY_COL: tl.constexpr, OUT: tl.constexpr, ALIGNED: tl.constexpr,
    SEGMENTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Compute mean squares of the gradient ("grad") or of a balanced direction ("sgd", "ahead") by row or column.

    A program sums the columns of one segment over ``SEGMENTS * TILES`` rows. ``FACTOR`` names the factor that the
    direction already has: "none", "row" or "col". ``OUT`` says what the means become: see :func:`_finish`. For the
    arguments see :func:`~baoc.optim.kernels.triton.device.update.update`.
    """
    if tl.load(skip) != 0.0:
        return
    tensor = own_tensor(table, owners)
    own = own_numbers(tensor, numbers)
    row_len, rows = row_length(tensor, ALIGNED), tl.load(tensor + ROWS_AT)
    parts = segments_in(row_len)
    index = own_index(tensor, FIRST_BLOCK_AT)
    block, own_part = index // parts, index % parts
    part = own_part + tl.zeros((SEGMENTS, 1), tl.int32)
    of_cols = tl.zeros((SEGMENT,), tl.float32)
    for tile in range(TILES):
        row = (block * TILES + tile) * SEGMENTS + tl.arange(0, SEGMENTS)[:, None]
        inside = row < rows
        offset, mask = elements(row, part, row_len, inside)
        grad = load_grad(tensor, own, offset, mask, GRAD, ALIGNED)
        if COUPLED:
            param = load_param(tensor, offset, mask, PARAM, W, ALIGNED)
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
            to = fp32_at(tensor, ROW_PARTS_AT) + part.to(tl.int64) * rows + row
            tl.store(to, tl.sum(square, axis=1, keep_dims=True), mask=inside)
        if BY_COL:
            of_cols += tl.sum(square, axis=0)
    col = own_part.to(tl.int64) * SEGMENT + tl.arange(0, SEGMENT)
    if BY_COL:
        to = fp32_at(tensor, COL_PARTS_AT) + block.to(tl.int64) * row_len + col
        tl.store(to, of_cols, mask=col < row_len)

    tl.debug_barrier()  # all threads of this program have stored their partial sums
    if BY_ROW:
        first = block.to(tl.int64) * (SEGMENTS * TILES)
        _finish_rows(tensor, own, block, first + tl.arange(0, SEGMENTS * TILES), rows, row_len, parts, OUT)
    if BY_COL:
        blocks = ((rows + SEGMENTS * TILES - 1) // (SEGMENTS * TILES)).to(tl.int32)
        _finish_cols(tensor, own, own_part, col, rows, row_len, blocks, OUT)


@triton.jit
def _finish_rows(tensor, own, block, row, rows, row_len, parts, OUT: tl.constexpr):
    if _is_last(tensor, ROW_TICKETS_AT, block, parts):
        total = _total(fp32_at(tensor, ROW_PARTS_AT), parts, rows, row, row < rows)
        _finish(tl.load(tensor + ROW_AT), own, total, row_len, row, row < rows, OUT)


@triton.jit
def _finish_cols(tensor, own, part, col, rows, row_len, blocks, OUT: tl.constexpr):
    if _is_last(tensor, COL_TICKETS_AT, part, blocks):
        total = _total(fp32_at(tensor, COL_PARTS_AT), blocks, row_len, col, col < row_len)
        stored = _finish(tl.load(tensor + COL_AT), own, total, rows, col, col < row_len, OUT)
        if OUT != "inverse root":
            tl.store(fp32_at(tensor, COL_BLOCKS_AT) + part, tl.sum(stored, axis=0))


@triton.jit
def measure(
    table, owners, numbers, skip,
    MECHANISM: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    SHARES: tl.constexpr,     ALIGNED: tl.constexpr, SEGMENTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Compute Adafactor's factor of the step from the RMS of the direction and of the parameter, before either changes.

    Programs cover the same tiles as those of the update, and take the same arguments.
    """
    if tl.load(skip) != 0.0:
        return
    tensor = own_tensor(table, owners)
    own = own_numbers(tensor, numbers)
    row_len, rows = row_length(tensor, ALIGNED), tl.load(tensor + ROWS_AT)
    parts, index = segments_in(row_len), own_index(tensor, FIRST_PROGRAM_AT)
    col_mean = 1.0
    if V == "factored" or V == "factored-bf16":
        col_mean = mean_of_cols(tensor, own, row_len)
    of_direction = tl.zeros((SEGMENTS, SEGMENT), tl.float32)
    of_param = tl.zeros((SEGMENTS, SEGMENT), tl.float32)
    for tile in range(TILES):
        segment = (index * TILES + tile) * SEGMENTS + tl.arange(0, SEGMENTS)[:, None]
        row, part = segment // parts, segment % parts
        inside = row < rows
        offset, mask = elements(row, part, row_len, inside)
        seen = clean(load_grad(tensor, own, offset, mask, GRAD, ALIGNED), SHARES)
        param = load_param(tensor, offset, mask, PARAM, W, ALIGNED)
        v = advanced_v(tensor, own, seen, col_mean, row, part, parts, row_len, offset, inside, mask, V, ALIGNED)
        direction = tl.where(mask, direction_of(own, seen, seen, v, MECHANISM), 0.0)
        of_direction += direction * direction
        param = tl.where(tl.abs(param) < INFINITE, param, 0.0)  # a non-finite element must not spoil the others
        of_param += param * param
    segments = rows * parts
    programs = ((segments + SEGMENTS * TILES - 1) // (SEGMENTS * TILES)).to(tl.int32)
    at = fp32_at(tensor, LENGTH_PARTS_AT)
    tl.store(at + index, tl.sum(tl.sum(of_direction, axis=1), axis=0))
    tl.store(at + programs + index, tl.sum(tl.sum(of_param, axis=1), axis=0))

    tl.debug_barrier()
    if _is_last(tensor, LENGTH_TICKET_AT, 0, programs):
        numel = (rows * row_len).to(tl.float32)
        direction_rms = root(quotient(_length(at, programs), numel))
        param_rms = root(quotient(_length(at + programs, programs), numel))
        shrunk = tl.maximum(quotient(direction_rms, tl.load(own + CLIP)), 1.0)
        factor = quotient(tl.maximum(param_rms, tl.load(own + MIN_PARAM_RMS)), shrunk)
        tl.store(fp32_at(tensor, STEP_FACTOR_AT), factor)


@triton.jit
def _is_last(tensor, TICKETS: tl.constexpr, which, count):
    """Return whether this program is the last of ``count``. It may then read what the others have stored."""
    ticket = tl.load(tensor + TICKETS).to(tl.pointer_type(tl.int32)) + which
    is_last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == count - 1
    tl.store(ticket, 0, mask=is_last)  # for the next launch
    return is_last


@triton.jit
def _total(at, parts, length, index, mask):
    """Sum values of shape ``(parts, length)`` over parts, at the given indices."""
    total = tl.zeros(index.shape, tl.float32)
    for part in range(parts):
        # bypass L1: it may hold this cache line from before another program stored to it
        total += tl.load(at + part * length + index, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _length(at, parts):
    """Sum one value per part."""
    lane = tl.arange(0, LANES)
    total = tl.zeros((LANES,), tl.float32)
    for first in range(0, parts, LANES):
        total += tl.load(at + first + lane, mask=first + lane < parts, other=0.0, cache_modifier=".cg")
    return tl.sum(total, axis=0)


@triton.jit
def _finish(out, own, total, count, index, mask, OUT: tl.constexpr):
    """Store means of ``count`` values each. Returns what was stored, and zeros outside the mask.

    With ``OUT`` "fp32" or "bf16" the means are averaged into a factor of v. With "inverse root" they become the factors
    that normalize rows or columns.
    """
    mean = quotient(total, count.to(tl.float32))
    if OUT == "inverse root":
        value = quotient(1.0, root(tl.maximum(mean, FP32_TINY)))
        stored = store_dense(out, index, mask, value, 0, "fp32", False)
    else:
        held = load_dense(out, index, mask, OUT, False)
        value = held * tl.load(own + V_KEEP) + mean * tl.load(own + V_ADD)
        noise = noise_at(index, tl.load(own + V_PHASE).to(tl.int32))
        stored = store_dense(out, index, mask, value, noise, OUT, False)
    return tl.where(mask, stored, 0.0)

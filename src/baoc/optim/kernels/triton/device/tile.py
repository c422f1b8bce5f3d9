"""A tile of a tensor: its place in the tables, its state, and the direction that the update rules compute from it."""

import triton
import triton.language as tl

from baoc.core import spec
from baoc.optim.kernels.triton.device.formats import (
    SEGMENT,
    load_dense,
    load_int4,
    load_int8,
    load_weight,
    quotient,
    root,
    store_dense,
    store_int4,
    store_int8,
)
from baoc.optim.kernels.triton.families import Number, Word

SPIKE = tl.constexpr(spec.SPIKE)
BLOCKS = tl.constexpr(128)  # sums over blocks that are added at once
WORDS = tl.constexpr(len(Word))
NUMBERS = tl.constexpr(len(Number))

# Triton functions can read global constants only if they have this type.
PARAM_AT = tl.constexpr(int(Word.PARAM))
GRAD_AT = tl.constexpr(int(Word.GRAD))
M_AT = tl.constexpr(int(Word.M))
M_SHARED_AT = tl.constexpr(int(Word.M_SHARED))
V_AT = tl.constexpr(int(Word.V))
V_SHARED_AT = tl.constexpr(int(Word.V_SHARED))
W_AT = tl.constexpr(int(Word.W))
ROW_AT = tl.constexpr(int(Word.ROW))
COL_AT = tl.constexpr(int(Word.COL))
ROW_PARTS_AT = tl.constexpr(int(Word.ROW_PARTS))
COL_PARTS_AT = tl.constexpr(int(Word.COL_PARTS))
COL_BLOCKS_AT = tl.constexpr(int(Word.COL_BLOCKS))
LENGTH_PARTS_AT = tl.constexpr(int(Word.LENGTH_PARTS))
STEP_FACTOR_AT = tl.constexpr(int(Word.STEP_FACTOR))
ROW_TICKETS_AT = tl.constexpr(int(Word.ROW_TICKETS))
COL_TICKETS_AT = tl.constexpr(int(Word.COL_TICKETS))
LENGTH_TICKET_AT = tl.constexpr(int(Word.LENGTH_TICKET))
ROW_LEN_AT = tl.constexpr(int(Word.ROW_LEN))
ROWS_AT = tl.constexpr(int(Word.ROWS))
FIRST_PROGRAM_AT = tl.constexpr(int(Word.FIRST_PROGRAM))
FIRST_BLOCK_AT = tl.constexpr(int(Word.FIRST_BLOCK))
NUMBERS_AT = tl.constexpr(int(Word.NUMBERS))
FIRST_ELEMENT_AT = tl.constexpr(int(Word.FIRST_ELEMENT))

SIGN = tl.constexpr(int(Number.SIGN))
STEP = tl.constexpr(int(Number.STEP))
SHRINK = tl.constexpr(int(Number.SHRINK))
COUPLED_DECAY = tl.constexpr(int(Number.COUPLED_DECAY))
M_KEEP = tl.constexpr(int(Number.M_KEEP))
M_ADD = tl.constexpr(int(Number.M_ADD))
M_MASS = tl.constexpr(int(Number.M_MASS))
M_PHASE = tl.constexpr(int(Number.M_PHASE))
V_KEEP = tl.constexpr(int(Number.V_KEEP))
V_ADD = tl.constexpr(int(Number.V_ADD))
V_MASS_SQRT = tl.constexpr(int(Number.V_MASS_SQRT))
V_MEAN_FLOOR = tl.constexpr(int(Number.V_MEAN_FLOOR))
V_FLOOR = tl.constexpr(int(Number.V_FLOOR))
V_PHASE = tl.constexpr(int(Number.V_PHASE))
W_PHASE = tl.constexpr(int(Number.W_PHASE))
EPS = tl.constexpr(int(Number.EPS))
OF_M = tl.constexpr(int(Number.OF_M))
OF_GRAD = tl.constexpr(int(Number.OF_GRAD))
MIN_PARAM_RMS = tl.constexpr(int(Number.MIN_PARAM_RMS))
CLIP = tl.constexpr(int(Number.CLIP))


@triton.jit
def own_tensor(table, owners):
    """Return a pointer to the table row of the tensor that this program works on."""
    return table + tl.load(owners + tl.program_id(0)).to(tl.int64) * WORDS


@triton.jit
def own_numbers(tensor, numbers):
    """Return a pointer to the numbers of a tensor."""
    return numbers + tl.load(tensor + NUMBERS_AT) * NUMBERS


@triton.jit
def fp32_at(tensor, WORD: tl.constexpr):
    """Return a pointer to the fp32 values whose address is in a column of the table."""
    return tl.load(tensor + WORD).to(tl.pointer_type(tl.float32))


@triton.jit
def own_index(tensor, FIRST: tl.constexpr):
    """Return the index of this program among the programs of its tensor."""
    return (tl.program_id(0) - tl.load(tensor + FIRST)).to(tl.int32)


@triton.jit
def row_length(tensor, ALIGNED: tl.constexpr):
    """Return the elements in a row."""
    length = tl.load(tensor + ROW_LEN_AT)
    if ALIGNED:  # see formats.pointer
        length = (length >> 4) * 16
    return length


@triton.jit
def segments_in(row_len):
    """Return the number of segments in a row."""
    return ((row_len + SEGMENT - 1) // SEGMENT).to(tl.int32)


@triton.jit
def elements(row, part, row_len, inside):
    """Return (offsets, mask) of the elements of segments. ``row`` and ``part`` have shape (segments, 1)."""
    within = part.to(tl.int64) * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    return row.to(tl.int64) * row_len + within, inside & (within < row_len)


@triton.jit
def load_grad(tensor, numbers, offset, mask, GRAD: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the gradient to descend on, without coupled weight decay."""
    return load_dense(tl.load(tensor + GRAD_AT), offset, mask, GRAD, ALIGNED) * tl.load(numbers + SIGN)


@triton.jit
def load_param(tensor, offset, mask, PARAM: tl.constexpr, W: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the parameter in fp32, with its low bits."""
    return load_weight(tl.load(tensor + PARAM_AT), tl.load(tensor + W_AT), offset, mask, PARAM, W, ALIGNED)


@triton.jit
def clean(grad, SHARES: tl.constexpr):
    """Zero spikes and non-finite gradients where elements share numbers with their neighbors."""
    return tl.where(tl.abs(grad) < SPIKE, grad, 0.0) if SHARES else grad


@triton.jit
def load_slot(
    data, shared, row, part, parts, row_len, offset, inside, mask,
    FORMAT: tl.constexpr, SIGNED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Load the values of a slot as fp32."""
    if FORMAT == "int8":
        return load_int8(data, shared, offset, row.to(tl.int64) * parts + part, inside, mask, SIGNED, ALIGNED)
    elif FORMAT == "int4":
        return load_int4(data, shared, row, part, row_len, inside, ALIGNED)
    else:
        return load_dense(data, offset, mask, FORMAT, ALIGNED)


@triton.jit
def store_slot(
    data, shared, row, part, parts, row_len, offset, inside, mask, value, noise, grad,
    FORMAT: tl.constexpr, SIGNED: tl.constexpr, SHIFT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Store values of a slot. ``SHIFT`` is ``Layout.idle_shift``."""
    if FORMAT == "int8":
        segment = row.to(tl.int64) * parts + part
        store_int8(data, shared, offset, segment, inside, mask, value, noise, grad, SIGNED, SHIFT, ALIGNED)
    elif FORMAT == "int4":
        store_int4(data, shared, row, part, row_len, inside, tl.where(mask, value, 0.0), noise, grad, SHIFT, ALIGNED)
    else:
        store_dense(data, offset, mask, value, noise, FORMAT, ALIGNED)


@triton.jit
def advanced_m(
    tensor, numbers, grad, row, part, parts, row_len, offset, inside, mask, M: tl.constexpr, ALIGNED: tl.constexpr
):
    """Return the new first moment before rounding."""
    data, shared = tl.load(tensor + M_AT), tl.load(tensor + M_SHARED_AT)
    held = load_slot(data, shared, row, part, parts, row_len, offset, inside, mask, M, True, ALIGNED)
    return held * tl.load(numbers + M_KEEP) + grad * tl.load(numbers + M_ADD)


@triton.jit
def advanced_v(
    tensor, numbers, grad, col_mean, row, part, parts, row_len, offset, inside, mask,
    V: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return the new second moment. Factors and means already contain the gradient, from a launch of their own."""
    if V == "row-mean":
        return row_number(tensor, row, inside, "fp32")
    elif V == "col-mean":
        return col_number(tensor, part, mask, "fp32", ALIGNED)
    elif V == "factored":
        col = quotient(col_number(tensor, part, mask, "fp32", ALIGNED), col_mean)
        return row_number(tensor, row, inside, "fp32") * col
    elif V == "factored-bf16":
        col = quotient(col_number(tensor, part, mask, "bf16", ALIGNED), col_mean)
        return row_number(tensor, row, inside, "bf16") * col
    else:
        data, shared = tl.load(tensor + V_AT), tl.load(tensor + V_SHARED_AT)
        held = load_slot(data, shared, row, part, parts, row_len, offset, inside, mask, V, False, ALIGNED)
        return held * tl.load(numbers + V_KEEP) + grad * grad * tl.load(numbers + V_ADD)


@triton.jit
def row_number(tensor, row, inside, FORMAT: tl.constexpr):
    """Load one value per row, shape (segments, 1)."""
    return load_dense(tl.load(tensor + ROW_AT), row, inside, FORMAT, False)


@triton.jit
def col_number(tensor, part, mask, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Load one value per column, shape (segments, SEGMENT)."""
    col = part.to(tl.int64) * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    return load_dense(tl.load(tensor + COL_AT), col, mask, FORMAT, ALIGNED)


@triton.jit
def mean_of_cols(tensor, numbers, row_len):
    """Return the mean of the column factor, from the sums over its blocks, but at least the floor."""
    blocks, count = fp32_at(tensor, COL_BLOCKS_AT), segments_in(row_len)
    lane = tl.arange(0, BLOCKS)
    total = tl.zeros((BLOCKS,), tl.float32)
    for first in range(0, count, BLOCKS):
        total += tl.load(blocks + first + lane, mask=first + lane < count, other=0.0)
    mean = quotient(tl.sum(total, axis=0), row_len.to(tl.float32))
    return tl.maximum(mean, tl.load(numbers + V_MEAN_FLOOR))


@triton.jit
def direction_of(numbers, grad, m, v, MECHANISM: tl.constexpr):
    """Return the update before the step length, as the rules in :mod:`baoc.core.mechanisms` define it."""
    if MECHANISM == "momentum" or MECHANISM == "move":
        return m
    elif MECHANISM == "adam":
        denominator = quotient(root(v), tl.load(numbers + V_MASS_SQRT)) + tl.load(numbers + EPS)
        return quotient(quotient(m, tl.load(numbers + M_MASS)), denominator)
    elif MECHANISM == "adafactor":
        return quotient(1.0, root(tl.maximum(v, tl.load(numbers + V_FLOOR)))) * grad
    elif MECHANISM == "ahead":
        return m * tl.load(numbers + OF_M) + grad * tl.load(numbers + OF_GRAD)
    elif MECHANISM == "lion":
        ahead = m * tl.load(numbers + OF_M) + grad * tl.load(numbers + OF_GRAD)
        return tl.where(ahead > 0, 1.0, tl.where(ahead < 0, -1.0, 0.0))
    else:
        return grad

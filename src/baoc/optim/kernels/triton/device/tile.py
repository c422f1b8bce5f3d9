"""A tile of a tensor: the state of its slots, read and stored, and the direction that mechanisms make of them."""

import triton
import triton.language as tl

from baoc.core import spec
from baoc.optim.kernels.triton.device.groups import load_int4, load_int8, store_int4, store_int8
from baoc.optim.kernels.triton.device.numbers import load_dense, quotient, root, store_dense
from baoc.optim.kernels.triton.device.table import (
    COL_AT,
    COL_BLOCKS_AT,
    EPS,
    GRAD_AT,
    M_ADD,
    M_AT,
    M_KEEP,
    M_MASS,
    M_SHARED_AT,
    OF_GRAD,
    OF_M,
    ROW_AT,
    SEGMENT,
    SIGN,
    V_ADD,
    V_AT,
    V_FLOOR,
    V_KEEP,
    V_MASS_SQRT,
    V_MEAN_FLOOR,
    V_SHARED_AT,
    fp32_at,
    segments_in,
)

SPIKE = tl.constexpr(spec.SPIKE)
BLOCKS = tl.constexpr(128)  # sums over blocks that are added up at once


@triton.jit
def load_grad(tensor, numbers, offset, mask, GRAD: tl.constexpr, ALIGNED: tl.constexpr):
    """To descend on; decay that is coupled is not in it yet."""
    return load_dense(tl.load(tensor + GRAD_AT), offset, mask, GRAD, ALIGNED) * tl.load(numbers + SIGN)


@triton.jit
def clean(grad, SHARES: tl.constexpr):
    """Without spikes, where one element's would become its neighbours' trouble."""
    return tl.where(tl.abs(grad) < SPIKE, grad, 0.0) if SHARES else grad


@triton.jit
def load_slot(
    data, shared, row, part, parts, row_len, offset, inside, mask,
    FORMAT: tl.constexpr, SIGNED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    if FORMAT == "int8":
        return load_int8(data, shared, offset, row.to(tl.int64) * parts + part, inside, mask, SIGNED, ALIGNED)
    elif FORMAT == "int4":
        return load_int4(data, shared, row, part, row_len, inside, ALIGNED)
    else:
        return load_dense(data, offset, mask, FORMAT, ALIGNED)


@triton.jit
def store_slot(
    data, shared, row, part, parts, row_len, offset, inside, mask, value, noise,
    FORMAT: tl.constexpr, SIGNED: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Returns what is stored, as far as anybody asks: of int8 and bf16."""
    if FORMAT == "int8":
        segment = row.to(tl.int64) * parts + part
        return store_int8(data, shared, offset, segment, inside, mask, value, noise, SIGNED, ALIGNED)
    elif FORMAT == "int4":
        store_int4(data, shared, row, part, row_len, inside, tl.where(mask, value, 0.0), noise, ALIGNED)
        return value
    else:
        return store_dense(data, offset, mask, value, noise, FORMAT, ALIGNED)


@triton.jit
def advanced_m(
    tensor, numbers, grad, row, part, parts, row_len, offset, inside, mask, M: tl.constexpr, ALIGNED: tl.constexpr
):
    """The new first moment, before it is rounded."""
    data, shared = tl.load(tensor + M_AT), tl.load(tensor + M_SHARED_AT)
    held = load_slot(data, shared, row, part, parts, row_len, offset, inside, mask, M, True, ALIGNED)
    return held * tl.load(numbers + M_KEEP) + grad * tl.load(numbers + M_ADD)


@triton.jit
def advanced_v(
    tensor, numbers, grad, col_mean, row, part, parts, row_len, offset, inside, mask,
    V: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The new second moment. Factors and means have taken the gradient in already, in a launch of their own."""
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
    """One number for each row, (segments, 1)."""
    return load_dense(tl.load(tensor + ROW_AT), row, inside, FORMAT, False)


@triton.jit
def col_number(tensor, part, mask, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    """One number for each column, (segments, SEGMENT)."""
    col = part.to(tl.int64) * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    return load_dense(tl.load(tensor + COL_AT), col, mask, FORMAT, ALIGNED)


@triton.jit
def mean_of_cols(tensor, numbers, row_len):
    """The mean of the column factor, from the sums over its blocks, or the floor that it may not be below."""
    blocks, count = fp32_at(tensor, COL_BLOCKS_AT), segments_in(row_len)
    lane = tl.arange(0, BLOCKS)
    total = tl.zeros((BLOCKS,), tl.float32)
    for first in range(0, count, BLOCKS):
        total += tl.load(blocks + first + lane, mask=first + lane < count, other=0.0)
    mean = quotient(tl.sum(total, axis=0), row_len.to(tl.float32))
    return tl.maximum(mean, tl.load(numbers + V_MEAN_FLOOR))


@triton.jit
def direction_of(numbers, grad, m, v, MECHANISM: tl.constexpr):
    """The update before the step length, as mechanisms in :mod:`baoc.core.mechanisms` have it."""
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

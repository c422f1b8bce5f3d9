"""The kernel that updates all tensors of a family in one pass over their memory."""

import triton
import triton.language as tl

from baoc.optim.kernels.triton.device.formats import (
    IDLE_SHIFT,
    LOOSE_IDLE_SHIFT,
    load_dense,
    noise_at,
    store_nearest,
    store_weight,
)
from baoc.optim.kernels.triton.device.tile import (
    COUPLED_DECAY,
    FIRST_ELEMENT_AT,
    FIRST_PROGRAM_AT,
    M_AT,
    M_PHASE,
    M_SHARED_AT,
    PARAM_AT,
    ROWS_AT,
    SHRINK,
    STEP,
    STEP_FACTOR_AT,
    V_AT,
    V_PHASE,
    V_SHARED_AT,
    W_AT,
    W_PHASE,
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
    store_slot,
)


@triton.jit
def update(
    table, owners, numbers, skip,
    MECHANISM: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    W: tl.constexpr, NORMS: tl.constexpr, COUPLED: tl.constexpr, SHARES: tl.constexpr, MOVES: tl.constexpr,
    ALIGNED: tl.constexpr, SEGMENTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Update ``TILES`` tiles of ``SEGMENTS`` segments of one tensor.

    ``table`` has a row of :class:`~baoc.optim.kernels.triton.families.Word` per tensor, int64, shape (tensors, words).
    ``owners`` names the tensor of each program, int32, shape (programs,). ``numbers`` has rows of
    :class:`~baoc.optim.kernels.triton.families.Number`, fp32, shape (rows, numbers). Nothing is changed if the fp32
    value at ``skip`` is not zero. The constants are those of :class:`~baoc.optim.kernels.triton.families.Family`;
    without ``MOVES`` the direction is stored in place of the parameter.
    """
    if tl.load(skip) != 0.0:
        return
    tensor = own_tensor(table, owners)
    own = own_numbers(tensor, numbers)
    row_len, rows = row_length(tensor, ALIGNED), tl.load(tensor + ROWS_AT).to(tl.int32)
    first = own_index(tensor, FIRST_PROGRAM_AT) * (SEGMENTS * TILES)
    col_mean = 1.0
    if V == "factored" or V == "factored-bf16":
        col_mean = mean_of_cols(tensor, own, row_len)
    for tile in range(TILES):
        _update_tile(
            tensor, own, row_len, rows, col_mean, first + tile * SEGMENTS,
            MECHANISM, PARAM, GRAD, M, V, W, NORMS, COUPLED, SHARES, MOVES, ALIGNED, SEGMENTS,
        )  # fmt: skip


@triton.jit
def _update_tile(
    tensor, own, row_len, rows, col_mean, first,
    MECHANISM: tl.constexpr, PARAM: tl.constexpr, GRAD: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
    W: tl.constexpr, NORMS: tl.constexpr, COUPLED: tl.constexpr, SHARES: tl.constexpr, MOVES: tl.constexpr,
    ALIGNED: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    parts = segments_in(row_len)
    segment = first + tl.arange(0, SEGMENTS)[:, None]
    row, part = segment // parts, segment % parts
    inside = row < rows
    offset, mask = elements(row, part, row_len, inside)

    grad = load_grad(tensor, own, offset, mask, GRAD, ALIGNED)
    param = grad
    if COUPLED or MOVES:
        param = load_param(tensor, offset, mask, PARAM, W, ALIGNED)
    if COUPLED:
        grad = grad + param * tl.load(own + COUPLED_DECAY)
    seen = clean(grad, SHARES)

    m, v = seen, seen
    if MECHANISM == "move":
        m = load_dense(tl.load(tensor + M_AT), offset, mask, M, ALIGNED)
    elif M != "none":
        m = advanced_m(tensor, own, seen, row, part, parts, row_len, offset, inside, mask, M, ALIGNED)
    if V != "none":
        v = advanced_v(tensor, own, seen, col_mean, row, part, parts, row_len, offset, inside, mask, V, ALIGNED)

    direction = direction_of(own, seen, m, v, MECHANISM)
    if NORMS == "row" or NORMS == "both":
        direction = direction * row_number(tensor, row, inside, "fp32")
    if NORMS == "col" or NORMS == "both":
        direction = direction * col_number(tensor, part, mask, "fp32", ALIGNED)
    if MOVES:
        if SHARES:  # a non-finite gradient shows in its own element
            direction = direction + (grad - grad)
        step = tl.load(own + STEP)
        if MECHANISM == "adafactor":
            step = step * tl.load(fp32_at(tensor, STEP_FACTOR_AT))
        moved = param * tl.load(own + SHRINK) - direction * step
        noise = 0
        if W == "8" or W == "sr":
            noise = noise_at(offset + tl.load(tensor + FIRST_ELEMENT_AT), tl.load(own + W_PHASE).to(tl.int32))
        low = tl.load(tensor + W_AT)
        store_weight(tl.load(tensor + PARAM_AT), low, offset, mask, moved, noise, PARAM, W, ALIGNED)
    else:
        store_nearest(tl.load(tensor + PARAM_AT), offset, mask, direction, PARAM, ALIGNED)
    if MECHANISM != "move":  # last, so that no register holds the parameter or the direction while groups are scaled
        _store_slots(tensor, own, seen, m, v, row, part, parts, row_len, offset, inside, mask, M, V, ALIGNED)


@triton.jit
def _store_slots(
    tensor, own, grad, m, v, row, part, parts, row_len, offset, inside, mask,
    M: tl.constexpr, V: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Round and store the state. See :class:`baoc.core.rounding.Rounding` for elements without gradient."""
    element = offset + tl.load(tensor + FIRST_ELEMENT_AT)
    has_own_square: tl.constexpr = V == "fp32" or V == "bf16" or V == "int8"
    shift: tl.constexpr = IDLE_SHIFT if has_own_square else LOOSE_IDLE_SHIFT
    if has_own_square:
        data, shared = tl.load(tensor + V_AT), tl.load(tensor + V_SHARED_AT)
        noise = noise_at(element, tl.load(own + V_PHASE).to(tl.int32))
        store_slot(
            data, shared, row, part, parts, row_len, offset, inside, mask, v, noise, grad, V, False, shift, ALIGNED
        )
    if M != "none":
        data, shared = tl.load(tensor + M_AT), tl.load(tensor + M_SHARED_AT)
        noise = noise_at(element, tl.load(own + M_PHASE).to(tl.int32))
        store_slot(
            data, shared, row, part, parts, row_len, offset, inside, mask, m, noise, grad, M, True, shift, ALIGNED
        )

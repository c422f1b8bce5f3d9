"""Reading the table: a tensor's words, its numbers, and where a tile of it lies."""

import triton
import triton.language as tl

from baoc.core.codecs.int8 import GROUP
from baoc.optim.kernels.triton.words import Number, Word

SEGMENT = tl.constexpr(GROUP)
WORDS = tl.constexpr(len(Word))
NUMBERS = tl.constexpr(len(Number))

# Triton takes names of constants only as globals of this type.
PARAM_AT = tl.constexpr(int(Word.PARAM))
GRAD_AT = tl.constexpr(int(Word.GRAD))
M_AT = tl.constexpr(int(Word.M))
M_SHARED_AT = tl.constexpr(int(Word.M_SHARED))
V_AT = tl.constexpr(int(Word.V))
V_SHARED_AT = tl.constexpr(int(Word.V_SHARED))
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
EPS = tl.constexpr(int(Number.EPS))
OF_M = tl.constexpr(int(Number.OF_M))
OF_GRAD = tl.constexpr(int(Number.OF_GRAD))
MIN_PARAM_RMS = tl.constexpr(int(Number.MIN_PARAM_RMS))
CLIP = tl.constexpr(int(Number.CLIP))


@triton.jit
def own_tensor(table, owners):
    """Where the words of the tensor start that this program works on."""
    return table + tl.load(owners + tl.program_id(0)).to(tl.int64) * WORDS


@triton.jit
def own_numbers(tensor, numbers):
    return numbers + tl.load(tensor + NUMBERS_AT) * NUMBERS


@triton.jit
def fp32_at(tensor, WORD: tl.constexpr):
    """A pointer to the fp32 numbers whose address is a word of the tensor."""
    return tl.load(tensor + WORD).to(tl.pointer_type(tl.float32))


@triton.jit
def own_index(tensor, FIRST: tl.constexpr):
    """The number of this program among those of its tensor in this launch."""
    return (tl.program_id(0) - tl.load(tensor + FIRST)).to(tl.int32)


@triton.jit
def row_length(tensor, ALIGNED: tl.constexpr):
    length = tl.load(tensor + ROW_LEN_AT)
    if ALIGNED:  # see numbers.pointer
        length = (length >> 4) * 16
    return length


@triton.jit
def segments_in(row_len):
    """Of a row."""
    return ((row_len + SEGMENT - 1) // SEGMENT).to(tl.int32)


@triton.jit
def elements(row, part, row_len, inside):
    """(offsets, mask) of the elements of segments, given by row and part of it, each (segments, 1)."""
    within = part.to(tl.int64) * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    return row.to(tl.int64) * row_len + within, inside & (within < row_len)

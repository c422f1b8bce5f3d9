"""What the host writes for the device: one row of words for each tensor, one row of numbers for each group of them."""

from __future__ import annotations

from enum import IntEnum, auto


class _FromZero(IntEnum):
    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return count


class Word(_FromZero):
    """Of a tensor, each int64. Those up to ``LENGTH_TICKET`` are addresses, or 0 where there is nothing."""

    PARAM = auto()  # or where its direction goes
    GRAD = auto()
    M = auto()  # codes or dense numbers, or a direction that is to be moved by
    M_SHARED = auto()  # exponents or scales
    V = auto()
    V_SHARED = auto()
    ROW = auto()  # one number for each row: a factor of v, or of a balanced direction
    COL = auto()  # and for each column
    ROW_PARTS = auto()  # sums over rows and columns that are not complete: (parts, rows)
    COL_PARTS = auto()  # (blocks of rows, columns)
    COL_BLOCKS = auto()  # sums over blocks of the column factor, of which its mean is made
    LENGTH_PARTS = auto()  # sums of squares of the direction and of the tensor: (2, programs)
    STEP_FACTOR = auto()  # what is made of them
    ROW_TICKETS = auto()  # int32, zero between launches: how many programs have added to a block of rows,
    COL_TICKETS = auto()  # to the columns of a segment,
    LENGTH_TICKET = auto()  # to the whole
    ROW_LEN = auto()  # elements; a tensor whose rows do not matter is one row
    ROWS = auto()
    FIRST_PROGRAM = auto()  # of those that update it
    FIRST_BLOCK = auto()  # of the programs that add up blocks of it
    NUMBERS = auto()  # which row of numbers is its own
    FIRST_ELEMENT = auto()  # of the whole parameter that is held here: a shard rounds as the whole does


class Number(_FromZero):
    """Of a mechanism at a step, each fp32. Phases of rounding have 23 bits, so they are exact."""

    SIGN = auto()  # -1 to maximize
    STEP = auto()
    SHRINK = auto()
    COUPLED_DECAY = auto()
    M_KEEP = auto()
    M_ADD = auto()
    M_MASS = auto()
    M_PHASE = auto()
    V_KEEP = auto()
    V_ADD = auto()
    V_MASS_SQRT = auto()
    V_MEAN_FLOOR = auto()
    V_PHASE = auto()
    EPS = auto()
    OF_M = auto()
    OF_GRAD = auto()
    V_FLOOR = auto()
    MIN_PARAM_RMS = auto()
    CLIP = auto()

"""Memory budgets as people give them."""

from __future__ import annotations

import math
import numbers
import re

from baoc.core.plan import PlanError

_MOST_SHARE = 10.0  # of AdamW16's state: beyond it, percent were meant
_PER_RANK = re.compile(r"\s*/\s*rank$")


def memory_budget(memory: float | int | str, reference_bytes: int, name: str = "memory") -> int:
    """Bytes of a budget: a float or "50%" is a share of AdamW16's state, an int is bytes, "1.5GiB" is a size.

    Where ``reference_bytes`` are those of one rank, so is the budget: see :func:`is_per_rank`. ``name`` is that of the
    argument, for errors.

    >>> memory_budget(0.5, 1000), memory_budget("50%", 1000), memory_budget(400, 1000), memory_budget("1.5 KiB", 1000)
    (500, 500, 400, 1536)
    """
    what = f"{name.replace('_', ' ')} budget"
    if isinstance(memory, str):
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*(%|B|[KMGT]i?B)", _PER_RANK.sub("", memory.strip()))
        if match is None:
            raise PlanError(
                f"cannot read the budget {memory!r}. Write a size like '1.5GiB', or a share like '50%' or 0.5."
            )
        number, unit = float(match[1]), match[2]
        if unit == "%":
            return memory_budget(number / 100, reference_bytes, name)
        nbytes = number * (1024 if "i" in unit else 1000) ** "BKMGT".index(unit[0])
        if not math.isfinite(nbytes):
            raise PlanError(f"the {what} {memory!r} is more bytes than can be counted.")
        return int(nbytes)
    if isinstance(memory, numbers.Integral) and not isinstance(memory, bool):
        if 1 < int(memory) <= 100:  # nobody means so few bytes; the planner tells 1 from 1.0
            raise PlanError(
                f"{name}={memory} is a budget of {memory} bytes. For {memory}% of AdamW16's state write "
                f"{name}={int(memory) / 100} or '{memory}%', for a size '{memory}MiB'."
            )
        if int(memory) < 0:
            raise PlanError(f"the {what} {memory!r} is less than nothing: bytes must be >= 0.")
        return int(memory)
    try:
        share = float(memory)
    except (TypeError, ValueError):
        share = math.nan
    if not (math.isfinite(share) and share >= 0) or isinstance(memory, bool):
        raise PlanError(f"the {what} {memory!r} is not a share: it must be a number >= 0, like 0.5.")
    if not math.isfinite(share * reference_bytes):
        raise PlanError(f"the {what} {memory!r} is more bytes than can be counted. 2.0 is enough for any plan.")
    if _MOST_SHARE < share < 100:
        raise PlanError(
            f"{name}={memory!r} is {share:g} times AdamW16's state, and 2.0 is enough for any plan. For {share:g}% of "
            f"it write {name}={share / 100:g} or '{share:g}%'."
        )
    return int(share * reference_bytes)


def is_per_rank(memory: object) -> bool:
    """Whether a budget is what each rank may hold, rather than all of them together.

    >>> is_per_rank("2GiB/rank"), is_per_rank("2GiB"), is_per_rank(0.5)
    (True, False, False)
    """
    return isinstance(memory, str) and _PER_RANK.search(memory.strip()) is not None

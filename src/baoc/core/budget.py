"""Memory budgets as people write them: shares of AdamW16's state, or sizes."""

from __future__ import annotations

import math
import re

import numpy as np

from baoc.core.plan import PlanError

_MOST_SHARE = 10.0  # of AdamW16's state; a larger number below 100 is probably a percentage
_LEAST_BYTES = 4096  # as an int; a smaller one is probably a share or a percentage
_MOST_BYTES = 1 << 62
_PER_RANK = re.compile(r"\s*/\s*rank$")
_SIZE = re.compile(r"(\d+\.?\d*|\.\d+)\s*(%|B|[KMGT]i?B)", re.ASCII)


def memory_budget(memory: float | int | str, reference_bytes: int, name: str = "memory") -> int:
    """Convert a budget to bytes.

    Args:
        memory: a float or ``"50%"`` is a share of AdamW16's state. An int, of at least 4096, is bytes. ``"1.5GiB"`` is
            a size.
        reference_bytes: bytes of AdamW16's state. For a budget of one rank (see :func:`is_per_rank`), those of one
            rank.
        name: the name of the argument, for errors.

    Returns:
        The budget in bytes.

    Raises:
        PlanError: if ``memory`` is not a budget, or is probably meant differently.

    Example:
        >>> [memory_budget(memory, 1000) for memory in (0.5, "50%", 5000, "1.5 KiB")]
        [500, 500, 5000, 1536]
    """
    if isinstance(memory, np.generic):
        memory = memory.item()
    if isinstance(memory, str):
        return _from_text(memory, reference_bytes, name)
    if isinstance(memory, bool) or not isinstance(memory, (int, float)):
        got = repr(memory) if memory is None or isinstance(memory, bool) else f"a {type(memory).__name__}"
        raise PlanError(
            f"{name} must be a number or a string, got {got}. Write a share like 0.5 or a size like '1GiB'."
        )
    if memory != memory or memory in (math.inf, -math.inf):
        raise PlanError(f"{name} must be finite, got {memory!r}. Write a share like 0.5 or a size like '1GiB'.")
    if memory < 0:
        raise PlanError(f"{name} must be non-negative, got {shown(memory)}.")
    if isinstance(memory, int):
        if 0 < memory < _LEAST_BYTES:
            raise PlanError(_ambiguous(memory, name))
        return _counted(memory, memory, name)
    if _MOST_SHARE < memory <= 100:
        raise PlanError(
            f"{name}={memory!r} is {memory:g} times AdamW16's state, and 2.0 is enough for any plan. Write "
            f"{name}={_percent(memory)} or '{memory:g}%' for {memory:g}% of it."
        )
    return _counted(memory * reference_bytes, memory, name)


def is_per_rank(memory: object) -> bool:
    """Return whether a budget is for each rank, instead of for all ranks together.

    Args:
        memory: the budget as written.

    Returns:
        Whether it ends in ``/rank``.

    Example:
        >>> is_per_rank("2GiB/rank"), is_per_rank("2GiB"), is_per_rank(0.5)
        (True, False, False)
    """
    return isinstance(memory, str) and _PER_RANK.search(memory.strip()) is not None


def _from_text(memory: str, reference_bytes: int, name: str) -> int:
    match = _SIZE.fullmatch(_PER_RANK.sub("", memory.strip()))
    if match is None:
        raise PlanError(
            f"cannot read the budget {shown(memory)} for {name}. Write a size like '1.5GiB', or a share like '50%' or "
            "0.5."
        )
    number, unit = float(match[1]), match[2]
    if unit == "%":
        return _counted(number / 100 * reference_bytes, memory, name)
    return _counted(number * (1024 if "i" in unit else 1000) ** "BKMGT".index(unit[0]), memory, name)


def _counted(nbytes: float, memory: object, name: str) -> int:
    if not nbytes <= _MOST_BYTES:
        raise PlanError(f"{name} is too large, got {shown(memory)}. A budget is at most 2**62 bytes.")
    return int(nbytes)


def _ambiguous(memory: int, name: str) -> str:
    size = "one byte" if memory == 1 else f"{memory} bytes"
    if memory <= 2:
        what = "AdamW16's whole state" if memory == 1 else f"{memory} times AdamW16's state"
        share = f"{name}={memory}.0 for {what} (a share)"
    elif memory <= 100:
        share = f"{name}={_percent(memory)} or '{memory}%' for {memory}% of AdamW16's state (a share)"
    else:
        share = f"{name}=0.5 for half of AdamW16's state (a share)"
    return f"{name}={memory} is {size}. Write {share}, or '{memory}MiB' or at least {_LEAST_BYTES} bytes for a size."


def _percent(number: float) -> float:
    return float(f"{number / 100:g}")


def shown(value: object) -> str:
    """Return a value for an error, in one line of moderate length. Python refuses to print integers beyond it."""
    if isinstance(value, int):
        return str(value) if abs(value) < 10**30 else "an integer of more than 30 digits"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."

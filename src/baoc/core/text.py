"""Text for people: sizes, tables, notices, and errors about argument names."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, ParamSpec

import torch.distributed as dist

logger = logging.getLogger("baoc")

P = ParamSpec("P")

WIDTH = 80  # columns of a terminal
QUIET = "BAOC_QUIET"
_SHORTEST = 12
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def human_bytes(nbytes: float) -> str:
    """Format bytes in the largest binary unit that keeps the number above one.

    Args:
        nbytes: the size.

    Returns:
        The size with its unit.

    Example:
        >>> human_bytes(498232320), human_bytes(12)
        ('475.2 MiB', '12 B')
    """
    size = float(nbytes)
    for unit in _UNITS:
        if abs(size) < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.{2 if unit in _UNITS[3:] else 1}f} {unit}"


def human_count(count: int) -> str:
    """Format a number of parameters.

    Args:
        count: the number.

    Returns:
        The number, rounded, with K, M or B.

    Example:
        >>> human_count(124439808), human_count(768)
        ('124.4M', '768')
    """
    for factor, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= 10 * factor or (count >= factor and factor > 10**3):
            return f"{count / factor:.1f}{unit}"
    return str(count)


def printable(text: str) -> str:
    r"""Escape characters that a terminal would interpret, such as escape sequences and line breaks.

    Args:
        text: text from outside, such as a name in a plan file.

    Returns:
        Text that is safe to print in one line.

    Example:
        >>> printable("layer\x1b[31m\n0")
        'layer\\x1b[31m\\n0'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(name: str, width: int) -> str:
    """Cut the middle out of a name that is too long. Its ends and a layer's number say the most.

    Args:
        name: the name, with parts between dots.
        width: the most characters.

    Returns:
        The name, or its two ends and its last number.

    Example:
        >>> shortened("model.layers.11.self_attn.q_proj.weight", 24), shortened("head.weight", 24)
        ('model..11.._proj.weight', 'head.weight')
    """
    if len(name) <= width:
        return name
    numbers = [f"..{part}.." for part in name.split(".")[1:-1] if part.isdecimal()]
    for cut in (*numbers[-1:], ".."):
        room = width - len(cut)
        tail = 2 * room // 3
        begin, end = name[: room - tail], name[len(name) - tail :]
        if cut == ".." or cut[1:-1] in name[len(begin) - 1 : len(name) - tail + 1]:  # else one of the ends has it
            break
    return f"{begin.rstrip('.')}{cut}{end.lstrip('.')}"


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Sequence[str] = (),
    shorten: str | None = None,
) -> str:
    """Align rows of cells in columns. Cells are made :func:`printable`.

    Args:
        header: the names of the columns.
        rows: the cells.
        right: columns to align to the right.
        shorten: the column whose names are cut so that the table has at most 80 columns of text.

    Returns:
        The lines of the table.

    Example:
        >>> print(table(["name", "bytes"], [["a", 1], ["bcd", 100]], right=["bytes"]))
        name  bytes
        ----  -----
        a         1
        bcd     100
    """
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    if shorten is not None:
        index = header.index(shorten)
        others = [max(map(len, column)) for column in zip(header, *cells)]
        room = max(_SHORTEST, WIDTH - sum(others) + others[index] - 2 * (len(header) - 1))
        for row in cells:
            row[index] = shortened(row[index], room)
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    lines = [list(header), ["-" * width for width in widths], *cells]

    def align(row: Sequence[str]) -> str:
        parts = (
            cell.rjust(width) if name in right else cell.ljust(width) for cell, width, name in zip(row, widths, header)
        )
        return "  ".join(parts).rstrip()

    return "\n".join(align(row) for row in lines)


_MEANT = {
    "budget": "memory",
    "learning_rate": "lr",
    "momentum": "betas",
    "beta1": "betas",
    "beta2": "betas",
    "bits": "plan",
    "configuration": "plan",
    "quiet": "verbose",
    "offload": "host_memory",
    "host_memory": "offload",
}
"""Names of other libraries or classes for the same argument, or nearly the same."""


def check_names(
    settings: Mapping[str, Any], caller: str, known: Iterable[str], moved: Mapping[str, str] | None = None
) -> None:
    """Raise if a keyword argument is unknown, and name the closest known one.

    Args:
        settings: the keyword arguments.
        caller: the function or class, for the error.
        known: the names that are accepted.
        moved: for names that another object accepts, where they belong, such as
            ``{"warmup": "planner=PaperPlanner(warmup=...)"}``.

    Raises:
        TypeError: for the first unknown name.

    Example:
        >>> check_names({"budget": 3}, "BAOC", ["memory", "lr"])
        Traceback (most recent call last):
        TypeError: BAOC has no argument 'budget'. Did you mean 'memory'?
        >>> check_names({"warmup": 50}, "BAOC", ["lr"], {"warmup": "planner=PaperPlanner(warmup=...)"})
        Traceback (most recent call last):
        TypeError: BAOC has no argument 'warmup': it is now planner=PaperPlanner(warmup=...).
    """
    known, moved = sorted(known), moved or {}
    for name in settings:
        if name in known:
            continue
        if name in moved:
            raise TypeError(f"{caller} has no argument {name!r}: it is now {moved[name]}.")
        meant = [_MEANT[name]] if _MEANT.get(name) in known else []
        close = meant or get_close_matches(name, [*known, *moved], n=1)
        hint = f"Did you mean {moved.get(close[0], repr(close[0]))}?" if close else f"Known: {', '.join(known)}."
        raise TypeError(f"{caller} has no argument {name!r}. {hint}")


def names_checked(
    caller: str, moved: Callable[[], Mapping[str, str]]
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return a decorator that lets a constructor call :func:`check_names` for its keyword arguments.

    Args:
        caller: the class, for the error.
        moved: returns where names of other objects belong. It is only called for an error.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        known = inspect.signature(init).parameters.keys() - {"self"}

        @functools.wraps(init)
        def checked(*args: P.args, **kwargs: P.kwargs) -> None:
            if not kwargs.keys() <= known:
                check_names(kwargs, caller, known, moved())
            init(*args, **kwargs)

        return checked

    return decorate


def notice(message: str, *, quiet: bool = False) -> None:
    """Tell the person who started the run something once, on the first rank only.

    The message is an INFO record of the logger ``baoc``. If logging has no handlers, nobody would see that record, so
    the message also goes to stderr.

    Args:
        message: the text.
        quiet: keep it from stderr. The environment variable ``BAOC_QUIET=1`` does the same.
    """
    if not is_first_rank():
        return
    logger.info(message)
    if not quiet and os.environ.get(QUIET, "0") in ("", "0") and not logger.hasHandlers():
        print(f"baoc: {message}", file=sys.stderr)


def is_first_rank() -> bool:
    """Return whether this process is the first rank, or the only process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") in ("", "0")  # torchrun's, before the process group exists

"""What a person reads: sizes, plain-text tables, and what is wrong with a name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

WIDTH = 80  # columns of a terminal
_SHORTEST = 12
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def human_bytes(nbytes: float) -> str:
    """Bytes in the largest binary unit that keeps the number above one.

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
    """A count of parameters, shortened.

    >>> human_count(124439808), human_count(768)
    ('124.4M', '768')
    """
    for factor, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= 10 * factor or (count >= factor and factor > 10**3):
            return f"{count / factor:.1f}{unit}"
    return str(count)


def shortened(name: str, width: int) -> str:
    """A name without its middle, if it is too long: both ends of a path tell more, and so does a layer's number.

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
        if cut == ".." or cut[1:-1] in name[len(begin) - 1 : len(name) - tail + 1]:  # else it is there already
            break
    return f"{begin.rstrip('.')}{cut}{end.lstrip('.')}"


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Sequence[str] = (),
    shorten: str | None = None,
) -> str:
    """Align columns; those named in ``right`` to the right.

    Names in the column ``shorten`` lose their middle where the table would else be wider than 80 columns.

    >>> print(table(["name", "bytes"], [["a", 1], ["bcd", 100]], right=["bytes"]))
    name  bytes
    ----  -----
    a         1
    bcd     100
    """
    cells = [[str(cell) for cell in row] for row in rows]
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
    "steps": "warmup",
    "warmup_steps": "warmup",
    "budget": "memory",
    "learning_rate": "lr",
    "momentum": "betas",
    "beta1": "betas",
    "beta2": "betas",
    "bits": "plan",
    "configuration": "plan",
    "verbose": "quiet",
    "offload": "host_memory",
    "host_memory": "offload",
}
"""Names that other libraries have for the same, or nearly."""


def check_names(settings: Mapping[str, Any], caller: str, known: Iterable[str]) -> None:
    """Raise if a keyword argument is none of those that are known.

    >>> check_names({"steps": 3}, "BAOC", ["memory", "warmup"])
    Traceback (most recent call last):
    TypeError: BAOC has no argument 'steps'. Did you mean 'warmup'?
    """
    known = sorted(known)
    for name in settings:
        if name not in known:
            meant = [_MEANT[name]] if _MEANT.get(name) in known else []
            close = meant or get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
            raise TypeError(f"{caller} has no argument {name!r}. {hint}")

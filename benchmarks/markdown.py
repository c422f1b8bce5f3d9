"""Pages of benchmarks: tables made by a command, and a reading that a person wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

READING = "\n## Reading\n"


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table: names on the left, numbers on the right.

    >>> print(table(["of", "s"], [["muon", "1.5"]]))
    | of | s |
    | --- | ---: |
    | muon | 1.5 |
    """
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ruler, *lines))


def save(text: str, path: Path) -> None:
    """Write a page, and keep the reading that is there."""
    _, _, reading = path.read_text().partition(READING) if path.exists() else ("", "", "")
    path.write_text(text + (READING + reading if reading else ""))

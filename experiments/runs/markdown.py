"""Tables as Markdown has them."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> list[str]:
    """Its lines; ``numbers``: all columns but the first stand to the right.

    >>> table(["Method", "Loss"], [["Muon", "1.5"]], numbers=True)
    ['| Method | Loss |', '| --- | ---: |', '| Muon | 1.5 |']
    """
    rule = ["---", *["---:" if numbers else "---"] * (len(header) - 1)]
    return [f"| {' | '.join(row)} |" for row in (header, rule, *rows)]

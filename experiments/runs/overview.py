"""All methods on all workloads in one small table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.runs import markdown
from experiments.runs.summary import Line
from experiments.runs.tables import COLUMNS, EDGE

_ABOUT = (
    "Test score (for accuracies higher is better, else lower), in brackets its difference to AdamW32's seed by seed\n"
    "(points for accuracies, else percent), then the state held in percent of AdamW16's."
)


def text(title: str, results: Mapping[str, Sequence[Line]]) -> str:
    """The table, with the workloads side by side."""
    by_label: dict[str, dict[str, Line]] = {}
    for workload, lines in results.items():
        for line in lines:
            by_label.setdefault(line["label"], {})[workload] = line
    rows = [
        [label, *(_cell(found[workload]) if workload in found else "" for workload in results)]
        for label, found in by_label.items()
    ]
    table = markdown.table(["Method", *results], rows)
    return "\n".join([f"# {title}", "", _ABOUT, "", *table, ""])


def _cell(line: Line) -> str:
    test, share, against = (COLUMNS[name].spread(line) for name in ("test", "share", "against"))
    if test is None or share is None:
        return "does not fit" if line.failure else "diverged"
    difference = f" ({against.mean:+.1f} ± {against.std or 0.0:.1f})" if against is not None else ""
    return f"{test.mean:.3g}{difference}, {share.mean:.0f}%{EDGE if line.at_edge else ''}"

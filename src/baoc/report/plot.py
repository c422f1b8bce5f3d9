"""The frontier as a picture. Needs matplotlib, which only this module imports, and only when it draws."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from baoc.report.explain import ReportError
from baoc.report.frontier import Frontier

FORMATS = (".png", ".svg", ".pdf")


def check(path: str | os.PathLike[str]) -> None:
    """Raise if no picture can be written there, before any work is done for it."""
    if Path(path).suffix.lower() not in FORMATS:
        raise ReportError(f"cannot plot to {os.fspath(path)!r}: its name must end in {', '.join(FORMATS)}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ReportError("a plot needs matplotlib: pip install 'baoc[plot]'.") from None


def plot(result: Frontier, path: str | os.PathLike[str], title: str = "") -> None:
    """Write risk and time against memory to ``path``; its ending says in which format."""
    check(path)
    figure = _figure(result, title)
    figure.savefig(path, dpi=150)


def _figure(result: Frontier, title: str) -> Any:
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(7, 5.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    shares = [100 * point.share for point in result.points]
    above.plot(shares, [point.risk for point in result.points], marker="o", markersize=4)
    below.plot(shares, [point.time for point in result.points], marker="o", markersize=4, color="tab:green")
    if result.knee is not None:
        point = result.points[result.knee]
        above.plot([100 * point.share], [point.risk], marker="o", markersize=9, color="tab:red", linestyle="none")
        above.annotate(
            f"knee: {point.share:.0%}",
            (100 * point.share, point.risk),
            textcoords="offset points",
            xytext=(10, 8),
            color="tab:red",
        )
    below.axhline(result.time_budget, linestyle="--", linewidth=1, color="gray", label="budget")
    below.legend(loc="best", fontsize="small")
    above.set_ylabel("expected loss (%)" if result.is_loss else "risk")
    below.set_ylabel("time\n(AdamW16 = 1)")
    below.set_xlabel("optimizer state (% of AdamW16's)")
    below.set_xscale("symlog", linthresh=1.0)
    below.set_ylim(bottom=0)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    if title:
        above.set_title(title)
    return figure

"""The report's figure: what to draw, read off the results, and drawing it. Needs matplotlib only to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MARKERS = "osD^v"
_INCHES = (11.0, 3.9)


@dataclass(frozen=True)
class Series:
    """One line. What belongs together has one color."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    color: int
    dashed: bool = False
    open_at: tuple[int, ...] = ()  # positions of points that are only lower bounds


@dataclass(frozen=True)
class Panel:
    """Axes with two logarithmic scales."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    note: str = ""


def panels(results: dict[str, Any]) -> list[Panel]:
    """The panels that there are numbers for."""
    found = []
    if results.get("step", {}).get("sweep"):
        found.append(_step_panel(results["step"]["sweep"]))
    if "solve" in results:
        found.append(_solve_panel(results["solve"]["solve"]))
    if "statistics" in results:
        found.append(_sampling_panel(results["statistics"]))
    return found


def _step_panel(sweep: Sequence[dict[str, Any]]) -> Panel:
    sizes = tuple(point["parameters"] for point in sweep)
    series = tuple(
        Series(name, sizes, tuple(1e3 * point["seconds"][name]["median"] for point in sweep), color)
        for color, name in enumerate(sweep[0]["seconds"])
    )
    return Panel("An optimizer step", "parameters", "step time (ms)", series)


def _solve_panel(rows: Sequence[dict[str, Any]]) -> Panel:
    configurations = rows[0]["configurations"]
    series = []
    for dashed, time in enumerate(dict.fromkeys(row["time"] for row in rows)):
        mine = [row for row in rows if row["time"] == time and row["configurations"] == configurations]
        blocks = tuple(row["blocks"] for row in mine)
        stopped = tuple(i for i, row in enumerate(mine) if not row["highs_finished"])
        for color, (solver, key, open_at) in enumerate((("baoc", "seconds", ()), ("HiGHS", "highs_seconds", stopped))):
            seconds = tuple(row[key] for row in mine)
            series.append(Series(f"{solver}, time {time}", blocks, seconds, color, bool(dashed), open_at))
    note = "open: stopped at its time limit" if any(each.open_at for each in series) else ""
    return Panel(f"A plan, {configurations} configurations", "blocks", "solve time (s)", tuple(series), note)


def _sampling_panel(result: dict[str, Any]) -> Panel:
    rows = result["sampling"]
    shares = tuple(100 * row["ratio"] for row in rows)
    sampling = tuple(1e3 * row["seconds"]["median"] for row in rows)
    passes = (1e3 * result["pass_seconds"]["median"],) * len(rows)
    series = (Series("forward and backward", shares, passes, 1, dashed=True), Series("sampling", shares, sampling, 0))
    return Panel(f"A sampled step of {result['model']}", "s, sampled parameters (%)", "time (ms)", series)


def draw(content: Sequence[Panel], path: Path) -> None:
    """Write the panels side by side."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(_INCHES[0] * len(content) / 3, _INCHES[1]), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(content), squeeze=False)[0], content):
        _draw(axes, panel)
    figure.savefig(path, dpi=150)


def _draw(axes: Any, panel: Panel) -> None:
    for series in panel.series:
        style = {"color": f"C{series.color}", "marker": _MARKERS[series.color], "markersize": 4.5}
        line = "--" if series.dashed else "-"
        axes.plot(series.x, series.y, linestyle=line, linewidth=1.5, label=series.label, **style)
        for i in series.open_at:
            axes.plot(series.x[i], series.y[i], markerfacecolor="white", **style)
    axes.set(xscale="log", yscale="log", xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_title(panel.title, fontsize="medium", loc="left")
    axes.legend(fontsize="small", frameon=False, title=panel.note or None, title_fontsize="x-small")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.5)

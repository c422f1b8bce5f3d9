"""What the demo found, as a picture. Needs matplotlib, which is imported only when it draws."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.demo.training import Run
from experiments.runs.figures import Point, place_labels

Results = Mapping[str, Sequence[Run]]

_STYLES = (  # colour and line of each method; dashes let what lies below them be seen
    ("#8a929c", "-"),
    ("#2a78d6", (0, (3, 1.5))),
    ("#eb6834", "-"),
    ("#b3126b", "-"),
    ("#7a3fc2", "-"),
    ("#1b8a5a", "-"),
)
_INK, _MUTED, _GRID = "#1f2328", "#59636e", "#e6e8eb"
_SMOOTH = 40  # a loss is averaged over this part of the run, twice


def draw(results: Results, reference: int, path: Path) -> None:
    """Write the picture; the ending of ``path`` says in which format. ``reference`` is AdamW16's state in bytes."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ink: Any = {"text.color": _INK, "axes.labelcolor": _INK, "xtick.color": _MUTED, "ytick.color": _MUTED}
    with rc_context(ink):
        figure: Any = Figure(figsize=(11, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
            axes.spines[["bottom", "left"]].set_color(_MUTED)
            axes.grid(color=_GRID)
            axes.set_axisbelow(True)
        _curves(left, results)
        points, bars = _trade_off(right, results, reference)
        figure.canvas.draw()  # where things are is known once the layout is
        place_labels(right, points, size=10, avoid=bars)
        figure.savefig(path, dpi=150)


def _curves(axes: Any, results: Results) -> None:
    for (name, runs), (colour, line) in zip(results.items(), _STYLES):
        curves = [smoothed(run.losses) for run in runs]
        steps = range(1, len(curves[0]) + 1)
        each = list(zip(*curves))  # the seeds' losses, step by step
        axes.fill_between(steps, [min(s) for s in each], [max(s) for s in each], color=colour, alpha=0.12, linewidth=0)
        axes.plot(steps, [statistics.mean(s) for s in each], color=colour, linestyle=line, linewidth=2, label=name)
    axes.set_title("Training loss", loc="left", fontweight="bold")
    axes.set_xlabel("step (line: mean over the seeds; band: lowest to highest)")
    axes.set_ylabel("loss, smoothed")
    axes.margins(x=0.01)
    axes.legend(frameon=False)


def _trade_off(axes: Any, results: Results, reference: int) -> tuple[list[Point], list[Any]]:
    """The points to be labelled, and what the labels must not cover."""
    points, bars = [], []
    for (name, runs), (colour, _) in zip(results.items(), _STYLES):
        share = max(1.0, 100 * max(run.state_bytes for run in runs) / reference)  # zero has no logarithm
        losses = [run.test_loss for run in runs]
        loss, spread = statistics.mean(losses), statistics.stdev(losses) if len(losses) > 1 else 0.0
        # not errorbar(), whose lines do not know where they are
        bars += axes.plot([share, share], [loss - spread, loss + spread], marker="_", markersize=8, color=colour)
        bars += axes.plot([share], [loss], marker="o", markersize=9, color=colour)
        points.append((share, loss, f"{name}, {share:.0f}%"))
    axes.set_title("Test loss against optimizer state", loc="left", fontweight="bold")
    axes.set_xlabel("optimizer state held, of 16-bit AdamW's")
    axes.set_ylabel("test loss (mean ± std; lower is better)")
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.5, 450)
    axes.xaxis.set_major_formatter(lambda percent, _: f"{percent:g}%")
    axes.set_xticks([1, 3, 6, 12, 25, 50, 100, 200, 400])
    axes.margins(y=0.25)
    return points, bars


def smoothed(losses: Sequence[float]) -> list[float]:
    """Each loss averaged with its neighbours, the nearest counting most.

    >>> smoothed([3.0, 2.0, 1.0])
    [3.0, 2.0, 1.0]
    """
    reach = len(losses) // _SMOOTH // 2
    return _averaged(_averaged(losses, reach), reach)


def _averaged(values: Sequence[float], reach: int) -> list[float]:
    return [statistics.fmean(values[max(0, i - reach) : i + reach + 1]) for i in range(len(values))]

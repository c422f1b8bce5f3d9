"""Test loss against bytes of state, a plot for each workload. It needs matplotlib, which is imported when it draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.frontier.catalog import PEERS
from experiments.frontier.lines import Line, budgeted
from experiments.runs.figures import Point, place_labels
from experiments.runs.summary import REFERENCE

_WIDTH, _HEIGHT, _ACROSS = 16.0, 3.6, 4  # inches of a page and of a row; plots in a row
_FEWEST = 0.005  # bytes per parameter; where all matrices are without state, vectors hold about as much
_WORST = 8.0  # percent above AdamW32; what is worse is shown at the edge


def draw(results: Mapping[str, Sequence[Line]], path: Path) -> None:
    """Lines by workload."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    down = max(1, math.ceil(len(results) / _ACROSS))
    figure: Any = Figure(figsize=(_WIDTH, _HEIGHT * down), layout="constrained")
    FigureCanvasAgg(figure)
    named: list[tuple[Any, list[Point]]] = []
    for axes, (workload, lines) in zip(figure.subplots(down, _ACROSS, squeeze=False).flat, results.items()):
        axes.set_title(workload)
        named.append((axes, _plot(axes, lines)))
    for axes in list(figure.axes)[len(results) :]:
        axes.set_axis_off()
    figure.canvas.draw()  # where things are is known once the layout is
    for axes, points in named:
        place_labels(axes, points, size=6)
    figure.savefig(path, dpi=150)


def _plot(axes: Any, lines: Sequence[Line]) -> list[Point]:
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    axes.axhline(0.0, color="gray", linewidth=0.8, linestyle=":")
    ours = list(budgeted(lines).values())
    points = []
    for line in lines:
        if line in ours:
            continue
        color, marker = _style(line.method)
        x, y = _place(line)
        axes.errorbar([x], [y], yerr=[line.error or 0.0], marker=marker, color=color, capsize=2, markersize=5)
        points.append((x, y, _short(line.label) + (f" ({line.mean:+.0f}%)" if y < line.mean else "")))
    if ours:
        places = sorted((*_place(line), line.error or 0.0) for line in ours)
        xs, ys, errors = zip(*places)
        stars = {"marker": "*", "markersize": 10, "color": "tab:orange", "label": "baoc default"}
        axes.errorbar(xs, ys, yerr=errors, capsize=2, **stars)
        axes.legend(fontsize="small")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("optimizer state (bytes per parameter)")
    axes.set_ylabel("test loss against\nAdamW32's (%)")
    axes.margins(x=0.1, y=0.12)
    axes.grid(alpha=0.3)
    return points


def _place(line: Line) -> tuple[float, float]:
    return max(line.bytes_per_parameter, _FEWEST), min(line.mean, _WORST)


def _style(method: str) -> tuple[str, str]:
    if method in (REFERENCE, *PEERS):
        return "tab:blue", "s"
    return ("tab:red", "P") if method.startswith("baoc-paper@") else ("gray", "o")


def _short(label: str) -> str:
    """A method's name without what most have in common.

    >>> _short("`spectral else colnorm else adamw-32`"), _short("`muon-8 else adamw[m=int8,v=factored]`")
    ('spectral + colnorm', 'muon-8 + adamw[8,factored]')
    >>> _short("BAOC (paper) 0.5"), _short("baoc default auto")
    ('paper 0.5', 'auto')
    """
    plain = label.strip("`").removesuffix(" else adamw-32").replace(" else ", " + ")
    plain = plain.replace("BAOC (paper)", "paper").removeprefix("baoc default ")
    return plain.replace("m=int", "").replace("v=", "")

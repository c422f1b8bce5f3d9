"""Test loss against bytes of state, a plot for each workload. It needs matplotlib, which is imported when it draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.frontier.catalog import PEERS
from experiments.frontier.lines import Line, budgeted
from experiments.runs.summary import REFERENCE

_WIDTH, _HEIGHT, _ACROSS = 11.0, 2.9, 4  # inches of a page and of a row; plots in a row
_FEWEST = 0.04  # bytes per parameter; where all matrices are without state, vectors hold about as much
_WORST = 8.0  # percent above AdamW32; what is worse is shown at the edge, with an arrow
_OURS = ("baoc default", "#D55E00", "*")
_COLOURS = ("#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#666666")  # Okabe and Ito's, for peers
_MARKERS = ("s", "^", "v", "D", "o", "P", "X")


def draw(results: Mapping[str, Sequence[Line]], path: Path) -> None:
    """Draw baoc and its peers in plots with the same axes and one legend. The tables have single configurations too."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    labels = {line.method: line.label.strip("`") for lines in results.values() for line in lines}
    peers = [name for name in (REFERENCE, *PEERS) if name in labels]
    looks = {name: (labels[name], colour, marker) for name, colour, marker in zip(peers, _COLOURS, _MARKERS)}
    down = max(1, math.ceil((len(results) + 1) / _ACROSS))
    figure: Any = Figure(figsize=(_WIDTH, _HEIGHT * down), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(down, _ACROSS, squeeze=False, sharex=True, sharey=True)
    places = list(grid.flat)
    for axes, (workload, lines) in zip(places, results.items()):
        _plot(axes, lines, looks)
        axes.set_title(workload, size=10, loc="left", weight="bold")
        axes.label_outer()
    first = places[0]
    first.set_xscale("log")
    first.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    first.xaxis.set_minor_formatter(NullFormatter())
    first.set_ylim(top=_WORST + 1.5)
    figure.supxlabel("optimizer state, bytes per parameter", size=10)
    figure.supylabel("test loss against AdamW32's, %", size=10)
    for axes in places[len(results) :]:
        axes.set_axis_off()
    _legend(places[len(results)], [_OURS, *looks.values()])
    for axes in places[max(0, len(results) - _ACROSS) : len(results)]:
        axes.tick_params(labelbottom=True)  # the lowest plot of its column
    figure.savefig(path, dpi=150, metadata={"Software": None})


def _plot(axes: Any, lines: Sequence[Line], looks: Mapping[str, tuple[str, str, str]]) -> None:
    axes.axhline(0.0, color="#1c1f24", linewidth=0.9)
    axes.grid(color="#dfe1e5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    for line in lines:
        if line.method in looks:
            _point(axes, line, looks[line.method], size=6)
    for line in budgeted(lines).values():
        _point(axes, line, _OURS, size=13)


def _point(axes: Any, line: Line, look: tuple[str, str, str], size: float) -> None:
    _, colour, marker = look
    x, y = max(line.bytes_per_parameter, _FEWEST), min(line.mean, _WORST)
    axes.errorbar([x], [y], yerr=[line.error or 0.0], marker=marker, color=colour, markersize=size, elinewidth=1.2)
    if y < line.mean:
        arrow = {"arrowstyle": "-|>", "color": colour}
        axes.annotate(f"{line.mean:+.0f}%", (x, y + 1.4), (x, y), arrowprops=arrow, ha="center", size=8)


def _legend(axes: Any, looks: Sequence[tuple[str, str, str]]) -> None:
    for name, colour, marker in looks:
        axes.plot([], [], marker=marker, color=colour, linestyle="none", label=name, markersize=8)
    axes.legend(loc="center left", frameon=False, fontsize=10)

"""The paper's two figures. They need matplotlib, which only this module imports, and only when it draws."""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.runs.summary import Line, Spread
from experiments.runs.tables import COLUMNS, metric_title

Results = Mapping[str, Sequence[Line]]

FAMILIES = {
    "baoc": ("BAOC", "tab:orange", "*"),
    "baoc-paper": ("the paper's BAOC", "tab:red", "P"),
    "by-type": ("By type", "tab:blue", "v"),
    "by-size": ("By size", "tab:green", "^"),
}
_WIDTH, _HEIGHT = 10.0, 3.6  # inches, of a page and of a row of plots
_PER_ROW = 2
_REACH = 4.0  # scores further from the best than this many times the median's distance are shown at the edge


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(kind: str, results: Results, path: Path) -> None:
    """Write the figure ``"trade-off"`` or ``"sweep"``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    painters: dict[str, Callable[[Any, Sequence[Line]], list[Point]]] = {"trade-off": _trade_off, "sweep": _sweep}
    shown = {name: [line for line in lines if _test(line)] for name, lines in results.items()}
    shown = {name: lines for name, lines in shown.items() if lines}
    across = min(_PER_ROW, max(1, len(shown)))
    down = max(1, math.ceil(len(shown) / across))
    figure: Any = Figure(figsize=(_WIDTH, _HEIGHT * down), layout="constrained")
    FigureCanvasAgg(figure)
    points: list[tuple[Any, list[Point]]] = []
    plots = figure.subplots(down, across, squeeze=False).flat
    for axes, (workload, lines) in zip(plots, shown.items()):
        axes.set_title(workload)
        arrow = "higher is better" if lines[0]["higher_is_better"] else "lower is better"
        axes.set_ylabel(f"test {metric_title(lines[0])}\n({arrow})")
        axes.grid(alpha=0.3)
        points.append((axes, painters[kind](axes, lines)))
    for axes in list(figure.axes)[len(shown) :]:
        axes.set_axis_off()
    figure.canvas.draw()  # where things are is known once the layout is
    for axes, named in points:
        place_labels(axes, named)
    figure.savefig(path, dpi=150)


def _trade_off(axes: Any, lines: Sequence[Line]) -> list[Point]:
    """State against the test score, with each method's training time at its name."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = _limits(lines)
    points = []
    for line in lines:
        state, test = _of("state", line), _test(line)
        assert state is not None and test is not None  # lines without are not shown
        inside = min(max(test.mean, low), high)
        family = line["method"].partition("@")[0]
        is_ours = family.startswith("baoc")
        axes.errorbar(
            [state.mean],
            [inside],
            yerr=[[min(test.std or 0.0, inside - low)], [min(test.std or 0.0, high - inside)]],
            marker="*" if is_ours else "o",
            markersize=12 if is_ours else 6,
            color=FAMILIES[family][1] if family in FAMILIES else "gray",
            capsize=2,
        )
        points.append((state.mean, inside, _label(line, test.mean if inside != test.mean else None)))
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("optimizer state (MB)")
    axes.margins(x=0.15)
    axes.set_ylim(low, high)
    return points


def _sweep(axes: Any, lines: Sequence[Line]) -> list[Point]:
    """The test score against the budget, as curves; methods without a budget are points where their state lies."""
    budgeted = [line for line in lines if line["method"].partition("@")[0] in FAMILIES]
    for family, (label, color, marker) in FAMILIES.items():
        mine = [line for line in budgeted if line["method"].startswith(f"{family}@")]
        found = {_budget(line): spread for line in mine if (spread := _test(line)) is not None}
        spreads = sorted(found.items(), key=lambda item: item[0])
        if spreads:
            axes.errorbar(
                [100 * share for share, _ in spreads],
                [spread.mean for _, spread in spreads],
                yerr=[spread.std or 0.0 for _, spread in spreads],
                marker=marker,
                markersize=10 if family == "baoc" else 6,
                color=color,
                capsize=2,
                label=label,
            )
    points = []
    widest = 110 * max([1.0, *map(_budget, budgeted)])  # what holds more is shown at the edge
    for line in (line for line in lines if line not in budgeted):
        share, test = _of("share", line), _test(line)
        assert share is not None and test is not None
        axes.axhline(test.mean, color="gray", linewidth=0.8, linestyle=":")
        place = min(share.mean, widest)
        axes.errorbar([place], [test.mean], yerr=[test.std or 0.0], marker="o", color="gray", capsize=2)
        points.append((place, test.mean, f"{line['label']}{f' ({share.mean:.0f}%)' if place < share.mean else ''}"))
    axes.set_xlabel("budget, or state held (% of AdamW16's)")
    axes.set_ylim(*_limits(lines))
    axes.set_xlim(0, 1.02 * widest)
    if budgeted:
        axes.legend(fontsize="small")
    return points


def _budget(line: Line) -> float:
    return float(line["method"].partition("@")[2])


def _of(column: str, line: Line) -> Spread | None:
    return COLUMNS[column].spread(line)


def _test(line: Line) -> Spread | None:
    return _of("test", line)


def _label(line: Line, beyond: float | None) -> str:
    seconds = _of("time", line)
    time = f"\n{seconds.mean:.0f} s" if seconds is not None else ""
    return f"{line['label']}{'' if beyond is None else f' ({beyond:.3g})'}{time}"


def _limits(lines: Sequence[Line]) -> tuple[float, float]:
    """A range in which the good methods can be told apart, however bad the worst is."""
    means = [spread.mean for line in lines if (spread := _test(line)) is not None]
    best = max(means) if lines[0]["higher_is_better"] else min(means)
    distances = [abs(mean - best) for mean in means]
    reach = min(max(distances), _REACH * statistics.median(distances)) or max(distances) or abs(best) * 0.01 or 1.0
    worst = best - reach if lines[0]["higher_is_better"] else best + reach
    margin = 0.12 * reach
    return min(best, worst) - margin, max(best, worst) + margin


# ---- labels ----

Point = tuple[float, float, str]

_AROUND = [(8, 4), (8, -4), (-8, 4), (-8, -4), (0, 10), (0, -10), (14, 22), (14, -22), (-14, 22), (-14, -22)]  # points


def place_labels(axes: Any, points: Sequence[Point], size: float = 7, avoid: Sequence[Any] = ()) -> None:
    """Write each ``(x, y, text)`` at the first free place around its point, or at the first place if none is free.

    ``avoid`` has artists, such as error bars, that no text may cover.

    The figure has been drawn, so that it is known where everything is.
    """
    renderer = axes.figure.canvas.get_renderer()
    taken = [_around_point(*axes.transData.transform((x, y))) for x, y, _ in points]
    taken += [artist.get_window_extent(renderer) for artist in avoid]
    frame = axes.get_window_extent(renderer)
    for x, y, text in points:
        places = [_annotation(axes, x, y, text, offset, size) for offset in _AROUND]
        boxes = [place.get_window_extent(renderer) for place in places]
        free = [
            index
            for index, box in enumerate(boxes)
            if all(map(frame.containsx, box.intervalx)) and all(map(frame.containsy, box.intervaly))
            if not any(box.overlaps(other) for other in taken)
        ]
        chosen = free[0] if free else 0
        for index, place in enumerate(places):
            if index != chosen:
                place.remove()
        taken.append(boxes[chosen])


def _annotation(axes: Any, x: float, y: float, text: str, offset: tuple[int, int], size: float) -> Any:
    right, up = offset
    annotation = axes.annotate(
        text,
        (x, y),
        xytext=offset,
        textcoords="offset points",
        fontsize=size,
        linespacing=0.9,
        ha="left" if right > 0 else "right" if right < 0 else "center",
        va="bottom" if up > 0 else "top",
    )
    annotation.set_in_layout(False)  # or the axes would make room for it, and move
    return annotation


def _around_point(x: float, y: float, radius: float = 3.0) -> Any:
    from matplotlib.transforms import Bbox

    return Bbox([[x - radius, y - radius], [x + radius, y + radius]])

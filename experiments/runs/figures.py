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

PAPERS, DEFAULT = "baoc-paper", "baoc"
STYLES = {  # by method, or family of methods with a budget: color, marker
    PAPERS: ("tab:orange", "*"),
    DEFAULT: ("tab:blue", "D"),
    "adamw32": ("black", "p"),
    "adamw16": ("black", "o"),
    "adamw8": ("dimgray", "s"),
    "adafactor": ("tab:brown", "P"),
    "adam-mini": ("tab:green", "^"),
    "galore-adamw8": ("tab:purple", "<"),
    "galore-adamw32": ("mediumorchid", ">"),
    "galore-adafactor": ("plum", "v"),
    "spam": ("tab:red", "X"),
    "muon": ("tab:cyan", "h"),
    "cosmos": ("tab:olive", "H"),
    "by-type": ("tab:pink", "d"),
    "by-size": ("lightcoral", "8"),
}
_OTHER = ("silver", "o")
_WIDTH, _HEIGHT = 11.0, 4.0  # inches, of a page and of a row of plots
_LEGEND = 0.8  # inches
_PER_ROW = 2
_REACH = 4.0  # scores further from the best than this many times the median's distance are shown at the edge


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(kind: str, results: Results, path: Path) -> None:
    """Write the paper's Figure 1, ``"trade-off"``, or its Figure 2, ``"sweep"``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    painters: dict[str, Callable[[Any, Sequence[Line]], list[Colored]]] = {"trade-off": _trade_off, "sweep": _sweep}
    shown = {name: [line for line in lines if _score(line) and not line["variant"]] for name, lines in results.items()}
    shown = {name: lines for name, lines in shown.items() if lines}
    across = min(_PER_ROW, max(1, len(shown)))
    down = max(1, math.ceil(len(shown) / across))
    figure: Any = Figure(figsize=(_WIDTH, _HEIGHT * down + _LEGEND), layout="constrained")
    FigureCanvasAgg(figure)
    points: list[tuple[Any, list[Colored]]] = []
    plots = list(figure.subplots(down, across, squeeze=False).flat)
    for axes, (workload, lines) in zip(plots, shown.items()):
        axes.set_title(workload)
        axes.set_xlabel("optimizer state (MB)")
        axes.grid(alpha=0.3)
        points.append((axes, painters[kind](axes, lines)))
    for axes in plots[len(shown) :]:
        axes.set_axis_off()
    handles = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, fontsize="small", frameon=False)
    figure.canvas.draw()  # where things are is known once the layout is
    for axes, named in points:
        place_labels(axes, [point for point, _ in named], colors=[color for _, color in named])
    figure.savefig(path, dpi=150)


def _trade_off(axes: Any, lines: Sequence[Line]) -> list[Colored]:
    """Test score with filled markers, training loss with hollow ones on an axis of its own, and run times."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    other = axes.twinx()
    other.set_ylabel("training loss (hollow)")
    axes.set_ylabel(f"test {metric_title(lines[0])} (filled)")
    axes.set_zorder(other.get_zorder() + 1)  # labels lie over the hollow markers
    axes.patch.set_visible(False)
    low, high = _limits(lines, "test")
    least, most = _limits(lines, "loss")
    states = [state.mean for line in lines if (state := _of("state", line)) is not None]
    floor = min((state for state in states if state), default=1.0) / 3  # where no state is shown: the axis has no zero
    points: list[Colored] = []
    for line in lines:
        state, score, loss, seconds = (_of(name, line) for name in ("state", "test", "loss", "time"))
        assert state is not None and score is not None and seconds is not None  # lines without are not shown
        color, marker = _style(line)
        size = 11 if marker == "*" else 7
        inside = min(max(score.mean, low), high)
        beyond = "" if inside == score.mean else f" ({score.mean:.3g})"
        beyond += "" if state.mean else ", no state"
        x = max(state.mean, floor)
        axes.errorbar(
            [x],
            [inside],
            yerr=[[min(score.std or 0.0, inside - low)], [min(score.std or 0.0, high - inside)]],
            marker=marker,
            markersize=size,
            color=color,
            capsize=2,
            linestyle="none",
            clip_on=False,
            label=_name(line),
        )
        if loss is not None:
            inner = min(max(loss.mean, least), most)
            other.plot([x], [inner], marker, ms=size, color=color, markerfacecolor="none", clip_on=False)
        points.append(((x, inside, f"{_seconds(seconds.mean)}{beyond}"), color))
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.12)
    axes.set_ylim(low, high)
    other.set_ylim(least, most)
    return points


def _sweep(axes: Any, lines: Sequence[Line]) -> list[Colored]:
    """BAOC's budgets as curves, from the smallest to the largest; baselines as isolated markers."""
    column = _column(lines[0])
    better = "higher" if lines[0]["higher_is_better"] else "lower"
    title = "training loss" if column == "loss" else f"test {metric_title(lines[0])}"
    axes.set_ylabel(f"{title}\n({better} is better)")
    low, high = _limits(lines, column)
    points: list[Colored] = []
    for family in (PAPERS, DEFAULT):
        mine = sorted((line for line in lines if line["method"].startswith(f"{family}@")), key=_budget)
        found = [(_of("state", line), _of(column, line)) for line in mine]
        placed = [(state.mean, score) for state, score in found if state and score]
        if not placed:
            continue
        color, marker = STYLES[family]
        axes.errorbar(
            [state for state, _ in placed],
            [min(max(score.mean, low), high) for _, score in placed],
            yerr=[score.std or 0.0 for _, score in placed],
            marker=marker,
            markersize=11 if marker == "*" else 5,
            color=color,
            capsize=2,
            label=f"{_name(mine[0])}, rho {_budget(mine[0]):g} to {_budget(mine[-1]):g}",
        )
    for line in lines:
        if line["method"].partition("@")[0] in (PAPERS, DEFAULT):
            continue
        state, score = _of("state", line), _of(column, line)
        assert state is not None and score is not None
        color, marker = _style(line)
        inside = min(max(score.mean, low), high)
        axes.plot([state.mean], [inside], marker, color=color, markersize=7, label=_name(line), clip_on=False)
        if inside != score.mean:
            points.append(((state.mean, inside, f"({score.mean:.3g})"), color))
    axes.set_ylim(low, high)
    axes.margins(x=0.06)
    return points


def _style(line: Line) -> tuple[str, str]:
    return STYLES.get(line["method"].partition("@")[0], _OTHER)


def _name(line: Line) -> str:
    """A method's label without its budget, which the place says."""
    return str(line["label"]).removesuffix(f" {line['method'].partition('@')[2]}")


def _budget(line: Line) -> float:
    return float(line["method"].partition("@")[2])


def _seconds(value: float) -> str:
    """A run time in few characters.

    >>> _seconds(4.25), _seconds(250), _seconds(9000)
    ('4.2s', '250s', '150min')
    """
    if value >= 600:
        return f"{value / 60:.0f}min"
    return f"{value:.0f}s" if value >= 10 else f"{value:.1f}s"


def _column(line: Line) -> str:
    """What the paper judges a workload by: for diffusion, the training loss."""
    return "loss" if line["metric"] == "loss" else "test"


def _of(column: str, line: Line) -> Spread | None:
    return COLUMNS[column].spread(line)


def _score(line: Line) -> Spread | None:
    return _of("test", line)


def _limits(lines: Sequence[Line], column: str) -> tuple[float, float]:
    """A range in which the good methods can be told apart, however bad the worst is."""
    means = [spread.mean for line in lines if (spread := _of(column, line)) is not None]
    is_up = column == "test" and lines[0]["higher_is_better"]
    best = max(means) if is_up else min(means)
    distances = [abs(mean - best) for mean in means]
    reach = min(max(distances), _REACH * statistics.median(distances)) or max(distances) or abs(best) * 0.01 or 1.0
    worst = best - reach if is_up else best + reach
    margin = 0.12 * reach
    return min(best, worst) - margin, max(best, worst) + margin


# ---- labels ----

Point = tuple[float, float, str]
Colored = tuple[Point, str]

_AROUND = [(8, 4), (8, -4), (-8, 4), (-8, -4), (0, 10), (0, -10), (14, 22), (14, -22), (-14, 22), (-14, -22)]  # points


def place_labels(
    axes: Any, points: Sequence[Point], size: float = 7, avoid: Sequence[Any] = (), colors: Sequence[str] = ()
) -> None:
    """Write each ``(x, y, text)`` at the first free place around its point, or at the first place if none is free.

    ``avoid`` has artists, such as error bars, that no text may cover.

    The figure has been drawn, so that it is known where everything is.
    """
    renderer = axes.figure.canvas.get_renderer()
    taken = [_around_point(*axes.transData.transform((x, y))) for x, y, _ in points]
    taken += [artist.get_window_extent(renderer) for artist in avoid]
    frame = axes.get_window_extent(renderer)
    for (x, y, text), color in zip(points, colors or ["black"] * len(points)):
        places = [_annotation(axes, x, y, text, offset, size, color) for offset in _AROUND]
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


def _annotation(axes: Any, x: float, y: float, text: str, offset: tuple[int, int], size: float, color: str) -> Any:
    right, up = offset
    annotation = axes.annotate(
        text,
        (x, y),
        xytext=offset,
        textcoords="offset points",
        fontsize=size,
        color=color,
        linespacing=0.9,
        ha="left" if right > 0 else "right" if right < 0 else "center",
        va="bottom" if up > 0 else "top",
    )
    annotation.set_in_layout(False)  # or the axes would make room for it, and move
    return annotation


def _around_point(x: float, y: float, radius: float = 3.0) -> Any:
    from matplotlib.transforms import Bbox

    return Bbox([[x - radius, y - radius], [x + radius, y + radius]])

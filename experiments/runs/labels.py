"""Names beside points, where they cover neither each other nor the points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Point = tuple[float, float, str]

_AROUND = [(8, 4), (8, -4), (-8, 4), (-8, -4), (0, 10), (0, -10), (14, 22), (14, -22), (-14, 22), (-14, -22)]  # points


def place_labels(axes: Any, points: Sequence[Point], size: float = 7, avoid: Sequence[Any] = ()) -> None:
    """Write each ``(x, y, text)`` at the first place around its point that is free; if none is, at the first.

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

"""How the pictures look: the colours of the explorer page, on a light ground that is their own in dark pages too."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import baoc

INK, MUTED, LINE, GROUND = "#1c1f24", "#626a75", "#dfe1e5", "#ffffff"
PLAIN = "#8a929c"  # AdamW32, which all are compared with
_MOST_BYTES = 4  # per element, as in AdamW16; more has the same colour
_WEAKEST, _SPAN = 0.3, 0.66  # how much of its hue a colour has, as in the page's light theme


@contextmanager
def figure(width: float, height: float, path: Path) -> Iterator[Any]:
    """A figure in inches that is written to ``path`` at the end."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    look: Any = {
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.titlesize": 11,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "font.size": 10,
        "legend.frameon": False,
    }
    with rc_context(look):
        made = Figure(figsize=(width, height), layout="constrained", facecolor=GROUND)
        FigureCanvasAgg(made)
        yield made
        # what was drawn when, and by which version, would change the file where the picture is the same
        made.savefig(path, dpi=160, metadata={"Software": None})


def bare(axes: Any) -> None:
    """Two spines and a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)


def colours(configurations: Iterable[baoc.Configuration]) -> dict[str, str]:
    """By alias: a hue for the update rule, the weaker the fewer bytes of state. It does not depend on the others.

    >>> list(colours([baoc.parse("muon-8"), baoc.parse("muon-4")]).values())
    ['#e5995e', '#eab081']
    """
    hues, spare = _hues()
    found = {}
    for each in configurations:
        rule, nbytes = each.mechanism_name, each.state_bytes((1024, 1024)) / 2**20
        hue = hues.get(rule) or spare[sum(map(ord, rule)) % len(spare)]
        strength = min(1.0, max(0.0, 1 + math.log2(nbytes / _MOST_BYTES) / 4)) if nbytes else 1.0
        found[each.alias] = _mixed(hue, _WEAKEST + _SPAN * strength)
    return found


def ink_on(colour: str) -> str:
    """Whether light or dark letters are easier to read there."""
    red, green, blue = _channels(colour)
    return GROUND if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else INK


def _hues() -> tuple[dict[str, str], list[str]]:
    """The explorer page's, from where they are written down: by mechanism, and those for all others."""
    script = (resources.files("baoc.tools.report") / "page" / "draw.js").read_text(encoding="utf-8")
    named, others = (re.search(rf"const {name} = (.*?);", script, re.DOTALL) for name in ("HUES", "SPARE"))
    assert named and others
    return dict(re.findall(r'(\w+): "(#\w{6})"', named[1])), re.findall(r"#\w{6}", others[1])


def _mixed(hue: str, share: float) -> str:
    return "#" + "".join(f"{round(each * share + 255 * (1 - share)):02x}" for each in _channels(hue))


def _channels(colour: str) -> list[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]

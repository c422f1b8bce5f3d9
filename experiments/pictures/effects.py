"""The effect table as a picture: hidden matrices and embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import baoc
from baoc.core.roles import Role
from baoc.planners.effect_table import EffectTable
from experiments.pictures.style import INK, MUTED, bare, colours, figure

_SHOWN = {Role.MATRIX: "Hidden matrices", Role.EMBEDDING: "Embeddings"}
_REGIMES = {"scratch": ("from scratch", "o"), "finetune": ("in fine-tuning", "D")}
_WORST = 9.5  # percent; what is worse is shown at the edge, with an arrow and its number
_SHAPE = (1024, 1024)


def draw(path: Path) -> None:
    """A row for each configuration, ordered by its bytes; an effect and its error for each regime."""
    table = EffectTable.load()
    found = {each for regime in _REGIMES for role in _SHOWN for each in table.effects[regime].get(role, {})}
    rows = sorted(found, key=lambda each: (-each.state_bytes(_SHAPE), str(each)))
    colour = colours(rows)
    with figure(10, 4.3, path) as made:
        plots = made.subplots(1, len(_SHOWN), sharey=True)
        for axes, (role, title) in zip(plots, _SHOWN.items()):
            bare(axes)
            axes.axvline(0.0, color=INK, linewidth=1)
            for y, configuration in enumerate(rows):
                _row(axes, -y, configuration, role, table, colour[configuration.alias])
            axes.set_title(title)
            axes.set_xlabel("change of the final loss against AdamW32, %\n(left is better)")
            axes.set_xlim(_least(table) - 0.7, 12.5)
        plots[0].set_yticks([-y for y in range(len(rows))], [_label(each) for each in rows], color=INK)
        for axes in plots:
            axes.tick_params(axis="y", length=0)
        _legend(plots[1])


def _row(axes: Any, y: int, configuration: baoc.Configuration, role: Role, table: EffectTable, colour: str) -> None:
    for offset, (regime, (_, marker)) in zip((0.14, -0.14), _REGIMES.items()):
        effect = table.effects[regime].get(role, {}).get(configuration)
        if effect is None:
            continue
        at = min(effect.loss, _WORST)
        filled = colour if regime == "scratch" else "white"
        error = effect.error if at == effect.loss else 0.0
        axes.errorbar(
            [at], [y + offset], xerr=[error], marker=marker, markersize=7, color=colour, mfc=filled, elinewidth=1.4
        )
        if at < effect.loss:
            arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.4}
            axes.annotate("", (at + 2.2, y + offset), (at, y + offset), arrowprops=arrow)
            axes.text(at - 0.5, y + offset, f"{effect.loss:+.0f}%", ha="right", va="center", size=9, color=MUTED)


def _least(table: EffectTable) -> float:
    """Return the left end of the longest bar."""
    shown = (roles.get(role, {}) for regime in _REGIMES for roles in [table.effects[regime]] for role in _SHOWN)
    return min(effect.loss - effect.error for effects in shown for effect in effects.values())


def _label(configuration: baoc.Configuration) -> str:
    each = configuration.state_bytes(_SHAPE) / (_SHAPE[0] * _SHAPE[1])
    return f"{configuration.alias}   {each:.2f} B" if each >= 0.005 else f"{configuration.alias}   nothing"


def _legend(axes: Any) -> None:
    for regime, (name, marker) in _REGIMES.items():
        filled = MUTED if regime == "scratch" else "white"
        axes.plot([], [], marker=marker, markersize=7, color=MUTED, mfc=filled, linestyle="none", label=name)
    axes.legend(loc="lower left", facecolor="white", framealpha=1)

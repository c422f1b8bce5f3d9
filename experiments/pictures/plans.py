"""Budget to plan: GPT-2's tensors in forward order, coloured by what each is given at every budget."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import baoc
from baoc import Budget, EffectPlanner, ModelFacts
from baoc.core.text import human_bytes
from baoc.tools.estimate import trainable_shapes
from baoc.tools.models.resolve import resolve
from experiments.pictures.style import GROUND, INK, MUTED, colours, figure, ink_on

MODEL, TITLE = "gpt2-small", "GPT-2 (124M)"
TOKENS = 32_768
"""Of a training step, as in README.md."""
BUDGETS = (1.0, 0.5, 0.25, 0.13, 0.05, 0.01, 0.0)
_HEIGHT, _GAP = 0.72, 0.004  # of a row; between tensors, of the model


def draw(path: Path) -> None:
    """One row of tensors for each budget; widths are parameters."""
    model = resolve(MODEL)
    shapes = trainable_shapes(model)
    problem = EffectPlanner(tokens=TOKENS).problem(ModelFacts.of(model))
    plans = {share: problem.plan(Budget(share)) for share in BUDGETS}
    order = [name for name, shape in shapes.items() if len(shape) > 1]
    used = sorted({block.configuration for plan in plans.values() for block in plan.blocks}, key=_rank)
    colour = colours(used)
    with figure(11, 4.8, path) as made:
        axes = made.subplots()
        for row, plan in enumerate(plans.values()):
            _row(axes, -row, plan, order, shapes, colour)
        _labels(axes, plans)
        _layers(axes, order, shapes)
        _legend(axes, colour)
        axes.set_xlim(-0.15, 1.27)
        axes.set_ylim(-len(plans) + 0.35, 1.7)
        axes.set_axis_off()


def _rank(configuration: baoc.Configuration) -> tuple[int, int]:
    mechanisms = ("adamw", "colnorm", "muon", "spectral")
    return mechanisms.index(configuration.mechanism_name), -configuration.state_bytes((1024, 1024))


def _places(order: list[str], shapes: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Where each tensor begins, and how wide it is, in shares of the model."""
    total = sum(math.prod(shapes[name]) for name in order)
    places, at = {}, 0.0
    for name in order:
        width = math.prod(shapes[name]) / total
        places[name] = at, width
        at += width
    return places


def _row(axes: Any, y: float, plan: baoc.Plan, order: list[str], shapes: Any, colour: dict[str, str]) -> None:
    from matplotlib.patches import Rectangle

    for name, (start, width) in _places(order, shapes).items():
        alias = plan.block_of(name).configuration.alias
        box = Rectangle(
            (start, y - _HEIGHT / 2), width, _HEIGHT, facecolor=colour[alias], edgecolor=GROUND, linewidth=0.7
        )
        axes.add_patch(box)
    name = order[0]
    start, width = _places(order, shapes)[name]
    alias = plan.block_of(name).configuration.alias
    axes.text(
        start + width / 2, y, alias, ha="center", va="center", size=8.5, color=ink_on(colour[alias]), clip_on=True
    )


def _labels(axes: Any, plans: dict[float, baoc.Plan]) -> None:
    for row, (budget, plan) in enumerate(plans.items()):
        axes.text(-0.02, -row, f"memory={budget:g}", ha="right", va="center", family="monospace", size=9.5)
        expected = plan.settings["expected_loss"]
        axes.text(1.125, -row, human_bytes(plan.state_bytes), ha="right", va="center", size=9.5)
        axes.text(1.25, -row, f"{expected:+.1f}%", ha="right", va="center", size=9.5)
    axes.text(1.125, 0.6, "state", ha="right", va="bottom", size=9, color=MUTED)
    axes.text(1.25, 0.6, "loss against\nAdamW32,\nexpected", ha="right", va="bottom", size=9, color=MUTED)
    axes.text(-0.15, 1.3, f"{TITLE}: what each tensor gets at each budget", weight="bold", size=11, va="bottom")


def _layers(axes: Any, order: list[str], shapes: Any) -> None:
    """What is where, above the first row."""
    places = _places(order, shapes)
    by_layer: dict[str, list[str]] = {}
    for name in order:
        parts = name.split(".")
        by_layer.setdefault(parts[2] if parts[1] == "h" else parts[1], []).append(name)
    for layer, names in by_layer.items():
        start, end = places[names[0]][0], sum(places[names[-1]])
        label = {"wte": "token embedding, tied to the head", "wpe": ""}.get(layer, layer)
        if layer.isdigit():
            label = "layer 1" if layer == "0" else str(int(layer) + 1)
            axes.plot([start + _GAP, end - _GAP], [0.5, 0.5], color=MUTED, linewidth=1)
        axes.text((start + end) / 2, 0.6, label, ha="center", va="bottom", size=8.5, color=MUTED)


def _legend(axes: Any, colour: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=each, label=alias) for alias, each in colour.items()]
    legend = axes.legend(
        handles=handles,
        ncols=5,
        loc="upper center",
        bbox_to_anchor=(0.5, 0.02),
        fontsize=9,
        handlelength=1.2,
        handleheight=1.1,
        columnspacing=1.6,
    )
    legend.set_title(
        f"Widths are parameters. Norms and biases, 0.1% of them, have adamw-32. Steps have {TOKENS:,} tokens.",
        prop={"size": 9},
    )
    legend.get_title().set_color(INK)

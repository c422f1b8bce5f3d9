"""What training holds on one GPU, with several optimizers: bars of weights, gradients and state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baoc import Budget, EffectPlanner, ModelFacts, Plan
from baoc.core.text import human_bytes
from baoc.tools.estimate import trainable_shapes
from baoc.tools.fit.memory import GIB, PRECISIONS
from baoc.tools.models.resolve import resolve
from experiments.pictures.style import GROUND, INK, MUTED, bare, figure

MODEL, TITLE = "llama-3.1-8b", "Llama-3.1-8B: weights, gradients and optimizer state"
GPU = 80e9
"""Bytes of the GPU that is drawn as a line."""
MEMORY = 0.25
_PARTS = {"weights": "#8a929c", "gradients": "#c9ced5", "state": "#D55E00"}


@dataclass(frozen=True)
class Bar:
    """Bytes of one way to train."""

    name: str
    parts: dict[str, int]
    per_parameter: float

    @classmethod
    def of(cls, name: str, plan: Plan, dtype: str) -> Bar:
        """Count the bytes of a plan, with weights and gradients of a dtype of ``baoc fit``."""
        count, precision = sum(block.numel for block in plan.blocks), PRECISIONS[dtype]
        sizes = (precision.weights * count, precision.gradients * count, plan.state_bytes)
        return cls(name, dict(zip(_PARTS, sizes)), sum(sizes) / count)


def bars() -> list[Bar]:
    """Return the bars, largest first."""
    model = resolve(MODEL)
    problem, shapes = EffectPlanner().problem(ModelFacts.of(model)), trainable_shapes(model)
    return [
        Bar.of("AdamW, fp32 weights", Plan.uniform("adamw-32", shapes), "fp32"),
        Bar.of("AdamW, bf16 weights", Plan.uniform("adamw-32", shapes), "bf16"),
        Bar.of("AdamW16, bf16 weights", Plan.uniform("adamw-16", shapes), "bf16"),
        Bar.of("8-bit AdamW, bf16 weights", Plan.uniform("adamw-8", shapes), "bf16"),
        Bar.of(f"baoc, memory={MEMORY:g}, bf16 weights", problem.plan(Budget(MEMORY)), "bf16"),
    ]


def draw(path: Path) -> None:
    """Draw a bar for each, with a line for the memory of a GPU."""
    rows = bars()
    with figure(10, 3.2, path) as made:
        axes = made.subplots()
        bare(axes)
        axes.grid(visible=False, axis="y")
        for y, row in enumerate(rows):
            _bar(axes, -y, row)
        axes.axvline(GPU / GIB, color=INK, linewidth=1.2, linestyle=(0, (3, 2)))
        axes.text(GPU / GIB + 0.6, 0.62, f"one GPU of {GPU / 1e9:g} GB", va="center", size=9, color=INK)
        axes.set_yticks([-y for y in range(len(rows))], [row.name for row in rows], color=INK)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(0.4 - len(rows), 0.9)
        axes.set_xlim(0, 1.33 * sum(rows[0].parts.values()) / GIB)
        axes.set_xlabel("GiB, without activations")
        axes.set_title(TITLE)


def _bar(axes: Any, y: int, row: Bar) -> None:
    at = 0.0
    for part, nbytes in row.parts.items():
        width = nbytes / GIB
        axes.barh(y, width, left=at, height=0.66, color=_PARTS[part], edgecolor=GROUND)
        if y == 0:
            dark = part != "gradients"
            axes.text(at + width / 2, y, part, ha="center", va="center", size=9, color=GROUND if dark else INK)
        at += width
    text = f"{human_bytes(sum(row.parts.values()))}, {row.per_parameter:.1f} B/param"
    ground = {"facecolor": GROUND, "edgecolor": "none", "pad": 1.5}
    axes.text(at + 0.8, y, text, va="center", size=9, color=MUTED, bbox=ground)

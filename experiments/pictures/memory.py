"""What training holds on one GPU, with several optimizers: bars of weights, their low bits, gradients and state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baoc import Budget, EffectPlanner, ModelFacts, Plan
from baoc.core.text import human_bytes
from baoc.planners.total import low_bits_bytes
from baoc.tools.estimate import trainable_shapes
from baoc.tools.fit.memory import GIB, PRECISIONS
from baoc.tools.models.resolve import resolve
from experiments.pictures.style import GROUND, INK, MUTED, bare, figure

MODEL, TITLE = "llama-3.1-8b", "Llama-3.1-8B: weights, gradients and optimizer state"
GPU = 80e9
"""Bytes of the GPU that is drawn as a line."""
FLASH_STATE = 2 + 2 * 2 / 32
"""Bytes per parameter of FlashOptim's state, from its code: two codes, and an fp16 scale for 32 of each."""
_PARTS = {"weights": "#8a929c", "low bits": "#56B4E9", "gradients": "#c9ced5", "state": "#D55E00"}


@dataclass(frozen=True)
class Bar:
    """Bytes of one way to train."""

    name: str
    parts: dict[str, int]
    per_parameter: float

    @classmethod
    def of(cls, name: str, plan: Plan, dtype: str, gradients: int | None = None) -> Bar:
        """Count the bytes of a plan.

        Args:
            name: of the bar.
            plan: the plan.
            dtype: of weights and gradients, as in ``baoc fit``.
            gradients: bytes of the gradients that exist at once, if not all do.
        """
        count, precision, low = sum(block.numel for block in plan.blocks), PRECISIONS[dtype], low_bits_bytes(plan)
        held = precision.gradients * count if gradients is None else gradients
        return cls.counted(name, (precision.weights * count, low, held, plan.state_bytes - low), count)

    @classmethod
    def counted(cls, name: str, sizes: tuple[int, int, int, int], count: int) -> Bar:
        """Return a bar of known sizes, for a number of parameters."""
        return cls(name, dict(zip(_PARTS, sizes)), sum(sizes) / count)


def bars() -> list[Bar]:
    """Return the bars."""
    model = resolve(MODEL).to(torch.bfloat16)
    shapes, facts = trainable_shapes(model), ModelFacts.of(model)
    plan = EffectPlanner(regime="scratch").problem(facts).plan(Budget("auto"))
    count = sum(block.numel for block in plan.blocks)
    largest = max(2 * math.prod(shape) for shape in shapes.values())
    return [
        Bar.of("AdamW, fp32 weights", Plan.uniform("adamw-32", shapes), "fp32"),
        Bar.of("AdamW, bf16 weights", Plan.uniform("adamw-32", shapes), "bf16"),
        Bar.counted("FlashOptim, bf16 weights", (2 * count, count, 2 * count, round(FLASH_STATE * count)), count),
        Bar.of("8-bit AdamW, bf16 weights", Plan.uniform("adamw-8", shapes), "bf16"),
        Bar.of("baoc, bf16 weights", plan, "bf16"),
        Bar.of("baoc, the same, gradients released", plan, "bf16", largest),
    ]


def draw(path: Path) -> None:
    """Draw a bar for each, with a line for the memory of a GPU."""
    rows = bars()
    with figure(10, 3.6, path) as made:
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
        if width and (y == 0 or (part == "low bits" and row.name.startswith("FlashOptim"))):
            dark = part not in ("gradients", "low bits")
            size = 9 if y == 0 else 7.5
            axes.text(at + width / 2, y, part, ha="center", va="center", size=size, color=GROUND if dark else INK)
        at += width
    text = f"{human_bytes(sum(row.parts.values()))}, {row.per_parameter:.1f} B/param"
    ground = {"facecolor": GROUND, "edgecolor": "none", "pad": 1.5}
    axes.text(at + 0.8, y, text, va="center", size=9, color=MUTED, bbox=ground)

"""The paper's StateMem column beside ours, with the reason for every difference.

python -m experiments statemem

Nothing is allocated: models are on the meta device, and bytes follow from shapes. "their rule" is how the paper's
figure comes about, as far as the figures tell; "ours" is what our build of the method holds for the whole model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import nn

import baoc
from baoc.core.budget import memory_budget
from baoc.core.spec import Shape
from baoc.core.text import table as text_table
from baoc.tools.estimate import split_excluded, trainable_shapes
from baoc.tools.models import MODELS
from experiments.methods import rules

MIB = 2**20
Shapes = Mapping[str, Shape]

FIXED, SWEEP, LONG = "tab:fixed_budget_full", "tab:budget_sweep_full", "tab:longer-schedule"

LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "gpt2-small": ("transformer.ln_f.*",),
    "t5-base": ("shared.weight", "*coder.final_layer_norm.weight"),
    "llama-3.2-1b": ("model.norm.weight",),
    "llama-3.2-3b": ("model.norm.weight",),
    "sd15-unet": ("conv_norm_out.*",),
    "vit": ("cls_token", "pos_embed", "norm.*"),
}
"""What the paper's figures do not count."""

PAPER: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("gpt2-small", SWEEP): {
        "AdamW16": "475.1514",
        "AdamW8": "241.8354",
        "Adam-mini": "475.2570",
        "GaLore-AF": "1.2216",
        "GaLore-AW32": "949.3887",
        "SPAM": "949.3887",
        "BAOC 0.5": "234.9379",
    },
    ("gpt2-small", LONG): {"Muon": "625", "COSMOS": "660"},
    ("t5-base", FIXED): {
        "AdamW16": "756.3574",
        "AdamW8": "384.6387",
        "Adam-mini": "756.2528",
        "GaLore-AF": "1.7240",
        "GaLore-AW32": "1512.3574",
        "SPAM": "1512.3574",
    },
    ("t5-base", LONG): {"Muon": "945", "COSMOS": "858"},
    ("llama-3.2-1b", FIXED): {
        "AdamW16": "4714.5000",
        "AdamW8": "2394.5488",
        "Adam-mini": "4715.5338",
        "GaLore-AF": "3.4351",
        "GaLore-AW32": "9428.5000",
    },
    ("llama-3.2-3b", FIXED): {
        "AdamW16": "12256.3125",
        "AdamW8": "6224.9395",
        "Adam-mini": "12258.1823",
        "GaLore-AF": "6.9551",
        "GaLore-AW32": "24511.3125",
    },
    ("sd15-unet", SWEEP): {
        "AdamW16": "3280.1685",
        "AdamW8": "1667.6203",
        "Adam-mini": "3280.1309",
        "GaLore-AF": "1745.5663",
        "GaLore-AW32": "6557.6197",
        "SPAM": "6557.6197",
    },
    ("vit", SWEEP): {
        "AdamW16": "41.8858",
        "AdamW8": "21.4473",
        "Adam-mini": "41.9064",
        "GaLore-AF": "0.3988",
        "GaLore-AW32": "83.5108",
        "SPAM": "83.5108",
    },
}
"""Figures in MB of 2^20 bytes, with the digits that are printed, by model and table of paper.tex."""


@dataclass(frozen=True)
class Row:
    """One figure of the paper and ours."""

    model: str
    method: str
    place: str
    paper: str
    their_rule: float  # MB
    ours: float  # MB
    reason: str

    @property
    def is_explained(self) -> bool:
        """Their rule gives the paper's figure to the last printed digit."""
        return f"{self.their_rule:.{len(self.paper.partition('.')[2])}f}" == self.paper


def adamw16(kept: Shapes, left_out: Shapes) -> int:
    return _uniform("adamw-16", kept)


def adamw32(kept: Shapes, left_out: Shapes) -> int:
    return _uniform("adamw-32", kept)


def adamw8(kept: Shapes, left_out: Shapes) -> int:
    return sum(2 * _state8(shape) for shape in kept.values())


def adafactor(kept: Shapes, left_out: Shapes) -> int:
    return sum(rules.factored(shape) + rules.STEP for shape in kept.values())


def adam_mini(kept: Shapes, left_out: Shapes) -> int:
    """adam-mini 1.1.1 by its words in names, less those for embeddings, and its default of 2048 / 32 heads."""
    per_head = ("k_proj", "q_proj", "wq", "wk", "query", "key")
    attention = ("v_proj", "wv", "value", "o_proj", "wo", "attn.proj")
    per_row = ("lm_head", "output", "final_layer", *attention, "feed_forward", "linear", "mlp")

    def scalars(name: str, shape: Shape) -> int:
        if "bias" in name:
            return prod(shape)
        if any(word in name for word in per_head):
            return prod(shape) // (2048 * 2048 // 32)
        return shape[0] if any(word in name for word in per_row) else 1

    return sum(4 * prod(shape) + 4 * scalars(name.lower(), shape) for name, shape in kept.items())


def muon(kept: Shapes, left_out: Shapes) -> int:
    """Momentum for the matrices, AdamW32 for embeddings and vectors; here nothing is left out."""

    def slots(name: str, shape: Shape) -> int:
        return 2 if len(shape) < 2 or any(word in name for word in ("wte", "wpe", "shared", "relative")) else 1

    return sum(4 * slots(name, shape) * prod(shape) for name, shape in {**kept, **left_out}.items())


def cosmos(kept: Shapes, left_out: Shapes, rank: int = 64) -> int:
    """The authors' code: every matrix of up to 10000 rows, positions included, at rank 64; else AdamW32."""

    def numbers(shape: Shape) -> int:
        if len(shape) != 2 or shape[0] > 10_000:
            return 2 * prod(shape)
        return prod(shape) + rank * (shape[0] + shape[1] + rank)

    return sum(4 * numbers(shape) for shape in kept.values())


def baoc_half_on_gpt2(kept: Shapes, left_out: Shapes) -> int:
    """AdamW8, but one layer has only a momentum."""
    return adamw8(kept, left_out) - sum(_state8(shape) for name, shape in kept.items() if ".h.0." in name)


def _uniform(configuration: str, shapes: Shapes) -> int:
    return sum(baoc.parse(configuration).state_bytes(shape) for shape in shapes.values())


def _state8(shape: Shape) -> int:
    size = prod(shape)
    return 4 * size if size < rules.SMALL else size + 4 * ceil(size / rules.GROUP) + rules.TABLE


@dataclass(frozen=True)
class _Comparison:
    ours: str | None  # the name of the method; None: the budget
    their_rule: Callable[[Shapes, Shapes], int]
    reason: str = ""
    counts_all: bool = False


_COMPARISONS = {
    "AdamW16": _Comparison("adamw16", adamw16),
    "AdamW8": _Comparison(
        "adamw8", adamw8, "counts a table of 1 KiB for each state; ours has none, and whole groups per row"
    ),
    "Adam-mini": _Comparison(
        "adam-mini",
        adam_mini,
        "takes 32 heads of width 2048 for every model and one scalar for embeddings; ours has its heads and rows",
    ),
    "GaLore-AF": _Comparison("galore-adafactor", adafactor, "counts no projection; ours has a basis for each matrix"),
    "GaLore-AW32": _Comparison("galore-adamw32", adamw32, "counts no projection; ours has a third of the rank"),
    "SPAM": _Comparison("spam", adamw32, "does not count masks, a byte per weight of a matrix"),
    "Muon": _Comparison("muon", muon, "counts every tensor in this row; rounds", counts_all=True),
    "COSMOS": _Comparison("cosmos", cosmos, "treats the table of positions as a matrix; ours as an embedding; rounds"),
    "BAOC 0.5": _Comparison(None, baoc_half_on_gpt2, "shows a plan of whole layers; ours is the budget"),
}


@functools.cache
def rows() -> tuple[Row, ...]:
    return tuple(
        _row(model, method, place, figure)
        for (model, place), figures in PAPER.items()
        for method, figure in figures.items()
    )


def table() -> str:
    """All rows as text."""
    header = ["model", "method", "paper, MB", "their rule", "ours, MB", "difference", "the paper ..."]
    cells = [
        [
            row.model,
            row.method,
            row.paper,
            "same" if row.is_explained else f"{row.their_rule:.4f}",
            f"{row.ours:.4f}",
            f"{row.ours - float(row.paper):+.4f}",
            row.reason,
        ]
        for row in rows()
    ]
    return text_table(header, cells, right=header[2:6])


def _row(model: str, method: str, place: str, figure: str) -> Row:
    module = _on_meta(model)
    kept, left_out = split_excluded(trainable_shapes(module), LEFT_OUT[model])
    comparison = _COMPARISONS[method]
    if comparison.ours is None:
        ours = memory_budget(0.5, _uniform("adamw-16", {**kept, **left_out}))
    else:
        ours = rules.state_bytes(comparison.ours, module)
    reasons = [comparison.reason, "" if comparison.counts_all else f"leaves out {', '.join(LEFT_OUT[model])}"]
    their_rule = comparison.their_rule(kept, left_out) / MIB
    return Row(model, method, place, figure, their_rule, ours / MIB, "; ".join(filter(None, reasons)))


@functools.cache
def _on_meta(model: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[model]()

"""Adam-mini: one second moment for each head, row or tensor. By its authors' package.

Zhang et al., Adam-mini: Use Fewer Learning Rates To Gain More, https://arxiv.org/abs/2406.16793.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from experiments.methods.base import Method, Settings
from experiments.methods.chained import chained
from experiments.methods.roles import Part, parts
from experiments.packages import need

# The package tells kinds apart by words in names. Giving it these instead of the model's own names makes it treat each
# parameter by its role in any model.
WORDS = {"embedding": "embed", "head": "lm_head", "matrix": "mlp", "kernel": "kernel"}
PER_HEAD, ONE_SCALAR, DENSE = "wq", "norm", "bias"


def word(part: Part) -> str:
    if part.role == "vector":
        return DENSE if part.name.endswith("bias") else ONE_SCALAR
    return PER_HEAD if part.head_rows else WORDS[part.role]


def adam_mini(model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
    optimizer = need("adam_mini", "adam-mini").Adam_mini
    by_head: dict[int, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for index, part in enumerate(parts(model)):
        head_numel = (part.head_rows or 0) * part.param.shape[-1] if part.head_rows else 0
        by_head[head_numel].append((f"{index}.{word(part)}", part.param))
    members = [
        # One instance knows one size of heads, which it works out as dim * dim / n_heads.
        optimizer(
            named,
            lr=lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            dim=head_numel or 1,
            n_heads=head_numel or 1,
            verbose=False,
        )
        for head_numel, named in by_head.items()
    ]
    return chained(*members)


METHODS = (
    Method(
        "adam-mini",
        "Adam-mini",
        adam_mini,  # its authors recommend AdamW's values for all that AdamW has
        note="its authors' package; roles found in the module; norms and biases are not decayed",
        needs=("adam_mini",),
    ),
)

"""Muon: momentum made orthogonal, for the matrices of the hidden layers; AdamW for all else. By torch.optim.

Jordan et al., https://kellerjordan.github.io/posts/muon; Liu et al., Muon is Scalable for LLM Training,
https://arxiv.org/abs/2502.16982.
"""

from __future__ import annotations

import torch
from torch import nn

from experiments.methods.base import Method, MethodError, Settings
from experiments.methods.chained import chained
from experiments.methods.roles import parts


def muon(model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
    if not hasattr(torch.optim, "Muon"):
        raise MethodError(
            f"torch {torch.__version__} has no torch.optim.Muon, which this method needs: use 2.9 or newer."
        )
    matrices = [part.param for part in parts(model) if part.role == "matrix"]
    others = [part.param for part in parts(model) if part.role != "matrix"]
    members: list[torch.optim.Optimizer] = []
    if matrices:
        # Liu et al.: with updates of AdamW's RMS, AdamW's lr and decay can be kept.
        members.append(
            torch.optim.Muon(
                matrices, lr=lr, weight_decay=settings.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
            )
        )
    if others:
        members.append(
            torch.optim.AdamW(others, lr=lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True)
        )
    return chained(*members)


METHODS = (
    Method(
        "muon",
        "Muon",
        muon,
        note="torch.optim; embeddings, heads, convolutions and vectors by AdamW32",
    ),
)

"""AdamW in 32, 16 and 8 bits, Adafactor, and others' 8-bit AdamW as peers of ours.

Loshchilov and Hutter, https://arxiv.org/abs/1711.05101; Dettmers et al., 8-bit Optimizers via Block-wise Quantization,
https://arxiv.org/abs/2110.02861; Shazeer and Stern, Adafactor, https://arxiv.org/abs/1804.04235.
"""

from __future__ import annotations

import torch
from torch import nn

import baoc
from experiments.methods.base import Method, Settings
from experiments.packages import need


def adamw32(model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
    # fused: on a CPU six times as fast as torch's default, and times are compared
    return torch.optim.AdamW(
        model.parameters(), lr=lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
    )


def adamw16(model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
    return _uniform("adamw-16", model, lr, settings)


def adamw8(model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
    return _uniform("adamw-8", model, lr, settings)


def adamw8_torchao(model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = need("torchao.optim", "adamw8-torchao").AdamW8bit(
        model.parameters(), lr=lr, betas=settings.betas, weight_decay=settings.weight_decay
    )
    return optimizer


def adamw8_bitsandbytes(model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = need("bitsandbytes", "adamw8-bitsandbytes").optim.AdamW8bit(
        model.parameters(), lr=lr, betas=settings.betas, weight_decay=settings.weight_decay
    )
    return optimizer


def adafactor(model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=lr, weight_decay=settings.weight_decay)


def _uniform(configuration: str, model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
    return baoc.BlockOptimizer(
        model, lr=lr, betas=settings.betas, weight_decay=settings.weight_decay, plan=configuration
    )


METHODS = (
    Method("adamw32", "AdamW32", adamw32, note="torch.optim, fused"),
    Method("adamw16", "AdamW16", adamw16, note="baoc, bf16 states: torch.optim has none; the reference of budgets"),
    Method("adamw8", "AdamW8", adamw8, note="baoc, int8 states"),
    Method(
        "adamw8-torchao",
        "AdamW8 (torchao)",
        adamw8_torchao,
        note="a peer of adamw8; compiles for each shape (a minute on GPT2-small), then on a CPU 39x fused AdamW32",
        needs=("torchao",),
    ),
    Method(
        "adamw8-bitsandbytes",
        "AdamW8 (bitsandbytes)",
        adamw8_bitsandbytes,
        note="a peer of adamw8; on a CPU 25x fused AdamW32",
        needs=("bitsandbytes",),
    ),
    Method(
        "adafactor",
        "Adafactor",
        adafactor,
        # Its step is relative to the RMS of the weights, some 0.02 to 0.1, and its authors' lr is 0.01.
        lr_factors=(3.0, 10.0, 30.0),
        note="torch.optim, no momentum",
    ),
)

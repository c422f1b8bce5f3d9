"""SPAM: Adam that clips spikes of the gradient and forgets its moments from time to time. By pytorch_optimizer.

Huang et al., SPAM: Spike-Aware Adam with Momentum Reset for Stable LLM Training, https://arxiv.org/abs/2501.06842.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.methods.base import Method, Settings
from experiments.packages import need


def spam(model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
    # Every method should see the same data, and this one draws random masks: now, and whenever it forgets.
    with torch.random.fork_rng(devices=[]):
        # Interval 500, warm-up after it 150 and threshold 5000 are the authors'; the package's warm-up is 50.
        optimizer: torch.optim.Optimizer = need("pytorch_optimizer", "spam").SPAM(
            model.parameters(),
            lr=lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            warmup_epoch=150,
            update_proj_gap=500,
            threshold=5000,
        )
    kept: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: kept.append(torch.get_rng_state()))
    optimizer.register_step_post_hook(lambda *_: torch.set_rng_state(kept.pop()))
    return optimizer


METHODS = (
    Method(
        "spam",
        "SPAM",
        spam,  # its authors' script has 0.0008 at 130M parameters, about what AdamW takes
        note="pytorch_optimizer, density 1; keeps a mask of a byte per weight of a matrix even so",
        needs=("pytorch_optimizer",),
    ),
)

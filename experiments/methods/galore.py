"""GaLore: Adam or Adafactor on gradients projected to a low rank. By its authors' package.

Zhao et al., GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection, https://arxiv.org/abs/2403.03507.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from baoc.core.spec import Shape
from experiments.methods.base import Method, Settings
from experiments.methods.roles import parts
from experiments.packages import need

Hook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]

# The authors' scripts have lr 0.01 at scale 0.25, ten times what is usual for AdamW; the rest is a way down from there.
FACTORS = (1.0, 3.0, 10.0)
SCALE = 0.25


def rank(shape: Shape) -> int:
    """A third of the smaller side, as in the authors' script for a width of 768, that of GPT2-small and T5-base."""
    return max(1, min(shape) // 3)


def adamw8(model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
    # The package's own 8-bit class calls torch.cuda.synchronize. This is what it does, around the same bitsandbytes.
    optimizer = need("bitsandbytes", "galore-adamw8").optim.AdamW8bit(
        _groups(model, settings), lr=lr, betas=settings.betas, weight_decay=settings.weight_decay
    )
    before, after = projecting_hooks()
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return _trimmed(optimizer)


def adamw32(model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
    return _trimmed(
        need("galore_torch", "galore-adamw32").GaLoreAdamW(
            _groups(model, settings),
            lr=lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            no_deprecation_warning=True,
        )
    )


def adafactor(model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
    return _trimmed(
        need("galore_torch", "galore-adafactor").GaLoreAdafactor(
            _groups(model, settings),
            lr=lr,
            weight_decay=settings.weight_decay,
            relative_step=False,  # as in the authors' training script
            scale_parameter=False,
        )
    )


def _groups(model: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    """Matrices of attentions and MLPs are projected, in one group for each rank; the rest is not."""
    # 200 steps in the authors' scripts, of runs with 20000 and more: a short run should see some subspaces too.
    projected = {"update_proj_gap": min(200, max(10, settings.steps // 20)), "scale": SCALE, "proj_type": "std"}
    by_rank: dict[int | None, list[nn.Parameter]] = defaultdict(list)
    for part in parts(model):
        by_rank[rank(tuple(part.param.shape)) if part.role == "matrix" else None].append(part.param)
    return [
        {"params": params} if size is None else {"params": params, "rank": size, **projected}
        for size, params in by_rank.items()
    ]


def projecting_hooks() -> tuple[Hook, Hook]:
    """What makes any optimizer GaLore: before a step gradients go to their subspace, after it updates come back."""
    projectors = need("galore_torch.galore_projector", "GaLore")
    away: list[tuple[nn.Parameter, Tensor, Tensor, Any, dict[str, Any]]] = []

    @torch.no_grad()
    def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for group in (group for group in optimizer.param_groups if "rank" in group):
            for param in (param for param in group["params"] if param.grad is not None):
                state = optimizer.state[param]
                projector = state.pop("projector", None) or projectors.GaLoreProjector(
                    group["rank"], update_proj_gap=group["update_proj_gap"], scale=group["scale"]
                )
                away.append((param, param.data, param.grad, projector, group))
                low = projector.project(param.grad, state.get("step", 0))
                param.data = torch.zeros_like(low)
                param.grad = low

    @torch.no_grad()
    def after(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for param, weight, grad, projector, group in away:
            update = projector.project_back(param.data)
            param.data, param.grad = weight, grad
            param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update)
            optimizer.state[param]["projector"] = projector
        away.clear()

    return before, after


def _trimmed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Free what the projectors do not use: their bases are views of whole SVDs, three times what GaLore promises."""

    def trim(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for state in optimizer.state.values():
            projector = state.get("projector")
            if projector is not None and projector.ortho_matrix._base is not None:
                projector.ortho_matrix = projector.ortho_matrix.clone()

    optimizer.register_step_post_hook(trim)
    return optimizer


_NOTE = "rank a third of the smaller side"
METHODS = (
    Method(
        "galore-adamw8",
        "GaLore-AW8",
        adamw8,
        FACTORS,
        f"galore-torch's projector around bitsandbytes; {_NOTE}",
        needs=("galore_torch", "bitsandbytes"),
    ),
    Method(
        "galore-adamw32",
        "GaLore-AW32",
        adamw32,
        FACTORS,
        f"galore-torch; {_NOTE}",
        needs=("galore_torch", "bitsandbytes", "transformers"),
    ),
    Method(
        "galore-adafactor",
        "GaLore-AF",
        adafactor,
        FACTORS,
        f"galore-torch, no momentum; {_NOTE}",
        needs=("galore_torch", "bitsandbytes", "transformers"),
    ),
)

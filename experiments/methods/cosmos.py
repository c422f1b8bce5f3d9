"""COSMOS: SOAP in the leading subspace of a gradient, Muon in the rest of it.

Liu et al., COSMOS: A Hybrid Adaptive Optimizer for Memory-Efficient Training of LLMs, https://arxiv.org/abs/2502.17410.
There is no package; this follows Algorithm 1 of the paper. Constants are those of https://github.com/lliu606/COSMOS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from baoc.core.spec import Shape
from experiments.methods.base import Method, Settings
from experiments.methods.chained import chained
from experiments.methods.roles import parts

RANK = 64
LR_RATIO = 0.1  # lr of the hidden matrices to that of all else
BETA2 = 0.95


def rank(shape: Shape) -> int:
    """64, as for the paper's widths of 768 to 2048, and less for small matrices."""
    return min(RANK, max(1, min(shape) // 8))


class COSMOS(torch.optim.Optimizer):
    """COSMOS for matrices. Every update has the RMS ``lr``."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, BETA2),
        weight_decay: float = 0.0,
        gamma: float = LR_RATIO,
        eps: float = 1e-8,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "gamma": gamma, "eps": eps}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    update = self._direction(param.grad, self.state[param], group)
                    param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
        return loss

    def _direction(self, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        if not state:
            basis = torch.linalg.svd(grad, full_matrices=False).Vh[: rank(tuple(grad.shape))].mT.contiguous()
            state["step"] = 0
            state["m"] = torch.zeros_like(grad)  # (rows, cols)
            state["basis"] = basis  # (cols, rank), leading eigenvectors of the mean of grad' grad
            state["gram"] = basis.new_zeros(basis.shape[1], basis.shape[1])  # (rank, rank), that mean in the basis
            state["v"] = grad.new_zeros(grad.shape[0], basis.shape[1])  # (rows, rank), second moment in the basis
        state["step"] += 1
        m, v, old, gram = state["m"], state["v"], state["basis"], state["gram"]
        m.lerp_(grad, 1 - beta1)

        # one power iteration towards the leading eigenvectors of the running mean
        power = beta2 * (old @ gram) + (1 - beta2) * (grad.mT @ (grad @ old))
        basis = torch.linalg.qr(power).Q
        low, turn = grad @ basis, old.mT @ basis
        state["gram"] = beta2 * (turn.mT @ gram @ turn) + (1 - beta2) * (low.mT @ low)
        state["basis"] = basis

        v.mul_(beta2).addcmul_(low, low, value=1 - beta2)
        low_m = m @ basis
        scale = (v / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        leading = (low_m / (1 - beta1 ** state["step"]) / scale) @ basis.mT
        rest = _unit_rms(newton_schulz(m - low_m @ basis.mT), group["eps"])
        return _unit_rms(leading.add_(rest, alpha=group["gamma"]), group["eps"])


def newton_schulz(matrix: Tensor, steps: int = 5) -> Tensor:
    """Bring all singular values near one, by the quintic iteration of https://kellerjordan.github.io/posts/muon."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.mT if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def _unit_rms(matrix: Tensor, eps: float) -> Tensor:
    rms: Tensor = matrix.norm() / matrix.numel() ** 0.5
    return matrix / (rms + eps)


def cosmos(model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
    matrices = [part.param for part in parts(model) if part.role == "matrix"]
    others = [part.param for part in parts(model) if part.role != "matrix"]
    decay = settings.weight_decay
    return chained(
        COSMOS(matrices, lr=LR_RATIO * lr, betas=(settings.betas[0], BETA2), weight_decay=decay) if matrices else None,
        torch.optim.AdamW(others, lr=lr, betas=settings.betas, weight_decay=decay, fused=True) if others else None,
    )


METHODS = (
    Method(
        "cosmos",
        "COSMOS",
        cosmos,
        # Updates of hidden matrices have the RMS 0.1 lr, AdamW's about 0.2 lr (torch.optim.Muon, match_rms_adamw).
        lr_factors=(1.0, 2.0, 4.0),
        note="our code, after the paper; embeddings, heads, convolutions and vectors by AdamW32",
    ),
)

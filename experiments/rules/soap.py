"""SOAP: AdamW in the eigenbasis of Shampoo's covariances (https://arxiv.org/abs/2409.11321), and two variants."""

from __future__ import annotations

import torch
from torch import Tensor

FLOOR = 1e-30


class Soap:
    """State and update of one matrix.

    The first step moves: the bases come from the first gradient before it is used. Bases are refreshed by one QR
    iteration after an update.

    Args:
        weight: the matrix.
        sides: ``"both"``, or ``"short"`` for the shorter side only.
        kl: estimate covariances with the other side's eigenvalues divided out (KL-SOAP).
        betas: decay of m, of v and of the covariances.
        every: steps between refreshes.
    """

    def __init__(
        self, weight: Tensor, sides: str, kl: bool, betas: tuple[float, float] = (0.95, 0.95), every: int = 10
    ) -> None:
        rows, cols = weight.shape
        self.use = (True, True) if sides == "both" else (rows <= cols, rows > cols)
        self.kl, self.betas, self.every, self.age = kl, betas, every, 0
        self.m, self.v = torch.zeros_like(weight), torch.zeros_like(weight)
        self.covariances: list[Tensor | None] = [None, None]
        self.bases: list[Tensor | None] = [None, None]

    @property
    def elements(self) -> int:
        """Elements of state."""
        kept = [self.m, self.v, *self.covariances, *self.bases]
        return sum(each.numel() for each in kept if each is not None)

    def update(self, grad: Tensor) -> Tensor:
        """Return the update, about as long as AdamW's."""
        beta1, beta2 = self.betas
        self.age += 1
        if self.age == 1:
            self._begin(grad)
        else:
            self._accumulate(grad, beta2)
        self.m.lerp_(grad, 1 - beta1)
        turned = self._turned(grad)
        self.v.lerp_(turned.square(), 1 - beta2)
        m = self._turned(self.m) / (1 - beta1**self.age)
        v = self.v / (1 - beta2**self.age)
        update = self._back(m / (v.sqrt() + 1e-8 * v.max().sqrt() + FLOOR))
        if self.age % self.every == 0:
            self._refresh()
        return update

    def _begin(self, grad: Tensor) -> None:
        for side in (0, 1):
            if self.use[side]:
                self.covariances[side] = self._square(grad, side)
                self.bases[side] = torch.linalg.eigh(self.covariances[side])[1].flip(-1)

    def _accumulate(self, grad: Tensor, keep: float) -> None:
        found = [self._square(self._whitened(grad, 1 - side), side) if self.use[side] else None for side in (0, 1)]
        for covariance, new in zip(self.covariances, found):
            if covariance is not None and new is not None:
                covariance.lerp_(new, 1 - keep)

    def _whitened(self, grad: Tensor, side: int) -> Tensor:
        """Return the gradient times the inverse root of one side's covariance."""
        basis, covariance = self.bases[side], self.covariances[side]
        if not self.kl or basis is None or covariance is None:
            return grad
        values = ((covariance @ basis) * basis).sum(0)
        scale = values.clamp(min=1e-8 * float(values.max()) + FLOOR).rsqrt() * values.mean().clamp(min=FLOOR).sqrt()
        root = (basis * scale) @ basis.T
        return root @ grad if side == 0 else grad @ root

    @staticmethod
    def _square(grad: Tensor, side: int) -> Tensor:
        return grad @ grad.T if side == 0 else grad.T @ grad

    def _turned(self, x: Tensor) -> Tensor:
        left, right = self.bases
        x = x if left is None else left.T @ x
        return x if right is None else x @ right

    def _back(self, x: Tensor) -> Tensor:
        left, right = self.bases
        x = x if left is None else left @ x
        return x if right is None else x @ right.T

    def _refresh(self) -> None:
        for side in (0, 1):
            basis, covariance = self.bases[side], self.covariances[side]
            if basis is None or covariance is None:
                continue
            order = ((covariance @ basis) * basis).sum(0).argsort(descending=True)
            self.v = self.v.index_select(side, order)  # the second moments move with their directions
            self.bases[side] = torch.linalg.qr(covariance @ basis[:, order])[0]

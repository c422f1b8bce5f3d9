"""Where a parameter lives. Everything that differs between a whole tensor and a shard of one is asked here."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Place(Protocol):
    """One parameter's place. ``rows`` counts from ``first_row`` on in dim 0 of the global shape; ``None``: all."""

    first_row: int
    rows: int | None

    def local(self, tensor: Tensor) -> Tensor:
        """A parameter or its gradient as kernels see it: this rank's rows, real-valued, with at least one dim."""

    def numel(self, local: Tensor) -> int:
        """Elements of the whole parameter."""

    def sum(self, partial: Tensor) -> Tensor:
        """A sum over this rank's rows becomes the sum over all."""

    def gather(self, local: Tensor) -> Tensor:
        """From this rank's rows of a direction to the whole of it, for a mechanism that needs whole matrices."""

    def scatter(self, whole: Tensor) -> Tensor:
        """And back to this rank's rows."""

    def wrap(self, buffer: Tensor) -> Tensor:
        """A state buffer as a checkpoint sees it."""


class Whole:
    """All of a parameter is here."""

    first_row = 0
    rows: int | None = None

    def local(self, tensor: Tensor) -> Tensor:
        return real_view(tensor)

    def numel(self, local: Tensor) -> int:
        return local.numel()

    def sum(self, partial: Tensor) -> Tensor:
        return partial

    def gather(self, local: Tensor) -> Tensor:
        return local

    def scatter(self, whole: Tensor) -> Tensor:
        return whole

    def wrap(self, buffer: Tensor) -> Tensor:
        return buffer


class Negated(Whole):
    """All of a parameter is here, but its memory has the opposite sign: only torch's operations know that."""


WHOLE = Whole()


def place_of(param: Tensor, name: str) -> Place:
    """Where a parameter lives; an error where that is nowhere we can follow."""
    if hasattr(param, "to_local"):
        raise NotImplementedError(
            f"parameter {name!r} is a DTensor. Sharded training is not supported yet; plain local state would be "
            "silently wrong. Use DistributedDataParallel, or one process."
        )
    if param.dtype is torch.float64 or param.dtype is torch.complex128:
        raise TypeError(
            f"parameter {name!r} is {param.dtype}, whose range is lost in fp32 state: gradients beyond 1e19 would "
            "overflow it. Convert the model with model.float(), or give this parameter to torch.optim.AdamW."
        )
    return Negated() if param.is_neg() else WHOLE


def real_view(tensor: Tensor) -> Tensor:
    """Real-valued and with at least one dim, sharing memory; a conjugate view is resolved into a copy first."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor if tensor.dim() else tensor.view(1)

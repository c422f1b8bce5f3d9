"""Where a parameter lives. Everything that differs between a whole tensor and a shard of one is asked here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from baoc.core.sharding import Ranks, Shard, is_sharded, local, shard_of
from baoc.core.spec import Buffer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Place(Protocol):
    """One parameter's place. ``rows`` counts from ``first_row`` on in dim 0 of the global shape; ``None``: all."""

    first_row: int
    rows: int | None
    ranks: Ranks | None  # that have the other rows

    def local(self, tensor: Tensor) -> Tensor:
        """A parameter or its gradient as kernels see it: this rank's rows, real-valued, with at least one dim."""

    def numel(self, local: Tensor) -> int:
        """Elements of the whole parameter."""

    def sum(self, partial: Tensor) -> Tensor:
        """A sum over this rank's rows becomes the sum over all. Every rank must ask, even one without rows."""

    def wrap(self, local: Tensor, buffer: Buffer) -> Tensor:
        """A state buffer as a checkpoint sees it."""

    def unwrap(self, tensor: Tensor, buffer: Buffer) -> Tensor:
        """And back, from a checkpoint of one process or of many, where its shape is right; else it is as it was."""

    def held(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A parameter's state as kernels see it, sharing memory with it."""


class Whole:
    """All of a parameter is here."""

    first_row = 0
    rows: int | None = None
    ranks: Ranks | None = None

    def local(self, tensor: Tensor) -> Tensor:
        return real_view(tensor)

    def numel(self, local: Tensor) -> int:
        return local.numel()

    def sum(self, partial: Tensor) -> Tensor:
        return partial

    def wrap(self, local: Tensor, buffer: Buffer) -> Tensor:
        return local

    def unwrap(self, tensor: Tensor, buffer: Buffer) -> Tensor:
        return cast("DTensor", tensor).full_tensor() if is_sharded(tensor) else tensor

    def held(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return state


class Slice(Whole):
    """Some rows of a parameter that is all here."""

    def __init__(self, first_row: int, rows: int) -> None:
        self.first_row, self.rows = first_row, rows


class Negated(Whole):
    """All of a parameter is here, but its memory has the opposite sign: only torch's operations know that."""


class Sharded:
    """Some rows of a parameter are here, or none: see :func:`torch.distributed.fsdp.fully_shard`."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.ranks: Ranks | None = shard.ranks
        self.first_row = shard.rows.start
        self.rows: int | None = shard.rows.stop - shard.rows.start

    def local(self, tensor: Tensor) -> Tensor:
        return real_view(self._shard.local(tensor))

    def numel(self, local: Tensor) -> int:
        return math.prod(self._shard.shape)

    def sum(self, partial: Tensor) -> Tensor:
        return self._shard.ranks.sum(partial)

    def wrap(self, local: Tensor, buffer: Buffer) -> Tensor:
        return self._shard.wrap(local, buffer.by_rows)

    def unwrap(self, tensor: Tensor, buffer: Buffer) -> Tensor:
        if is_sharded(tensor):
            return local(tensor)
        is_whole = buffer.by_rows and tensor.dim() > 0 and tensor.shape[0] == self._shard.shape[0]
        return tensor[self._shard.rows].clone() if is_whole else tensor

    def held(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        return {key: local(value) if isinstance(value, Tensor) else value for key, value in state.items()}


WHOLE = Whole()
HOST = torch.device("cpu")


def has_own_memory(device: torch.device) -> bool:
    """Whether what is on a device is not in the host's memory."""
    return device.type != HOST.type


def place_of(param: Tensor, name: str) -> Place:
    """Where a parameter lives; an error where that is nowhere we can follow."""
    if param.dtype is torch.float64 or param.dtype is torch.complex128:
        raise TypeError(
            f"parameter {name!r} is {param.dtype}, whose range is lost in fp32 state: gradients beyond 1e19 would "
            "overflow it. Convert the model with model.float(), or give this parameter to torch.optim.AdamW."
        )
    shard = shard_of(param, name)
    if shard is not None:
        return Sharded(shard)
    return Negated() if param.is_neg() else WHOLE


def real_view(tensor: Tensor) -> Tensor:
    """Real-valued and with at least one dim, sharing memory; a conjugate view is resolved into a copy first."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor if tensor.dim() else tensor.view(1)

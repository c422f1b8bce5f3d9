"""Where a parameter lives: whole on a device, or as rows that ``fully_shard`` spreads over ranks.

All communication goes through :class:`Ranks`, and every rank must make the same calls in the same order. So the
decision to communicate may depend on global shapes and on plans, but never on the rows of one rank. Everything that
differs between a whole tensor and a shard of one is asked of its :class:`Place`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from baoc.core.spec import Buffer, Shape, real_shape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Ranks:
    """The ranks that together hold the rows of one tensor.

    Args:
        group: their process group.
        rank: this rank's index in the group.
        size: how many there are.
    """

    group: Any  # a ProcessGroup
    rank: int
    size: int

    def sum(self, partial: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place.

        Args:
            partial: this rank's part.

        Returns:
            The same tensor. It has the same bits on every rank.
        """
        dist.all_reduce(partial, group=self.group)
        return partial

    def exchange(self, sent: Tensor, sizes: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send each rank its part of a flat tensor, and receive this rank's part from each.

        Args:
            sent: the parts for all ranks, one after the other.
            sizes: elements for each rank.
            received: elements from each rank.

        Returns:
            The received parts, one after the other.
        """
        into = sent.new_empty(sum(received))
        dist.all_to_all_single(into, sent, list(received), list(sizes), group=self.group)
        return into

    def rows(self, height: int, rank: int | None = None) -> slice:
        """Return which rows of a tensor a rank holds. FSDP2 cuts as ``torch.chunk`` does.

        Args:
            height: rows of the whole tensor.
            rank: the rank; this one by default.

        Returns:
            The rows.

        Example:
            >>> three = Ranks(None, rank=2, size=3)
            >>> [three.rows(7, rank) for rank in range(3)], three.rows(2)
            ([slice(0, 3, None), slice(3, 6, None), slice(6, 7, None)], slice(2, 2, None))
        """
        each, rank = rows_per_rank(height, self.size), self.rank if rank is None else rank
        return slice(min(rank * each, height), min((rank + 1) * each, height))


@dataclass(frozen=True)
class Shard:
    """The rows of one tensor on this rank.

    Args:
        ranks: the ranks that hold the tensor.
        mesh: the tensor's device mesh.
        shape: global shape of the tensor, as layouts see it.
        rows: this rank's rows.
    """

    ranks: Ranks
    mesh: DeviceMesh
    shape: Shape
    rows: slice

    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of the tensor, or of its gradient."""
        return cast("DTensor", tensor).to_local()

    def wrap(self, local: Tensor, by_rows: bool) -> Tensor:
        """Wrap a state tensor as the DTensor that a checkpoint stores.

        Args:
            local: this rank's part of the state.
            by_rows: the state is sharded with the parameter's rows. Otherwise every rank holds all of it.

        Returns:
            A DTensor on the parameter's mesh.
        """
        from torch.distributed.tensor import DTensor, Replicate
        from torch.distributed.tensor import Shard as OnDim

        shape = torch.Size((self.shape[0], *local.shape[1:]) if by_rows else local.shape)
        placements = [Replicate()] * (self.mesh.ndim - 1) + [OnDim(0) if by_rows else Replicate()]
        stride = torch.empty(shape, dtype=local.dtype, device="meta").stride()
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=shape, stride=stride)


def rows_per_rank(height: int, ranks: int) -> int:
    """Return how many rows the first rank holds. No rank holds more.

    Args:
        height: rows of the whole tensor.
        ranks: how many ranks share them.

    Returns:
        The number of rows.
    """
    return -(-height // ranks)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


def shard_of(tensor: Tensor, name: str = "") -> Shard | None:
    """Return which rows of a tensor are on this rank.

    Args:
        tensor: a parameter.
        name: its name, for errors.

    Returns:
        The shard, or ``None`` for a plain tensor.

    Raises:
        NotImplementedError: if the tensor is distributed in another way than by ``fully_shard``.
    """
    if not is_sharded(tensor):
        return None
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as OnDim

    mesh, placements = cast("DTensor", tensor).device_mesh, cast("DTensor", tensor).placements
    *before, last = placements
    is_by_rows = type(last) is OnDim and last.dim == 0 and mesh.ndim <= 2
    if not is_by_rows or not all(isinstance(placement, Replicate) for placement in before):
        raise NotImplementedError(
            f"parameter {name!r} is a DTensor with placements {tuple(placements)} on a mesh of {mesh.ndim} dims. baoc "
            "supports fully_shard on a mesh of one dim (shard) or two dims (replicate, shard), which shards dim 0. Use "
            "no tensor parallelism and no shard_placement_fn, or give this parameter to another optimizer."
        )
    dim = mesh.ndim - 1
    ranks = Ranks(mesh.get_group(dim), mesh.get_local_rank(dim), mesh.size(dim))
    rows = ranks.rows(tensor.shape[0])
    held = cast("DTensor", tensor).to_local().shape[0]
    if held != rows.stop - rows.start:
        raise NotImplementedError(
            f"rank {ranks.rank} of {ranks.size} has {held} of {tensor.shape[0]} rows of parameter {name!r}, but "
            f"fully_shard would give it {rows.stop - rows.start}. Shard the model with fully_shard."
        )
    return Shard(ranks, mesh, real_shape(tensor), rows)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or a plain tensor as it is."""
    return cast("DTensor", tensor).to_local() if is_sharded(tensor) else tensor


@torch.no_grad()
def first_rows(tensor: Tensor, rows: int, cols: int) -> Tensor:
    """Return the upper left corner of a tensor seen as a matrix of its rows, the same on every rank.

    Args:
        tensor: the tensor, sharded or not.
        rows: the most rows.
        cols: the most columns.

    Returns:
        The corner in fp32, shape ``(rows, cols)`` or less.

    Example:
        >>> first_rows(torch.arange(12, dtype=torch.float32, device="cpu").view(3, 2, 2), 2, 3)
        tensor([[0., 1., 2.],
                [4., 5., 6.]])
    """
    shard, held = shard_of(tensor), local(tensor.detach())
    flat = held.reshape(held.shape[0], math.prod(held.shape[1:])) if held.dim() else held.view(1, 1)
    if shard is None:
        return flat[:rows, :cols].float()
    height = min(rows, shard.shape[0])
    mine = slice(min(shard.rows.start, height), min(shard.rows.stop, height))
    corner = torch.zeros(height, min(cols, flat.shape[1]), dtype=torch.float32, device=flat.device)
    corner[mine] = flat[: mine.stop - mine.start, :cols].float()
    return shard.ranks.sum(corner)


# ---- places ----


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

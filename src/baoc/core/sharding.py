"""Tensors whose rows are spread over ranks by ``fully_shard``: which rows are on this rank, and how to reach others.

All communication goes through :class:`Ranks`, and every rank must make the same calls in the same order. So the
decision to communicate may depend on global shapes and on plans, but never on the rows of one rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from baoc.core.spec import Shape, real_shape

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

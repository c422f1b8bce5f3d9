"""Tensors whose rows are spread over ranks, as ``fully_shard`` leaves them: which are here, and who has the others.

Everything that is sent between ranks goes through :class:`Ranks`, and every rank must ask for it in the same order. So
what decides whether something is sent may depend on global shapes and on plans, never on the rows that are here.
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
    """Those that hold the rows of one tensor between them."""

    group: Any  # a ProcessGroup
    rank: int
    size: int

    def sum(self, partial: Tensor) -> Tensor:
        """Added up over all ranks, in place: the same bits on each of them."""
        dist.all_reduce(partial, group=self.group)
        return partial

    def exchange(self, sent: Tensor, sizes: Sequence[int], received: Sequence[int]) -> Tensor:
        """Elements of a flat tensor, so many for each rank; those that each had for this one, one after the other."""
        into = sent.new_empty(sum(received))
        dist.all_to_all_single(into, sent, list(received), list(sizes), group=self.group)
        return into

    def rows(self, height: int, rank: int | None = None) -> slice:
        """Which of ``height`` rows a rank has, by default this one: FSDP2 cuts as ``torch.chunk`` does.

        >>> three = Ranks(None, rank=2, size=3)
        >>> [three.rows(7, rank) for rank in range(3)], three.rows(2)
        ([slice(0, 3, None), slice(3, 6, None), slice(6, 7, None)], slice(2, 2, None))
        """
        each, rank = fullest(height, self.size), self.rank if rank is None else rank
        return slice(min(rank * each, height), min((rank + 1) * each, height))


@dataclass(frozen=True)
class Shard:
    """The rows of one tensor that are on this rank."""

    ranks: Ranks
    mesh: DeviceMesh
    shape: Shape  # of the whole tensor, as layouts see it
    rows: slice

    def local(self, tensor: Tensor) -> Tensor:
        """These rows of the tensor, or of its gradient."""
        return cast("DTensor", tensor).to_local()

    def wrap(self, local: Tensor, by_rows: bool) -> Tensor:
        """A tensor beside this one, as a checkpoint sees it: cut between the same rows, or whole on every rank."""
        from torch.distributed.tensor import DTensor, Replicate
        from torch.distributed.tensor import Shard as OnDim

        shape = torch.Size((self.shape[0], *local.shape[1:]) if by_rows else local.shape)
        placements = [Replicate()] * (self.mesh.ndim - 1) + [OnDim(0) if by_rows else Replicate()]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=shape, stride=stride)


def fullest(height: int, ranks: int) -> int:
    """How many of ``height`` rows the rank has that has the most: the first."""
    return -(-height // ranks)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


def shard_of(tensor: Tensor, name: str = "") -> Shard | None:
    """Which rows of a tensor are here; ``None`` if it is a plain one. Raises where it is cut in another way."""
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
            "follows fully_shard on a mesh of one dim, and on one of two (replicate, shard): rows of dim 0 on each "
            "rank. Without tensor parallelism and without a shard_placement_fn it will be so; or give this parameter "
            "to another optimizer."
        )
    dim = mesh.ndim - 1
    ranks = Ranks(mesh.get_group(dim), mesh.get_local_rank(dim), mesh.size(dim))
    rows = ranks.rows(tensor.shape[0])
    held = cast("DTensor", tensor).to_local().shape[0]
    if held != rows.stop - rows.start:
        raise NotImplementedError(
            f"rank {ranks.rank} of {ranks.size} has {held} rows of parameter {name!r}, which has {tensor.shape[0]}: "
            f"fully_shard would give it {rows.stop - rows.start}. Shard the model with fully_shard."
        )
    return Shard(ranks, mesh, real_shape(tensor), rows)


def local(tensor: Tensor) -> Tensor:
    """What is here of a tensor, whether it is a DTensor or a plain one."""
    return cast("DTensor", tensor).to_local() if is_sharded(tensor) else tensor


@torch.no_grad()
def first_rows(tensor: Tensor, rows: int, cols: int) -> Tensor:
    """The upper left corner of a tensor seen as a matrix of its rows: so many rows and columns, the same on every rank.

    >>> first_rows(torch.arange(12.0).view(3, 2, 2), 2, 3)
    tensor([[0., 1., 2.],
            [4., 5., 6.]])
    """
    shard, held = shard_of(tensor), local(tensor.detach())
    flat = held.reshape(held.shape[0], math.prod(held.shape[1:])) if held.dim() else held.view(1, 1)
    if shard is None:
        return flat[:rows, :cols].float()
    height = min(rows, shard.shape[0])
    mine = slice(min(shard.rows.start, height), min(shard.rows.stop, height))
    corner = torch.zeros(height, min(cols, flat.shape[1]), device=flat.device)
    corner[mine] = flat[: mine.stop - mine.start, :cols].float()
    return shard.ranks.sum(corner)

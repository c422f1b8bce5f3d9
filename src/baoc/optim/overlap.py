"""Parameters that share memory: kernels update several parameters at once, so these would race."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baoc.core.sharding import local
from baoc.optim.place import HOST
from baoc.optim.state import PLAIN


class _Extent(NamedTuple):
    device: str
    first: int  # address of the first byte
    end: int  # address after the last one
    name: str
    tensor: Tensor

    @property
    def is_dense(self) -> bool:
        return self.tensor.numel() * self.tensor.element_size() == self.end - self.first


def refuse_shared_memory(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if two parameters have an element in common. Disjoint views of one buffer pass, interleaved ones too.

    Args:
        named: names and parameters. Tensor subclasses other than DTensors may have their numbers anywhere: they pass.

    Raises:
        ValueError: names the two parameters.

    Example:
        >>> buffer = torch.zeros(150)
        >>> refuse_shared_memory([("a", buffer[0:100]), ("b", buffer[100:150])])
        >>> refuse_shared_memory([("a", buffer[0:100]), ("b", buffer[50:150])])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: parameters 'a' and 'b' share memory, so a step would update it twice. ...
    """
    extents = sorted(extent for name, param in named if (extent := _extent(name, local(param.detach()))) is not None)
    together: list[_Extent] = []
    for extent in extents:
        if together and (extent.device != together[0].device or extent.first >= max(each.end for each in together)):
            _check(together)
            together = []
        together.append(extent)
    _check(together)


def _extent(name: str, tensor: Tensor) -> _Extent | None:
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or not tensor.numel() or not tensor.data_ptr():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    first = tensor.data_ptr()
    return _Extent(str(tensor.device), first, first + (last + 1) * tensor.element_size(), name, tensor)


def _check(extents: Sequence[_Extent]) -> None:
    """Check tensors whose extents overlap, from the first on without a gap. Exact: every byte has one owner."""
    if len(extents) < 2:
        return
    for one, other in itertools.pairwise(extents):  # spares the map where it is large
        if one.is_dense and other.is_dense and other.first < one.end:
            _refuse(one, other)
    start = extents[0].first
    owner = torch.zeros(max(each.end for each in extents) - start, dtype=torch.int32, device=HOST)
    for index, each in enumerate(extents):
        width = each.tensor.element_size()
        shape = (*each.tensor.shape, width)
        mine = owner.as_strided(shape, (*(stride * width for stride in each.tensor.stride()), 1), each.first - start)
        if found := int(mine.max()):
            _refuse(extents[found - 1], each)
        mine.fill_(index + 1)


def _refuse(one: _Extent, other: _Extent) -> None:
    raise ValueError(
        f"parameters {one.name!r} and {other.name!r} share memory, so a step would update it twice. To tie weights, "
        "use one nn.Parameter in both places. Otherwise give each parameter its own memory with .clone()."
    )

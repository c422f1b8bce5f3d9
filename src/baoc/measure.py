"""Counting what is really there."""

from __future__ import annotations

import torch
from torch import Tensor


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of every tensor an optimizer holds in its state, each storage once. Works for any optimizer.

    >>> weight = torch.nn.Parameter(torch.zeros(100, 100))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> weight.grad = torch.ones_like(weight)
    >>> optimizer.step()
    >>> state_bytes(optimizer)
    40000
    """
    storages: dict[int, int] = {}
    pending: list[object] = list(optimizer.state.values())
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            storage = _local(value).untyped_storage()
            storages[storage.data_ptr() or id(value)] = storage.nbytes()
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
    return sum(storages.values())


def _local(tensor: Tensor) -> Tensor:
    """A distributed tensor's part on this rank."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor

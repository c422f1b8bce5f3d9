"""Counting what is really there."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of every tensor an optimizer holds in its state, each storage once. Works for any optimizer.

    A view counts with all that it keeps alive. Tensor subclasses and objects in the state are looked into.

    >>> weight = torch.nn.Parameter(torch.zeros(100, 100))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> weight.grad = torch.ones_like(weight)
    >>> optimizer.step()
    >>> state_bytes(optimizer)
    40000
    """
    return held_bytes(optimizer.state.values())


def held_bytes(values: Iterable[object]) -> int:
    """The same, of all tensors in some values."""
    storages: dict[int, int] = {}
    pending = list(values)
    seen: dict[int, object] = {}  # keeps what it has seen alive, so that no id comes twice
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            tensor = _local(value)
            if is_traceable_wrapper_subclass(tensor):  # torchao's codes, scales and tables
                pending.extend(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            else:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr() or id(value)] = storage.nbytes()
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
        elif hasattr(value, "__dict__") and not isinstance(value, type):  # GaLore's projectors
            pending.extend(vars(value).values())
    return sum(storages.values())


def _local(tensor: Tensor) -> Tensor:
    """A distributed tensor's part on this rank."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor

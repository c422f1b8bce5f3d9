"""Peak of tensor memory, counted from real storages."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Within the context, the largest number of bytes alive in the given tensors and in those that operations make."""

    def __init__(self, held: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.peak = 0
        self._live = 0
        self._tracked: set[int] = set()
        for tensor in held:
            self._track(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _key(leaf) not in inputs:
                self._track(leaf)
        return result

    def _track(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._tracked:
            return
        self._tracked.add(key)
        self._live += storage.nbytes()
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._release, key, storage.nbytes())

    def _release(self, key: int, size: int) -> None:
        self._tracked.discard(key)
        self._live -= size


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata

"""What a training step keeps for its backward pass, counted in a forward pass on the meta device.

The model of activations: every tensor that autograd saves counts once, by its storage, and parameters and buffers do
not. Attention is taken to keep what flash attention keeps: queries, keys, values, the output, and one fp32 number for
each query and head. With checkpointing, of every layer only its inputs stay, and one layer at a time is made again.
`docs/fit.md` has the formula that this gives for a transformer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Activations:
    """Bytes of one step. What is not in a layer is in ``outside``: embeddings, the head and the loss."""

    outside: int
    layers: tuple[int, ...]  # what each saves besides its inputs
    inputs: tuple[int, ...]  # of each layer
    saved_inputs: int  # of all of them, those that autograd saves: a norm that computes in fp32 saves its own copy
    largest_outside: int  # tensor
    largest_inside: int

    def saved(self, *, checkpointing: bool = False) -> int:
        """What is held when the backward pass begins."""
        return self.outside + (sum(self.inputs) if checkpointing else sum(self.layers) + self.saved_inputs)

    def peak(self, *, checkpointing: bool = False) -> int:
        """The most that is held: a gradient as large as the largest tensor comes to what is saved.

        With checkpointing that is either at the loss, or in the largest layer, when the loss is done with.
        """
        at_loss = self.saved(checkpointing=checkpointing) + max(self.largest_outside, self.largest_inside)
        if not checkpointing:
            return at_loss
        in_layer = sum(self.inputs) + max(self.layers, default=0) + self.largest_inside
        return max(self.saved(checkpointing=True) + self.largest_outside, in_layer)


def trace(model: nn.Module, forward: Callable[[], Any]) -> Activations:
    """What ``forward()``, a call of the model, saves; the model is on the meta device, so nothing is computed.

    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    ...     found = trace(model, lambda: model(torch.zeros(8, 64)))
    >>> found.saved() == 4 * 8 * (64 + 256 + 256)  # the input, and what goes into and out of the GELU
    True
    """
    count = _Count(model)
    with count.watching(), _AsOnAGPU(), torch.enable_grad():
        forward()
    return count.activations()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """What is checkpointed, and gathered under FSDP, as one: the members of the outermost lists of modules.

    >>> len(layers_of(nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "head": nn.ReLU()})))
    2
    """
    if isinstance(model, nn.ModuleList):
        return [layer for layer in model if any(True for _ in layer.parameters())]
    return [layer for child in model.children() for layer in layers_of(child)]


class _Count:
    """Distinct storages, each with the layer in which it was saved first."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = layers_of(model)
        self._not_counted = {_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._saved: dict[int, tuple[int, int | None]] = {}  # storage -> bytes, layer
        self._inputs: dict[int, tuple[int, int]] = {}
        self._kept: list[Tensor] = []  # a storage that is freed could have its key given to another
        self._layer: int | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        hooks = []
        for index, layer in enumerate(self._layers):
            hooks.append(layer.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True))
            hooks.append(layer.register_forward_hook(self._leave))
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._layer = index
        for value in _tensors((args, *kwargs.values())):
            if value.requires_grad:
                self._kept.append(value)
                self._inputs.setdefault(_key(value), (_nbytes(value), index))

    def _leave(self, *_: object) -> None:
        self._layer = None

    def _save(self, tensor: Tensor) -> Tensor:
        if _key(tensor) not in self._not_counted:
            self._kept.append(tensor)
            self._saved.setdefault(_key(tensor), (_nbytes(tensor), self._layer))
        return tensor

    def activations(self) -> Activations:
        own = {key: value for key, value in self._saved.items() if key not in self._inputs}
        outside = [nbytes for nbytes, layer in own.values() if layer is None]
        inside = [nbytes for nbytes, layer in own.values() if layer is not None]
        return Activations(
            sum(outside),
            tuple(_per_layer(own.values(), len(self._layers))),
            tuple(_per_layer(self._inputs.values(), len(self._layers))),
            sum(nbytes for key, (nbytes, _) in self._inputs.items() if key in self._saved),
            max(outside, default=0),
            max(inside, default=0),
        )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _per_layer(found: Iterable[tuple[int, int | None]], layers: int) -> list[int]:
    totals = [0] * layers
    for nbytes, layer in found:
        if layer is not None:
            totals[layer] += nbytes
    return totals


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _nbytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


class _AsOnAGPU(TorchFunctionMode):
    """Attention keeps what flash attention keeps, and models that look into their data find nothing unusual."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        if func is Tensor.__bool__ and args[0].is_meta:
            return True  # "is all of it within the mask?"
        return func(*args, **(kwargs or {}))


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    out: Tensor = _FlashAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out


class _FlashAttention(torch.autograd.Function):
    """Its shapes and what it saves; it is never run on data."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        *batch, heads, length, _ = query.shape
        # (..., length, heads, width) in memory, as the kernels write it
        out = query.new_empty(*batch, length, heads, value.shape[-1]).transpose(-3, -2)
        sums = torch.empty(*batch, heads, length, dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

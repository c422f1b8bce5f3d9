"""Count the activations of a training step in a forward pass on the meta device.

Every tensor that autograd saves counts once, by its storage. Parameters and buffers do not count. Attention saves what
flash attention saves: queries, keys, values, the output, and one fp32 number for each query and head. With
checkpointing, only the inputs of each layer stay, and one layer at a time is recomputed. `docs/fit.md` has the
resulting formula for a transformer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from baoc.tools.models import ViT

LENGTH = 1024
"""Default number of tokens of a sequence."""


@dataclass(frozen=True)
class Activations:
    """Bytes of activations of one training step.

    Attributes:
        outside: Saved outside of layers: embeddings, the head and the loss.
        layers: Saved by each layer, without its inputs.
        inputs: Size of the inputs of each layer.
        saved_inputs: The inputs that autograd saves. A norm that computes in fp32 saves its own copy instead.
        largest_outside: Largest tensor outside of layers.
        largest_inside: Largest tensor inside of a layer.
    """

    outside: int
    layers: tuple[int, ...]
    inputs: tuple[int, ...]
    saved_inputs: int
    largest_outside: int
    largest_inside: int

    def saved(self, *, checkpointing: bool = False) -> int:
        """Return the bytes that are allocated when the backward pass starts."""
        return self.outside + (sum(self.inputs) if checkpointing else sum(self.layers) + self.saved_inputs)

    def peak(self, *, checkpointing: bool = False) -> int:
        """Return the peak: what is saved, and a gradient as large as the largest tensor.

        With checkpointing, the peak is either at the loss or in the largest layer after the loss.
        """
        at_loss = self.saved(checkpointing=checkpointing) + max(self.largest_outside, self.largest_inside)
        if not checkpointing:
            return at_loss
        in_layer = sum(self.inputs) + max(self.layers, default=0) + self.largest_inside
        return max(self.saved(checkpointing=True) + self.largest_outside, in_layer)


def trace(model: nn.Module, forward: Callable[[], Any]) -> Activations:
    """Count what a forward pass saves for the backward pass.

    Args:
        model: A model on the meta device, so that nothing is computed.
        forward: A function that calls the model once.

    Returns:
        The activations.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        ...     found = trace(model, lambda: model(torch.zeros(8, 64)))
        >>> found.saved() == 4 * 8 * (64 + 256 + 256)  # the input of the model, the input and output of the GELU
        True
    """
    count = _Count(model)
    with count.watching(), _LikeGPU(), torch.enable_grad():
        forward()
    return count.activations()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model: the members of its outermost module lists.

    A layer is the unit of activation checkpointing and of FSDP's gathering.

    Example:
        >>> blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        >>> len(layers_of(nn.ModuleDict({"blocks": blocks, "head": nn.ReLU()})))
        2
    """
    if isinstance(model, nn.ModuleList):
        return [layer for layer in model if any(True for _ in layer.parameters())]
    return [layer for child in model.children() for layer in layers_of(child)]


class _Count:
    """Counts distinct storages, each in the layer that saved it first."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = layers_of(model)
        self._not_counted = {_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._saved: dict[int, tuple[int, int | None]] = {}  # storage -> bytes, layer
        self._inputs: dict[int, tuple[int, int]] = {}
        self._kept: list[Tensor] = []  # keep them alive: the key of a freed storage could be reused
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


class _LikeGPU(TorchFunctionMode):
    """Make attention save what flash attention saves, and make branches on tensor values work on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        if func is Tensor.__bool__ and args[0].is_meta:
            return True  # models ask whether a mask is trivial
        return func(*args, **(kwargs or {}))


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    out: Tensor = _FlashAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out


class _FlashAttention(torch.autograd.Function):
    """The shapes and saved tensors of flash attention. It computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        *batch, heads, length, _ = query.shape
        # (..., heads, length, width), stored as (..., length, heads, width) like the kernels do
        out = query.new_empty(*batch, length, heads, value.shape[-1]).transpose(-3, -2)
        sums = torch.empty(*batch, heads, length, dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, sums)
        return out


@dataclass(frozen=True)
class Step:
    """A forward pass of one batch, and the number of tokens in it."""

    forward: Callable[[], Any]
    tokens: int


def training_step(model: nn.Module, batch: int, length: int = LENGTH) -> Step | None:
    """Prepare a forward pass on the meta device, with the loss if the model computes it.

    Supports models of transformers that take tokens or images, the denoisers of diffusers, and
    :class:`~baoc.tools.models.ViT`.

    Args:
        model: A model on the meta device.
        batch: Sequences or images in the batch.
        length: Tokens of a sequence.

    Returns:
        The step, or None if the inputs of the model are not known.
    """
    names = inspect.signature(model.forward).parameters
    if "input_ids" in names:
        return _of_tokens(model, names, batch, length)
    if "pixel_values" in names or isinstance(model, ViT):
        return _of_images(model, names, batch)
    if {"sample", "timestep", "encoder_hidden_states"} <= set(names):
        return _of_latents(model, batch)
    return None


def _of_tokens(model: nn.Module, names: Any, batch: int, length: int) -> Step:
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids}
    inputs |= {name: ids for name in ("labels", "decoder_input_ids") if name in names}
    inputs |= {"use_cache": False} if "use_cache" in names else {}
    return Step(lambda: model(**inputs), batch * length)


def _of_images(model: Any, names: Any, batch: int) -> Step:
    config = getattr(model, "config", None)
    dtype = next(model.parameters()).dtype
    if config is None:  # the ViT of this package
        tokens, kernel = model.pos_embed.shape[1], model.patch_embed.proj
        size = kernel.kernel_size[0] * math.isqrt(tokens - 1)
        images = torch.zeros(batch, kernel.in_channels, size, size, dtype=dtype, device="meta")
        return Step(lambda: model(images), batch * tokens)
    size, patch, channels = config.image_size, config.patch_size, config.num_channels
    pixels = torch.zeros(batch, channels, size, size, dtype=dtype, device="meta")
    labels = {"labels": torch.zeros(batch, dtype=torch.long, device="meta")} if "labels" in names else {}
    return Step(lambda: model(pixel_values=pixels, **labels), batch * (size // patch) ** 2)


def _of_latents(model: Any, batch: int) -> Step:
    config, dtype = model.config, next(model.parameters()).dtype
    size = config.sample_size

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device="meta")

    added = {}
    if getattr(config, "addition_embed_type", None) == "text_time":  # SDXL takes a pooled text embedding and six sizes
        width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        added = {"added_cond_kwargs": {"text_embeds": zeros(batch, width), "time_ids": zeros(batch, 6)}}
    latents, text = zeros(batch, config.in_channels, size, size), zeros(batch, 77, config.cross_attention_dim)
    times = torch.zeros(batch, dtype=torch.long, device="meta")
    return Step(lambda: model(latents, times, text, **added), batch * size * size)

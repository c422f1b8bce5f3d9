"""A batch for a model that somebody else wrote: what it is called with in training, on the meta device."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from baoc.models import ViT

LENGTH = 1024
"""Tokens of a sequence, where nothing is said."""


@dataclass(frozen=True)
class Step:
    """A forward pass of a batch, ready to be called, and the tokens that one weight sees in it."""

    forward: Callable[[], Any]
    tokens: int


def training_step(model: nn.Module, batch: int, length: int = LENGTH) -> Step | None:
    """How to call the model, loss included where it computes one; ``None`` if nobody can know.

    Known are models of transformers that take tokens or images, the denoisers of diffusers, and this package's ViT.
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
    if config is None:  # this package's ViT
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
    if getattr(config, "addition_embed_type", None) == "text_time":  # SDXL: a pooled text, and six sizes
        width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        added = {"added_cond_kwargs": {"text_embeds": zeros(batch, width), "time_ids": zeros(batch, 6)}}
    latents, text = zeros(batch, config.in_channels, size, size), zeros(batch, 77, config.cross_attention_dim)
    times = torch.zeros(batch, dtype=torch.long, device="meta")
    return Step(lambda: model(latents, times, text, **added), batch * size * size)

"""The paper's six models, by name. They have its shapes and random weights; nothing is downloaded.

>>> import torch
>>> with torch.device("meta"):
...     model = MODELS["vit"]()
>>> sum(param.numel() for param in model.parameters())
10949002
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from baoc.models.packages import ModelError, optional_package
from baoc.models.vit import ViT

__all__ = ["MODELS", "ModelError", "ViT"]


def gpt2_small() -> nn.Module:
    """124M parameters, decoder only, learned positions."""
    transformers = optional_package("transformers")
    return _tied(transformers.GPT2LMHeadModel(transformers.GPT2Config()))


def t5_base() -> nn.Module:
    """223M parameters, encoder and decoder; version 1.0, with ReLU and a tied head."""
    transformers = optional_package("transformers")
    config = transformers.T5Config(d_model=768, d_ff=3072, d_kv=64, num_layers=12, num_heads=12, vocab_size=32128)
    return _tied(transformers.T5ForConditionalGeneration(config))


def llama_3_2_1b() -> nn.Module:
    """1.2B parameters, grouped-query attention, a tied head."""
    return _llama(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, head_dim=64)


def llama_3_2_3b() -> nn.Module:
    """3.2B parameters, grouped-query attention, a tied head."""
    return _llama(hidden_size=3072, num_hidden_layers=28, num_attention_heads=24, head_dim=128)


def sd15_unet() -> nn.Module:
    """The denoiser of Stable Diffusion 1.5, 860M parameters."""
    diffusers = optional_package("diffusers")
    unet: nn.Module = diffusers.UNet2DConditionModel(
        sample_size=64, cross_attention_dim=768, attention_head_dim=8, block_out_channels=(320, 640, 1280, 1280)
    )
    return unet


def vit() -> nn.Module:
    """11M parameters, for the ten classes of CIFAR-10."""
    return ViT()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2-small": gpt2_small,
    "t5-base": t5_base,
    "llama-3.2-1b": llama_3_2_1b,
    "llama-3.2-3b": llama_3_2_3b,
    "sd15-unet": sd15_unet,
    "vit": vit,
}


def _llama(**sizes: int) -> nn.Module:
    transformers = optional_package("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128256, intermediate_size=8192, num_key_value_heads=8, tie_word_embeddings=True, **sizes
    )
    return _tied(transformers.LlamaForCausalLM(config))


def _tied(model: nn.Module) -> nn.Module:
    """Make sure that tied weights are one parameter on any device, the meta device too."""
    model.tie_weights()  # type: ignore[operator]
    return model

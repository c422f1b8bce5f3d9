"""Models that people train, by name: the published shapes with random weights. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from baoc.models.packages import optional_package
from baoc.models.vit import ViT

Builder = Callable[[], nn.Module]


def _gpt2(width: int, layers: int, heads: int) -> nn.Module:
    """Decoder only, learned positions, a tied head."""
    transformers = optional_package("transformers")
    return _tied(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=heads)))


def _llama(width: int, mlp: int, layers: int, heads: int, head: int, tied: bool) -> nn.Module:
    """Llama 3: grouped-query attention with 8 key-value heads."""
    transformers = optional_package("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=head,
        tie_word_embeddings=tied,
    )
    return _tied(transformers.LlamaForCausalLM(config))


def _qwen3(width: int, mlp: int, layers: int, heads: int, tied: bool) -> nn.Module:
    """Qwen3, dense: as Llama, with norms on queries and keys."""
    transformers = optional_package("transformers")
    config = transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=tied,
    )
    return _tied(transformers.Qwen3ForCausalLM(config))


def _gemma3(width: int, mlp: int, layers: int, heads: int, kv: int, head: int, vocab: int = 262208) -> nn.Module:
    """Gemma 3's language model: of the larger ones, the part without the vision tower."""
    transformers = optional_package("transformers")
    config = transformers.Gemma3TextConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=head,
        tie_word_embeddings=True,
    )
    return _tied(transformers.Gemma3ForCausalLM(config))


def _t5(width: int, mlp: int, head: int, layers: int, heads: int) -> nn.Module:
    """Encoder and decoder; version 1.0, with ReLU and a tied head."""
    transformers = optional_package("transformers")
    config = transformers.T5Config(
        d_model=width, d_ff=mlp, d_kv=head, num_layers=layers, num_heads=heads, vocab_size=32128
    )
    return _tied(transformers.T5ForConditionalGeneration(config))


def _imagenet_vit(width: int, mlp: int, layers: int, heads: int, patch: int) -> nn.Module:
    """A ViT for images of 224 pixels and the thousand classes of ImageNet."""
    transformers = optional_package("transformers")
    config = transformers.ViTConfig(
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        patch_size=patch,
        num_labels=1000,
    )
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


def _unet(**config: object) -> nn.Module:
    """The denoiser of a Stable Diffusion."""
    model: nn.Module = optional_package("diffusers").UNet2DConditionModel(**config)
    return model


def _tied(model: nn.Module) -> nn.Module:
    """Make sure that tied weights are one parameter on any device, the meta device too."""
    model.tie_weights()  # type: ignore[operator]
    return model


_SDXL = {
    "sample_size": 128,
    "cross_attention_dim": 2048,
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": [1, 2, 10],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}

MODELS: dict[str, Builder] = {
    "gpt2-small": partial(_gpt2, 768, 12, 12),
    "gpt2-medium": partial(_gpt2, 1024, 24, 16),
    "gpt2-large": partial(_gpt2, 1280, 36, 20),
    "gpt2-xl": partial(_gpt2, 1600, 48, 25),
    "llama-3.2-1b": partial(_llama, 2048, 8192, 16, 32, 64, True),
    "llama-3.2-3b": partial(_llama, 3072, 8192, 28, 24, 128, True),
    "llama-3.1-8b": partial(_llama, 4096, 14336, 32, 32, 128, False),
    "llama-3.3-70b": partial(_llama, 8192, 28672, 80, 64, 128, False),
    "qwen3-0.6b": partial(_qwen3, 1024, 3072, 28, 16, True),
    "qwen3-1.7b": partial(_qwen3, 2048, 6144, 28, 16, True),
    "qwen3-4b": partial(_qwen3, 2560, 9728, 36, 32, True),
    "qwen3-8b": partial(_qwen3, 4096, 12288, 36, 32, False),
    "qwen3-14b": partial(_qwen3, 5120, 17408, 40, 40, False),
    "qwen3-32b": partial(_qwen3, 5120, 25600, 64, 64, False),
    "gemma-3-270m": partial(_gemma3, 640, 2048, 18, 4, 1, 256, vocab=262144),
    "gemma-3-1b": partial(_gemma3, 1152, 6912, 26, 4, 1, 256, vocab=262144),
    "gemma-3-4b": partial(_gemma3, 2560, 10240, 34, 8, 4, 256),
    "gemma-3-12b": partial(_gemma3, 3840, 15360, 48, 16, 8, 256),
    "gemma-3-27b": partial(_gemma3, 5376, 21504, 62, 32, 16, 128),
    "t5-small": partial(_t5, 512, 2048, 64, 6, 8),
    "t5-base": partial(_t5, 768, 3072, 64, 12, 12),
    "t5-large": partial(_t5, 1024, 4096, 64, 24, 16),
    "t5-3b": partial(_t5, 1024, 16384, 128, 24, 32),
    "vit": ViT,  # the paper's, for the ten classes of CIFAR-10
    "vit-base": partial(_imagenet_vit, 768, 3072, 12, 12, 16),
    "vit-large": partial(_imagenet_vit, 1024, 4096, 24, 16, 16),
    "vit-huge": partial(_imagenet_vit, 1280, 5120, 32, 16, 14),
    "sd15-unet": partial(_unet, sample_size=64, cross_attention_dim=768, attention_head_dim=8),
    "sd21-unet": partial(
        _unet,
        sample_size=64,
        cross_attention_dim=1024,
        attention_head_dim=[5, 10, 20, 20],
        use_linear_projection=True,
    ),
    "sdxl-unet": partial(_unet, **_SDXL),
}
ALIASES = {
    "gpt2": "gpt2-small",
    "llama-3-8b": "llama-3.1-8b",
    "llama-3-70b": "llama-3.3-70b",
    "llama-3.1-70b": "llama-3.3-70b",
}
"""Other names for the same shapes."""

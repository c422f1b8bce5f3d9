"""Models by name, with published shapes and random weights. Nothing is downloaded.

The ViT follows Dosovitskiy et al., An Image Is Worth 16x16 Words, https://arxiv.org/abs/2010.11929.

:data:`MODELS` contains common architectures, including the six of the paper.

>>> import torch
>>> with torch.device("meta"):
...     model = MODELS["vit"]()
>>> sum(param.numel() for param in model.parameters())
10949002
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Builder = Callable[[], nn.Module]


class ModelError(ValueError):
    """A model cannot be found or built."""


def optional_package(name: str) -> ModuleType:
    """Import a package of the extra ``models``.

    Args:
        name: The name of the package, such as "transformers".

    Returns:
        The package.

    Raises:
        ModelError: If the package is not installed. The message says how to install it.

    Example:
        >>> optional_package("json").__name__
        'json'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModelError(f"this model needs {name}, which is not installed. Run: pip install 'baoc[models]'") from None


class ViT(nn.Module):
    """Vision transformer with the shapes and parameter names of the original. The defaults are the paper's size.

    Args:
        image: Height and width of the images, in pixels.
        patch: Height and width of a patch.
        channels: Channels of an image.
        classes: Number of classes.
        dim: Width of the residual stream.
        depth: Number of transformer blocks.
        heads: Attention heads of a block.
        mlp_ratio: Hidden width of the MLP, as a multiple of ``dim``.

    Raises:
        ValueError: If ``image`` is not divisible by ``patch``, or ``dim`` by ``heads``.

    Example:
        >>> model = ViT(image=32, patch=8, classes=10, dim=48, depth=2, heads=3)
        >>> model(torch.zeros(5, 3, 32, 32)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        *,
        image: int = 32,
        patch: int = 16,
        channels: int = 3,
        classes: int = 10,
        dim: int = 384,
        depth: int = 6,
        heads: int = 6,
        mlp_ratio: int = 4,
    ) -> None:
        super().__init__()
        if image % patch:
            raise ValueError(f"image must be divisible by patch, got {image} and {patch}.")
        tokens = 1 + (image // patch) ** 2
        self.patch_embed = PatchEmbedding(channels, dim, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, mlp_ratio) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize with small random weights and zero biases, as in the original."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=1e-6)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits: (batch, channels, image, image) -> (batch, classes)."""
        patches = self.patch_embed(images)  # (batch, tokens - 1, dim)
        cls = self.cls_token.expand(len(patches), -1, -1)
        x = torch.cat([cls, patches], dim=1) + self.pos_embed  # (batch, tokens, dim)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits


class PatchEmbedding(nn.Module):
    """Split an image into patches and map each one to a token."""

    def __init__(self, channels: int, dim: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.proj(images)  # (batch, dim, rows, columns)
        return tokens.flatten(2).transpose(1, 2)


class Block(nn.Module):
    """Pre-norm transformer block: attention, then an MLP."""

    def __init__(self, dim: int, heads: int, mlp_ratio: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = MLP(dim, mlp_ratio * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Attention(nn.Module):
    """Multi-head self-attention with one fused projection for queries, keys and values."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim must be divisible by heads, got {dim} and {heads}.")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (batch, tokens, 3, heads, head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, head_dim)
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


def _gpt2(width: int, layers: int, heads: int) -> nn.Module:
    """Build a GPT-2: decoder only, learned positions, tied head."""
    transformers = optional_package("transformers")
    return _tied(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=heads)))


def _llama(width: int, mlp: int, layers: int, heads: int, head: int, tied: bool) -> nn.Module:
    """Build a Llama 3: grouped-query attention with 8 key-value heads."""
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
    """Build a dense Qwen3: Llama with norms on queries and keys."""
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
    """Build the language model of a Gemma 3, without the vision tower of the larger sizes."""
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
    """Build a T5 1.0: encoder and decoder, ReLU, tied head."""
    transformers = optional_package("transformers")
    config = transformers.T5Config(
        d_model=width, d_ff=mlp, d_kv=head, num_layers=layers, num_heads=heads, vocab_size=32128
    )
    return _tied(transformers.T5ForConditionalGeneration(config))


def _imagenet_vit(width: int, mlp: int, layers: int, heads: int, patch: int) -> nn.Module:
    """Build a ViT for images of 224 pixels and the 1000 classes of ImageNet."""
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
    """Build the denoiser of a Stable Diffusion model."""
    model: nn.Module = optional_package("diffusers").UNet2DConditionModel(**config)
    return model


def _tied(model: nn.Module) -> nn.Module:
    """Make tied weights one parameter. Models on the meta device need this call."""
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

FINE_TUNED = ("llama-", "qwen3-", "gemma-")
"""Names of models begin with these whose published weights people fine-tune."""
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
    "vit": ViT,  # the paper's model for the ten classes of CIFAR-10
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
"""Other names of models with the same shapes."""

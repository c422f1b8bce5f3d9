"""A vision transformer with the shapes and the parameter names of the original one, and nothing else.

Dosovitskiy et al., An Image Is Worth 16x16 Words, https://arxiv.org/abs/2010.11929.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ViT(nn.Module):
    """Patches and a class token in, pre-norm transformer blocks, class logits out. The defaults are the paper's size.

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
            raise ValueError(f"an image of {image} pixels does not divide into patches of {patch}.")
        tokens = 1 + (image // patch) ** 2
        self.patch_embed = PatchEmbedding(channels, dim, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, mlp_ratio) for _ in range(depth))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small random weights and zero biases, as in the original."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=1e-6)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, channels, image, image) -> (batch, classes)."""
        patches = self.patch_embed(images)  # (batch, tokens - 1, dim)
        cls = self.cls_token.expand(len(patches), -1, -1)
        x = torch.cat([cls, patches], dim=1) + self.pos_embed  # (batch, tokens, dim)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits


class PatchEmbedding(nn.Module):
    """Cut an image into patches, and map each to a token."""

    def __init__(self, channels: int, dim: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.proj(images)  # (batch, dim, rows, columns)
        return tokens.flatten(2).transpose(1, 2)


class Block(nn.Module):
    """Attention, then an MLP, each on a normed copy of the residual stream."""

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
    """Multi-head self-attention; queries, keys and values come from one fused projection."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim {dim} does not divide into {heads} heads.")
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
    """Two linear maps with a GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out

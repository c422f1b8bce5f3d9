"""A small GPT over characters, and a training loop that takes any optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from experiments.corpus import Corpus

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Size:
    width: int = 96
    depth: int = 3
    heads: int = 4
    context: int = 64
    batch: int = 16


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)  # (batch, heads, time, dim)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class TinyGPT(nn.Module):
    def __init__(self, vocabulary: int, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, time, vocabulary)
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def loss(self, window: Tensor) -> Tensor:
        """Mean cross-entropy of every next character in (batch, context + 1) windows."""
        return F.cross_entropy(self(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def cosine_with_warmup(optimizer: torch.optim.Optimizer, steps: int, warmup: int = 30) -> LambdaLR:
    """To a tenth of the lr at the end."""
    return LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
    )


def train(
    corpus: Corpus, make_optimizer: MakeOptimizer, *, seed: int, steps: int, size: Size | None = None
) -> Iterable[tuple[int, float, TinyGPT, torch.optim.Optimizer]]:
    """Train, yielding (step, training loss, model, optimizer) after every step. Runs of one seed see the same data."""
    size = size or Size()
    torch.manual_seed(seed)
    model = TinyGPT(len(corpus.vocabulary), size)
    generator = torch.Generator().manual_seed(seed)
    optimizer = make_optimizer(model)
    schedule = cosine_with_warmup(optimizer, steps)
    for step in range(1, steps + 1):
        loss = model.loss(corpus.batch(size.batch, size.context, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield step, loss.item(), model, optimizer


@torch.no_grad()
def test_loss(corpus: Corpus, model: TinyGPT) -> float:
    windows = corpus.test_windows(model.positions.num_embeddings)
    losses = [model.loss(chunk).item() * len(chunk) for chunk in windows.split(64)]
    return sum(losses) / len(windows)

"""Sequences: recurrent networks and transformers, from scratch, fine-tuned and with adapters."""

from __future__ import annotations

import argparse
import functools
import inspect
import typing
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments import corpus
from experiments.zoo.task import Problem, fitted, generator, mlp, task

TEXT = functools.cache(corpus.load)
CONTEXT = 32


class GPT(nn.Module):
    """A transformer over characters; ``mlps`` makes the network of a layer."""

    def __init__(self, vocabulary: int, width: int, layers: int, mlps: type[nn.Module] | None = None) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.layers = nn.ModuleList([Layer(width, mlps) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Layer(nn.Module):
    """Causal attention of four heads, and a network."""

    def __init__(self, width: int, mlps: type[nn.Module] | None) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.net = mlps(width) if mlps else mlp(width, 4 * width, width, activation=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.net(self.between(x))


class Experts(nn.Module):
    """Four small networks, of which each token uses the best one for it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.enter = nn.Parameter(torch.randn(4, width, 2 * width) * width**-0.5)
        self.leave = nn.Parameter(torch.randn(4, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(x).softmax(dim=-1)
        best, which = chances.max(dim=-1)
        out = torch.zeros_like(x)
        for expert in range(4):
            mine = which == expert
            out[mine] = best[mine, None] * (F.gelu(x[mine] @ self.enter[expert]) @ self.leave[expert])
        return out


def _next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _language(model: nn.Module, text: corpus.Corpus, seed: int, size: int) -> Problem:
    """Next characters of a text, in windows; the score is the loss of 200 windows of the held-out tenth."""
    windows = text.test_windows(CONTEXT)
    return fitted(
        model,
        functools.partial(_next_token, model),
        lambda random: [text.batch(size, CONTEXT, random)],
        seed,
        test=[windows[:: max(1, len(windows) // 200)]],
    )


@task(lr=3e-3, steps=240, schedule="cosine")
def char_gpt(seed: int) -> Problem:
    """A GPT of 2 layers of width 64 on the characters of Python's docs, batches of 16 x 32."""
    return _language(GPT(len(TEXT().vocabulary), 64, 2), TEXT(), seed, 16)


@task(lr=1e-3, steps=800)
def char_gpt_one_sequence(seed: int) -> Problem:
    """The same GPT with batches of one sequence, constant lr."""
    return _language(GPT(len(TEXT().vocabulary), 64, 2), TEXT(), seed, 1)


@task(lr=3e-3, steps=150, schedule="one-cycle")
def moe(seed: int) -> Problem:
    """A GPT of 2 layers of width 64 with 4 experts each, batches of 16 x 32, one-cycle."""
    return _language(GPT(len(TEXT().vocabulary), 64, 2, Experts), TEXT(), seed, 16)


class Recurrent(nn.Module):
    """An LSTM or GRU between an embedding and a head."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU], vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, 32)
        self.cell, self.head = cell(32, width, batch_first=True), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cell(self.tokens(tokens))[0])


@task(lr=1e-2, steps=300)
def lstm(seed: int) -> Problem:
    """An LSTM of width 96 on the characters of Python's docs, batches of 16 x 32."""
    return _language(Recurrent(nn.LSTM, len(TEXT().vocabulary), 96), TEXT(), seed, 16)


@task(lr=9e-3, steps=320, decades=True)
def gru_adding(seed: int) -> Problem:
    """A GRU of width 64 adds the two marked numbers of 20, batches of 64."""

    class Adder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(2, 64, batch_first=True), nn.Linear(64, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.gru(x)[0][:, -1]).squeeze(1)

    model = Adder()

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        numbers = torch.rand(64, 20, generator=random)
        marks = torch.zeros(64, 20)
        for low, high in ((0, 10), (10, 20)):
            marks[torch.arange(64), torch.randint(low, high, (64,), generator=random)] = 1
        return torch.stack([numbers, marks], dim=2), (numbers * marks).sum(dim=1)

    return fitted(model, lambda x, y: F.mse_loss(model(x), y), draw, seed)


class Seq2Seq(nn.Module):
    """An encoder and a decoder of two layers each, with one table of tokens."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(16, width) * 0.02)
        shape = {"d_model": width, "nhead": 4, "dim_feedforward": 2 * width, "dropout": 0.0}
        layer = nn.TransformerEncoderLayer(**shape, batch_first=True, norm_first=True)
        encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.body = nn.Transformer(
            **shape, num_decoder_layers=2, custom_encoder=encoder, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        enter, leave = (self.tokens(x) + self.places[: x.shape[1]] for x in (source, target))
        mask = self.body.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.body(enter, leave, tgt_mask=mask, tgt_is_causal=True))


@task(lr=3e-3, steps=160, schedule="one-cycle")
def seq2seq(seed: int) -> Problem:
    """A transformer with encoder and decoder of width 48 sorts 10 of 30 symbols, batches of 32."""
    model = Seq2Seq(31, 48)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        source = torch.randint(1, 31, (32, 10), generator=random)
        target = source.sort(dim=1).values
        return source, F.pad(target[:, :-1], (1, 0)), target

    def loss(source: Tensor, so_far: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(model(source, so_far).flatten(0, 1), target.flatten())

    return fitted(model, loss, draw, seed)


@functools.cache
def _code() -> corpus.Corpus:
    """Return source code of the standard library in the characters of the docs: what the GPT is fine-tuned on."""
    text, known = "".join(map(inspect.getsource, (argparse, inspect, typing))), TEXT().vocabulary
    tokens = torch.tensor([known.index(character) for character in text if character in known])
    cut = len(tokens) * 9 // 10
    return corpus.Corpus(tokens[:cut], tokens[cut:], known)


@functools.cache
def _pretrained(seed: int) -> GPT:
    """Return a GPT that AdamW trained on the docs, once in a process."""
    model = GPT(len(TEXT().vocabulary), 64, 2)
    optimizer, random = torch.optim.AdamW(model.parameters(), lr=3e-3), generator(seed)
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - step / 300)
        optimizer.zero_grad()
        _next_token(model, TEXT().batch(16, CONTEXT, random)).backward()
        optimizer.step()
    return model


@task(lr=1e-3, steps=150)
def fine_tuned_gpt(seed: int) -> Problem:
    """A GPT that AdamW trained on Python's docs goes on with Python code, batches of 16 x 32, constant lr."""
    return _language(deepcopy(_pretrained(seed)), _code(), seed, 16)


class Adapted(nn.Module):
    """A frozen linear layer with a trained addition of low rank (Hu et al. 2022)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, layer.in_features) * layer.in_features**-0.5)
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2 * (x @ self.lora_a.T) @ self.lora_b.T


@task(lr=3e-3, steps=150)
def lora(seed: int) -> Problem:
    """The same GPT with all weights frozen but adapters of rank 8, on Python code, batches of 16 x 32."""
    model = deepcopy(_pretrained(seed)).requires_grad_(False)
    for layer in model.layers:
        layer.qkv, layer.out = Adapted(layer.qkv, 8), Adapted(layer.out, 8)
        layer.net[0], layer.net[2] = Adapted(layer.net[0], 8), Adapted(layer.net[2], 8)
    return _language(model, _code(), seed, 16)

"""The optimizers that the demo compares, and one run with one of them. Budgets run at AdamW's learning rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import baoc
from baoc.tools.estimate import trainable_shapes
from experiments.corpus import Corpus
from experiments.tiny_gpt import MakeOptimizer, Size, TinyGPT, test_loss, train

LR, DECAY = 2e-3, 0.1

BUDGETS = (0.5, 0.25, 0.05, 0.0)


def _budgeted(memory: float) -> MakeOptimizer:
    return lambda model: baoc.BAOC(model, lr=LR, weight_decay=DECAY, memory=memory, verbose=False)


METHODS: dict[str, MakeOptimizer] = {
    "AdamW32": lambda model: torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY),
    "AdamW8": lambda model: baoc.BlockOptimizer(model, lr=LR, weight_decay=DECAY, plan="adamw-8"),
    **{f"BAOC memory={memory:g}": _budgeted(memory) for memory in BUDGETS},
}

OnStep = Callable[[int, float, int], None]
"""Called after every step with its number, the training loss and the bytes of state held."""


@dataclass(frozen=True)
class Run:
    """What came out of training once."""

    losses: list[float]  # of every step
    test_loss: float
    state_bytes: int  # the most that was held after any step
    seconds: float
    plan: baoc.Plan | None


def adamw16(corpus: Corpus) -> baoc.Block:
    """What all are compared with: every parameter of the model under 16-bit AdamW."""
    shapes = trainable_shapes(TinyGPT(len(corpus.vocabulary), Size()))
    return baoc.Block("all", baoc.parse("adamw-16"), shapes)


def train_once(corpus: Corpus, method: str, *, seed: int, steps: int, on_step: OnStep) -> Run:
    """Train with one of ``METHODS``; runs of one seed start alike and see the same text."""
    losses, held = [], []
    start = time.perf_counter()
    for step, loss, model, optimizer in train(corpus, METHODS[method], seed=seed, steps=steps):  # noqa: B007 (used below)
        losses.append(loss)
        held.append(baoc.state_bytes(optimizer))
        on_step(step, loss, held[-1])
    seconds = time.perf_counter() - start
    plan = optimizer.plan if isinstance(optimizer, baoc.BlockOptimizer) else None
    return Run(losses, test_loss(corpus, model), max(held), seconds, plan)

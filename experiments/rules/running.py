"""One run: a sibling, a recipe, a seed and a number of steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from experiments.rules.prototype import Prototype
from experiments.rules.recipes import Recipe
from experiments.rules.siblings import SIBLINGS, workload_of
from experiments.runs import Store
from experiments.workloads import Options

WARMUP, CLIP, EVAL_BATCHES = 30, 1.0, 40


@dataclass(frozen=True)
class Run:
    sibling: str
    recipe: Recipe
    seed: int
    steps: int

    @property
    def key(self) -> str:
        return f"{self.sibling} steps={self.steps} seed={self.seed} {self.recipe.key}"


def schedule(step: int, steps: int) -> float:
    """Return the learning rate of a step relative to the largest: a warm-up, then a cosine to a tenth."""
    warmup = max(1, min(WARMUP, steps // 10))
    return min(1.0, (step + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


def train(run: Run, options: Options) -> dict[str, Any]:
    """Return what is written down of a run."""
    sibling, recipe, begun = SIBLINGS[run.sibling], run.recipe, time.process_time()
    workload = workload_of(run.sibling, replace(options, batch_size=max(1, round(sibling.batch * recipe.batch))))
    torch.manual_seed(run.seed)
    model = workload.build(seed=run.seed)
    lr = sibling.lr * recipe.lr
    shares = [schedule(step, run.steps) for step in range(run.steps)]
    prototype = Prototype(model, recipe, lr, run.steps, sum(shares) / len(shares))
    batches = workload.train_batches(seed=run.seed)
    losses = []
    for share in shares:
        prototype.look(lr * share)
        loss = workload.loss(model, next(batches))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        prototype.step(lr * share)
    judge = workload_of(run.sibling, replace(options, batch_size=sibling.batch))  # the same test data for all
    tested = judge.evaluate(model, "test", EVAL_BATCHES)["loss"]
    tail = losses[-max(1, run.steps // 10) :]
    return {
        "key": run.key, "sibling": run.sibling, "steps": run.steps, "seed": run.seed, "recipe": recipe.content,
        "lr": lr, "parameters": sibling.parameters, "state_bytes": prototype.state_bytes,
        "test_loss": tested if math.isfinite(tested) else None,
        "train_loss": sum(tail) / len(tail) if math.isfinite(sum(tail)) else None,
        "seconds": round(time.process_time() - begun, 1),
    }  # fmt: skip


def train_all(runs: Iterable[Run], store: Store, options: Options) -> None:
    """Train what is not stored yet."""
    done = {row["key"] for row in store.rows}
    for run in runs:
        if run.key not in done:
            row = train(run, options)
            store.add(row)
            done.add(run.key)
            print(f"{row['test_loss'] or math.nan:.4f} {row['seconds']:6.1f}s {run.key}", flush=True)

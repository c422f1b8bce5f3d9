"""Plain training of a workload: AdamW, a short warm-up and a cosine."""

from __future__ import annotations

import sys

import torch
from torch import nn

from experiments.tiny_gpt import cosine_with_warmup
from experiments.workloads import Workload


def train(workload: Workload, *, steps: int, lr: float, seed: int, device: str) -> tuple[nn.Module, list[float]]:
    """Return the model after training, and the training loss of each step."""
    torch.manual_seed(seed)  # dropout
    model = workload.build(seed=seed, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    schedule = cosine_with_warmup(optimizer, steps)
    losses = []
    for step, batch in zip(range(1, steps + 1), workload.train_batches(seed=seed)):
        loss = workload.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 0 or step == steps:
            print(f"step {step:5}/{steps}  training loss {losses[-1]:.4f}", file=sys.stderr)
    return model, losses

"""Train a workload through BAOC's warm-up, for the profile of what it saw."""

from __future__ import annotations

import sys
import time

import torch

import baoc
from baoc.core.text import human_bytes
from baoc.planning.planner import DEFAULT_MEMORY
from experiments.workloads import Workload


def record(
    workload: Workload,
    *,
    steps: int,
    memory: float | int | str = DEFAULT_MEMORY,
    bf16_weights: bool = False,
    seed: int = 0,
) -> baoc.BAOC:
    """Train through the warm-up; the optimizer that has planned, with what it saw in ``.profile``."""
    torch.manual_seed(seed)
    model = workload.build(seed=seed)
    if bf16_weights:
        model.to(torch.bfloat16)
    # with more plans to come, samples are kept whatever the budget
    optimizer = baoc.BAOC(model, lr=workload.lr, memory=memory, warmup=steps, replan_every=steps, seed=seed)
    for step, batch in zip(range(1, steps + 1), workload.train_batches(seed=seed)):
        started = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16_weights):  # for inputs that are fp32
            loss = workload.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        held = human_bytes(baoc.state_bytes(optimizer))
        seconds = time.perf_counter() - started
        print(
            f"step {step}/{steps}, loss {loss.item():.4f}, state {held}, {seconds:.1f} s", file=sys.stderr, flush=True
        )
    return optimizer

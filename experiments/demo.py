"""Train a small GPT with less and less optimizer state, on text that comes with Python. Takes a minute or two.

python -m experiments.demo
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable

import torch

import baoc
from baoc.text import human_bytes, human_count, table
from experiments import corpus as corpora
from experiments.tiny_gpt import MakeOptimizer, test_loss, train

LR, DECAY = 1e-3, 0.1

METHODS: dict[str, MakeOptimizer] = {
    "torch.optim.AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY),
    "adamw-8": lambda model: baoc.BlockOptimizer(model, lr=LR, weight_decay=DECAY, plan="adamw-8"),
    "BAOC, memory=0.5": lambda model: baoc.BAOC(model, lr=LR, weight_decay=DECAY, memory=0.5),
    "BAOC, memory=0.25": lambda model: baoc.BAOC(model, lr=LR, weight_decay=DECAY, memory=0.25),
}


def progress(name: str, run: Iterable, steps: int) -> Iterable:
    """Show where a run is: a line that moves on a terminal, now and then a line elsewhere."""
    live = sys.stderr.isatty()
    for step, loss, model, optimizer in run:
        if live or step % 100 == 0 or step == steps:
            bar = "#" * (20 * step // steps)
            line = f"{name:20} [{bar:20}] {step:4}/{steps}  training loss {loss:.3f}"
            print(line, end="\r" if live and step < steps else "\n", file=sys.stderr, flush=True)
        yield step, loss, model, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    corpus = corpora.load()
    rows: list[list[str]] = []
    plan = None
    for name, make_optimizer in METHODS.items():
        start = time.perf_counter()
        run = train(corpus, make_optimizer, seed=arguments.seed, steps=arguments.steps)
        *_, (_, _, model, optimizer) = progress(name, run, arguments.steps)
        seconds = time.perf_counter() - start
        held = baoc.state_bytes(optimizer)
        reference = baoc.Plan.uniform("adamw-16", {n: tuple(p.shape) for n, p in model.named_parameters()}).state_bytes
        loss = test_loss(corpus, model)
        rows.append([name, human_bytes(held), f"{held / reference:.0%}", f"{loss:.3f}", f"{seconds:.0f} s"])
        plan = optimizer.plan if isinstance(optimizer, baoc.BlockOptimizer) else plan
    parameters = sum(param.numel() for param in model.parameters())
    print(f"\nA GPT of {human_count(parameters)} parameters, {arguments.steps} steps on Python's language reference:\n")
    header = ["optimizer", "state", "of AdamW16", "test loss", "time"]
    print(table(header, rows, right=header[1:]))
    print(f"\nThe plan of the last one:\n\n{plan}")


if __name__ == "__main__":
    main()

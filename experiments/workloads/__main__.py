"""List the workloads, or train one with AdamW and say how it went.

python -m experiments.workloads
python -m experiments.workloads gpt-small/embedded --steps 100
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from torch import nn

from baoc.cli import quiet
from baoc.core.text import human_count
from baoc.models import ModelError
from experiments.tiny_gpt import cosine_with_warmup
from experiments.workloads import Workload, describe, get
from experiments.workloads.arguments import add_options, options_of


def train(workload: Workload, *, steps: int, lr: float, seed: int, device: str) -> tuple[nn.Module, list[float]]:
    """The model after so many steps, and the training loss of each."""
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


def main() -> None:
    quiet.hush()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", nargs="?", help="a name, or a Python file with a workload; left out, list them")
    parser.add_argument("--steps", type=int, help="default: the workload's own number")
    parser.add_argument("--lr", type=float, help="default: the workload's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    add_options(parser)
    parser.add_argument("--eval-batches", type=int, help="evaluate on so many batches only")
    arguments = parser.parse_args()
    try:
        options = options_of(arguments)
        if arguments.workload is None:
            print(describe(options))
            return
        run(get(arguments.workload, options), arguments)
    except ModelError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def run(workload: Workload, arguments: argparse.Namespace) -> None:
    steps = arguments.steps or workload.steps
    next(workload.train_batches(seed=arguments.seed))  # if data is missing, say so before a large model is built
    start = time.perf_counter()
    model, losses = train(
        workload, steps=steps, lr=arguments.lr or workload.lr, seed=arguments.seed, device=arguments.device
    )
    trained = time.perf_counter()
    scores = workload.evaluate(model, "test", arguments.eval_batches)
    parameters = human_count(sum(param.numel() for param in model.parameters()))
    few = losses[-max(1, steps // 20) :]
    held_out = ", ".join(f"{name} {value:.4g}" for name, value in scores.items())
    print(f"{workload.name}: {parameters} parameters, {workload.description}")
    print(f"  training loss {losses[0]:.3f} -> {sum(few) / len(few):.3f} in {steps} steps and {trained - start:.1f} s")
    print(f"  test {held_out} in {time.perf_counter() - trained:.1f} s")


if __name__ == "__main__":
    main()

"""``python -m experiments train NAME``: train one workload with AdamW and say how it went."""

from __future__ import annotations

import argparse
import time
from functools import partial

from baoc.core.text import human_count
from baoc.tools.cli import common
from baoc.tools.cli.parser import Commands
from experiments.train import train
from experiments.workloads import get
from experiments.workloads.arguments import add_options, add_workload, options_of

SUMMARY = "train one workload with AdamW, and say how it went"

EXAMPLES = """\
examples:
  python -m experiments train gpt-small/embedded --steps 100
  python -m experiments train mine.py"""


def register(commands: Commands) -> None:
    """Add the command."""
    description = "Train one workload with AdamW; print its training loss, its test scores and how long both took."
    parser = common.add_parser(commands, "train", SUMMARY, description, EXAMPLES)
    count = partial(common.at_least, 1)
    add_workload(parser)
    parser.add_argument("--steps", metavar="N", type=count, help="(default: the workload's own number)")
    parser.add_argument("--lr", metavar="X", type=common.positive_number, help="(default: the workload's own)")
    parser.add_argument("--seed", metavar="N", type=common.whole, default=0, help="(default: %(default)s)")
    parser.add_argument("--device", type=common.device, default="cpu", help="(default: %(default)s)")
    add_options(parser)
    parser.add_argument("--eval-batches", metavar="N", type=count, help="evaluate on so many batches only")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Train, evaluate, and print both."""
    workload = get(args.workload, options_of(args))
    steps = args.steps or workload.steps
    next(workload.train_batches(seed=args.seed))  # if data is missing, say so before a large model is built
    start = time.perf_counter()
    model, losses = train(workload, steps=steps, lr=args.lr or workload.lr, seed=args.seed, device=args.device)
    trained = time.perf_counter()
    scores = workload.evaluate(model, "test", args.eval_batches)
    parameters = human_count(sum(param.numel() for param in model.parameters()))
    few = losses[-max(1, steps // 20) :]
    held_out = ", ".join(f"{name} {value:.4g}" for name, value in scores.items())
    print(f"{workload.name}: {parameters} parameters, {workload.description}")
    print(f"  training loss {losses[0]:.3f} -> {sum(few) / len(few):.3f} in {steps} steps and {trained - start:.1f} s")
    print(f"  test {held_out} in {time.perf_counter() - trained:.1f} s")

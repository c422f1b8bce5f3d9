"""``python -m experiments record NAME``: save gradient statistics of a workload, to plan from as the paper does."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import baoc
from baoc.core.text import human_bytes, human_count
from baoc.planners.base import AUTO
from baoc.tools.cli import common
from baoc.tools.cli.parser import Commands
from experiments.workloads import Workload, get
from experiments.workloads.arguments import add_options, add_workload, options_of

SUMMARY = "save gradient statistics of a workload, to plan from"

DESCRIPTION = """\
Train a workload with BAOC for a few steps and save statistics of its gradients. The paper's planner makes a plan for
any budget from such a file. For a model that barely fits, --bf16-weights halves weights and gradients, and a small
--memory reduces optimizer state."""

EXAMPLES = """\
examples:
  python -m experiments record gpt-small/embedded --steps 20 --output gpt.stats
  baoc plan gpt.stats --memory 25%"""


def register(commands: Commands) -> None:
    """Add the command."""
    parser = common.add_parser(commands, "record", SUMMARY, DESCRIPTION, EXAMPLES)
    count = partial(common.at_least, 1)
    add_workload(parser)
    parser.add_argument("--steps", metavar="N", type=count, default=20, help="(default: %(default)s)")
    parser.add_argument(
        "--memory",
        metavar="BUDGET",
        type=common.budget,
        default=AUTO,
        help="optimizer state while recording, a share or a size (default: %(default)s)",
    )
    parser.add_argument("--bf16-weights", action="store_true", help="keep weights and gradients in bfloat16")
    parser.add_argument("--seed", metavar="N", type=common.whole, default=0, help="(default: %(default)s)")
    add_options(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="file to save to")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Record and save."""
    common.check_writable(str(args.output))
    workload = get(args.workload, options_of(args))
    statistics = record(workload, steps=args.steps, memory=args.memory, bf16_weights=args.bf16_weights, seed=args.seed)
    statistics.save(args.output)
    parameters = sum(record.numel for record in statistics.records.values())
    print(f"{workload.name}: {human_count(parameters)} parameters, {statistics.steps} steps")
    print(f"saved {args.output} ({human_bytes(args.output.stat().st_size)}): baoc plan {args.output} --memory 25%")


def record(
    workload: Workload,
    *,
    steps: int,
    memory: float | int | str = AUTO,
    bf16_weights: bool = False,
    seed: int = 0,
) -> baoc.GradientStatistics:
    """Train a workload with BAOC and return statistics of its gradients.

    Args:
        workload: what to train.
        steps: how many.
        memory: budget for the optimizer's state.
        bf16_weights: keep weights and gradients in bfloat16.
        seed: of weights, batches and sampled coordinates.
    """
    torch.manual_seed(seed)
    model = workload.build(seed=seed)
    if bf16_weights:
        model.to(torch.bfloat16)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16_weights):  # for inputs that are fp32
            return workload.loss(model, batch)

    def on_step(step: int, steps: int, loss: float) -> None:
        print(f"step {step}/{steps}, loss {loss:.4f}", file=sys.stderr, flush=True)

    optimizer = baoc.BAOC(model, lr=workload.lr, memory=memory)
    batches = workload.train_batches(seed=seed)
    return baoc.collect_statistics(
        model, loss_fn, batches, steps=steps, seed=seed, optimizer=optimizer, on_step=on_step
    )

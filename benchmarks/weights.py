"""Step times with 16-bit weights and their low bits, relative to fp32 parameters of the same configuration.

    python -m benchmarks.weights [--rounds N] [--layers N] [CONFIGURATION ...]

All are alive at once and step in turn, in a new order every round; the ratio is taken within each round, and shown as a
median with its quartiles. It is of processor time, which other processes change less than the time on the wall: one
thread, the default kernel of the CPU. Gradients have the dtype of the parameters.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from statistics import quantiles

import torch
from torch import nn

from baoc import BlockOptimizer, parse
from baoc.core.text import table

CONFIGURATIONS = ("adamw-8", "adamw[m=int8,v=factored]", "adamw-16", "lion-8", "sgdm-8", "muon-8")
WEIGHTS = ("16", "8", "sr", "none")
SHAPE = (768, 3072)


def optimizer_of(configuration: str, weight: str | None, layers: int) -> BlockOptimizer:
    """Return an optimizer that has taken one step. Without a format of low bits its parameters are fp32."""
    dtype = torch.float32 if weight is None else torch.bfloat16
    params = [nn.Parameter(torch.randn(SHAPE).mul_(0.02).to(dtype)) for _ in range(layers)]
    for param in params:
        param.grad = torch.randn(SHAPE).mul_(1e-3).to(dtype)
    optimizer = BlockOptimizer(params, lr=1e-4, weight_decay=0.1, plan=parse(configuration).with_weight(weight))
    optimizer.step()
    return optimizer


def ratios(configuration: str, rounds: int, layers: int) -> dict[str, list[float]]:
    """Return the time of a step relative to fp32 parameters, round by round, by format."""
    steps = {weight: optimizer_of(configuration, weight, layers).step for weight in (None, *WEIGHTS)}
    found: dict[str, list[float]] = {weight: [] for weight in WEIGHTS}
    for _ in range(rounds):
        order = list(steps)
        random.shuffle(order)
        taken = {}
        for weight in order:
            began = time.process_time()
            steps[weight]()
            taken[weight] = time.process_time() - began
        for weight, mine in found.items():
            mine.append(taken[weight] / taken[None])
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configurations", nargs="*", metavar="CONFIGURATION")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    lines = []
    for configuration in arguments.configurations or CONFIGURATIONS:
        found = ratios(configuration, arguments.rounds, arguments.layers)
        cells = []
        for weight in WEIGHTS:
            low, middle, high = quantiles(found[weight], n=4)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        lines.append([f"`{configuration}`", *cells])
    print(table(["configuration", *(f"w={weight}" for weight in WEIGHTS)], lines))


if __name__ == "__main__":
    main()

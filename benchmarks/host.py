"""What a step of the Triton kernel takes on the host: Python's part of it, with launches left out. No GPU is needed.

    python -m benchmarks.host [CONFIGURATION ...]

As many tensors as GPT2-small has, small ones: the time does not depend on their size. It is processor time of the
thread, the median of steps whose gradients lie where they lay, and of steps for which all of them have moved.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

from baoc import BlockOptimizer
from baoc.core.text import table
from baoc.optim import kernels
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.triton import INTERPRETER, TritonKernel
from benchmarks.workloads import GPT2, WORKLOADS

CONFIGURATIONS = ("adamw-32", "adamw-8", "adamw[m=int8,v=factored]", "lion-8", "sgd")
SIDE = 64  # of a matrix: as small as codes are still codes
STEPS = 100


class Cost(NamedTuple):
    """Of a step, in microseconds."""

    step: float  # optimizer.step(), but for looking at gradients
    kernel: float  # the kernel's part of it
    moved: float  # the same where all gradients have moved
    launches: int


def measure(configuration: str, steps: int = STEPS) -> Cost:
    """Step tensors of a configuration."""
    os.environ[INTERPRETER] = "1"  # or it would not run on a CPU
    shapes = [tuple(min(size, SIDE) for size in shape) for shape in WORKLOADS[GPT2][1]().values()]
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = BlockOptimizer(params, plan=configuration, kernel="triton")
    kernel = kernels.choose("triton", torch.device("cpu")).kernel
    assert isinstance(kernel, TritonKernel)
    run, launch = kernel.run, kernel._launch
    launched: list[object] = []
    spent: list[float] = []

    def timed(jobs: Sequence[Job], flag: torch.Tensor | None = None) -> bool:
        started = time.thread_time()
        run(jobs, flag)
        spent.append(time.thread_time() - started)
        return False  # so gradients are not looked at: a GPU has that done by kernels

    def median_of(prepare: Callable[[], None]) -> tuple[float, float]:
        whole = []
        spent.clear()
        for _ in range(steps):
            prepare()
            launched.clear()
            started = time.thread_time()
            optimizer.step()
            whole.append(time.thread_time() - started)
        return 1e6 * median(whole), 1e6 * median(spent)

    def move() -> None:
        spare = [param.grad for param in params]  # held, or the new ones would lie where the old ones did
        for param in params:
            param.grad = torch.ones_like(param)
        del spare

    kernel._launch = lambda *arguments: launched.append(arguments)
    kernel.run = timed  # type: ignore[method-assign, assignment]
    try:
        move()
        optimizer.step()
        whole, own = median_of(lambda: None)
        launches = len(launched)
        return Cost(whole, own, median_of(move)[1], launches)
    finally:
        kernel.run, kernel._launch = run, launch  # type: ignore[method-assign]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configurations", nargs="*", default=CONFIGURATIONS)
    header = ["configuration", "families", "step", "kernel", "kernel, all gradients moved"]
    rows = []
    for name in parser.parse_args(arguments).configurations:
        cost = measure(name)
        rows.append([name, str(cost.launches), *(f"{each:.0f} us" for each in (cost.step, cost.kernel, cost.moved))])
    print(table(header, rows, right=header[1:]))


if __name__ == "__main__":
    main()

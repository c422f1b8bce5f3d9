"""Record a profile of a workload, to plan from as often as one likes; the model is trained with BAOC for a few steps.

python -m experiments.record gpt-small/embedded --steps 20 --output gpt.profile
baoc plan gpt.profile --memory 25%

For a model that hardly fits, ``--bf16-weights`` halves weights and gradients, and a small ``--memory`` the rest.
"""

from __future__ import annotations

import sys
import time
from argparse import RawDescriptionHelpFormatter
from functools import partial
from pathlib import Path

import torch

import baoc
from baoc.cli import quiet
from baoc.cli.common import Parser, at_least, budget
from baoc.core.plan import PlanError
from baoc.core.text import human_bytes, human_count
from baoc.models import ModelError
from baoc.planning.planner import DEFAULT_MEMORY
from experiments.workloads import Workload, get
from experiments.workloads.arguments import add_options, options_of


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
    optimizer = baoc.BAOC(model, lr=workload.lr, memory=memory, warmup=steps, seed=seed)
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


def main(argv: list[str] | None = None) -> None:
    quiet.hush()
    count = partial(at_least, 1)
    parser = Parser(
        prog="python -m experiments.record", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("workload", help="one of `baoc workloads`, or a Python file with your own")
    parser.add_argument("--steps", type=count, default=20, help="(default: %(default)s)")
    parser.add_argument(
        "--memory",
        type=budget,
        default=DEFAULT_MEMORY,
        help="of the warm-up, a share or a size (default: %(default)s)",
    )
    parser.add_argument("--bf16-weights", action="store_true", help="keep weights and gradients in bfloat16")
    add_options(parser)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True, help="where the profile goes")
    args = parser.parse_args(argv)
    if not args.output.parent.is_dir():
        parser.error(f"there is no folder {str(args.output.parent)!r}.")
    try:
        workload = get(args.workload, options_of(args))
        optimizer = record(
            workload, steps=args.steps, memory=args.memory, bf16_weights=args.bf16_weights, seed=args.seed
        )
    except (ModelError, PlanError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    assert optimizer.profile is not None  # the warm-up is over
    optimizer.profile.save(args.output)
    parameters = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    print(optimizer.plan)
    print(f"{workload.name}: {human_count(parameters)} parameters, {args.steps} steps")
    print(f"saved {args.output} ({human_bytes(args.output.stat().st_size)}): baoc plan {args.output} --memory 25%")


if __name__ == "__main__":
    main()

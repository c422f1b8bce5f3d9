"""``python -m experiments record NAME``: save a profile of a workload, to plan from as often as one likes."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from baoc.cli import common
from baoc.core.text import human_bytes, human_count
from baoc.planning.planner import DEFAULT_MEMORY
from experiments.recording import record
from experiments.workloads import get
from experiments.workloads.arguments import add_options, add_workload, options_of

SUMMARY = "save a profile of a workload, to plan from"

DESCRIPTION = """\
Record a profile of a workload, to plan from as often as one likes; the model is trained with BAOC for a few steps. For
a model that hardly fits, --bf16-weights halves weights and gradients, and a small --memory the rest."""

EXAMPLES = """\
examples:
  python -m experiments record gpt-small/embedded --steps 20 --output gpt.profile
  baoc plan gpt.profile --memory 25%"""


def register(commands: common.Commands) -> None:
    """Add the command."""
    parser = common.add_parser(commands, "record", SUMMARY, DESCRIPTION, EXAMPLES)
    count = partial(common.at_least, 1)
    add_workload(parser)
    parser.add_argument("--steps", metavar="N", type=count, default=20, help="(default: %(default)s)")
    parser.add_argument(
        "--memory",
        metavar="BUDGET",
        type=common.budget,
        default=DEFAULT_MEMORY,
        help="of the warm-up, a share or a size (default: %(default)s)",
    )
    parser.add_argument("--bf16-weights", action="store_true", help="keep weights and gradients in bfloat16")
    parser.add_argument("--seed", metavar="N", type=common.whole, default=0, help="(default: %(default)s)")
    add_options(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="where the profile goes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Record, and print the plan that the warm-up ended with."""
    common.check_writable(str(args.output))
    workload = get(args.workload, options_of(args))
    optimizer = record(workload, steps=args.steps, memory=args.memory, bf16_weights=args.bf16_weights, seed=args.seed)
    optimizer.profile.save(args.output)
    parameters = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
    print(optimizer.plan)
    print(f"{workload.name}: {human_count(parameters)} parameters, {args.steps} steps")
    print(f"saved {args.output} ({human_bytes(args.output.stat().st_size)}): baoc plan {args.output} --memory 25%")

"""``python -m experiments ablation``: swap one role, or one block, at a time."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from baoc.tools.cli import common
from baoc.tools.cli.parser import Commands
from experiments import ablation, runs
from experiments.workloads.arguments import add_options, options_of

SUMMARY = "one role or block at a time with a cheaper configuration, and which metrics foretell what that does"
DESCRIPTION = """\
Train with AdamW32, then with one role (hidden matrices, embeddings, the head) or one single block on another
configuration, at AdamW32's learning rate, and compare the test losses seed by seed.

Each finished run is kept in OUTPUT/runs.jsonl and not repeated: give the same command again. The page is OUTPUT.md."""
EXAMPLES = """\
examples:
  python -m experiments ablation --data ~/data --output docs/results/ablation
  python -m experiments ablation --workload gpt-small/alpaca --seeds 1"""


def register(commands: Commands) -> None:
    parser = common.add_parser(commands, "ablation", SUMMARY, DESCRIPTION, EXAMPLES)
    add_arguments(parser, "ablation", [setting.workload for setting in ablation.SETTINGS])
    parser.add_argument(
        "--part",
        action="append",
        choices=ablation.PARTS,
        default=[],
        help="of the runs: the most telling swaps of roles, of single blocks, or all others; repeatable (default: all)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Train what is missing, and write the page."""
    settings = [
        replace(setting, steps=args.steps or setting.steps)
        for setting in ablation.SETTINGS
        if not args.workload or setting.workload in args.workload
    ]
    options = runs.RunOptions(options_of(args), eval_batches=args.eval_batches)
    if not args.tables_only:
        ablation.train(settings, args.output, args.seeds, options, args.jobs, args.part or ablation.PARTS)
    print(f"saved {ablation.write(settings, args.output, options, said(args, 'ablation'))}")


def add_arguments(parser: argparse.ArgumentParser, name: str, workloads: Sequence[str]) -> None:
    """What experiments with workloads of their own have in common."""
    count = partial(common.at_least, 1)
    parser.add_argument(
        "--workload",
        metavar="NAME",
        action="append",
        choices=workloads,
        default=[],
        help=f"one of {', '.join(workloads)}; repeatable (default: all)",
    )
    parser.add_argument("--seeds", metavar="N", type=count, default=3, help="how many (default: %(default)s)")
    parser.add_argument("--steps", metavar="N", type=count, help="of each run (default: the experiment's own number)")
    parser.add_argument(
        "--output", metavar="DIR", type=Path, default=Path("results") / name, help="(default: %(default)s)"
    )
    parser.add_argument("--jobs", metavar="N", type=count, default=1, help="processes (default: %(default)s)")
    add_options(parser)
    parser.add_argument(
        "--eval-batches", metavar="N", type=count, default=20, help="evaluate on so many (default: %(default)s)"
    )
    parser.add_argument("--tables-only", action="store_true", help="train nothing; make the page of what is there")


def said(args: argparse.Namespace, name: str) -> list[str]:
    """What to type for the same runs; where the data lies is no part of it."""
    words = [word for workload in args.workload for word in ("--workload", workload)]
    words += [word for method in getattr(args, "method", []) for word in ("--method", method)]
    words += [word for part in getattr(args, "part", []) for word in ("--part", part)]
    words += ["--seeds", str(args.seeds), "--eval-batches", str(args.eval_batches)]
    words += ["--steps", str(args.steps)] if args.steps else []
    words += ["--batch-size", str(args.batch_size)] if args.batch_size else []
    return ["python", "-m", "experiments", name, *words, "--output", str(args.output)]

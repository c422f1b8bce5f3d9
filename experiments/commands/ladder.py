"""``python -m experiments ladder``: Llamas of several sizes, lengths and batches, beside a tuned AdamW32."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import torch

from baoc.tools.cli import common
from baoc.tools.cli.parser import Commands
from experiments import workloads
from experiments.ladder import running
from experiments.ladder.catalog import LADDER
from experiments.ladder.page import text
from experiments.runs.page import write_page
from experiments.workloads import enwik8

SUMMARY = "how effects change with model size, tokens per parameter and batch, beside a tuned AdamW32"
DESCRIPTION = """\
Train Llamas of 0.05M to 3M parameters on the bytes of enwik8, on 5 to 320 tokens per parameter. AdamW32 is tuned on
the smallest (learning rate, beta2, weight decay, multipliers); then it and the configurations that plans choose climb
the ladder, the most telling rungs first. The corpus is not part of the project: unpack mattmahoney.net/dc/enwik8.zip
into DIR/enwik8/ and give --data DIR.

Each finished run is kept in OUTPUT and not repeated: give the same command again. The page is OUTPUT.md."""
EXAMPLES = """\
examples:
  nice python -m experiments ladder --data ~/data --output docs/results/ladder
  python -m experiments ladder --tables-only --output docs/results/ladder"""


def register(commands: Commands) -> None:
    """Add the command."""
    parser = common.add_parser(commands, "ladder", SUMMARY, DESCRIPTION, EXAMPLES)
    parser.add_argument("--data", metavar="DIR", help="has enwik8/ with enwik8 or enwik8.gz (default: $BAOC_DATA)")
    parser.add_argument(
        "--rungs",
        metavar="N",
        type=common.whole,
        default=len(LADDER),
        help="only the first N climbs (default: %(default)s)",
    )
    parser.add_argument(
        "--output", metavar="DIR", type=Path, default=Path("results") / "ladder", help="(default: %(default)s)"
    )
    parser.add_argument("--tables-only", action="store_true", help="train nothing; make the page of what is there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Train what is missing, and write the page."""
    options = workloads.Options(data=args.data)
    if not args.tables_only:
        enwik8.load(options)  # says how to get it
        torch.set_num_threads(1)
        running.run(args.output, options, LADDER[: args.rungs])
    command = shlex.join(["python", "-m", "experiments", "ladder", "--output", str(args.output)])
    ladder = running.Ladder(running.opened(args.output), options)
    print(f"saved {write_page(args.output, text(ladder, command))}")

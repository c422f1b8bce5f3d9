"""``baoc workloads``: what the experiments can train, and whether its data is there."""

from __future__ import annotations

import argparse
import json

from baoc.cli import checkout, common

SUMMARY = "the workloads of the experiments, and whether their data is there"

DESCRIPTION = """\
List every workload that `baoc experiment` can train. A workload is named size/dataset; those on `embedded` and `digits`
need no download. `python -m experiments.workloads NAME` trains one with AdamW."""

EXAMPLES = """\
examples:
  baoc workloads
  baoc workloads --data ~/data"""


def register(commands: common.Commands) -> None:
    """Add the command to the parser of ``baoc``."""
    parser = common.add_parser(commands, "workloads", SUMMARY, DESCRIPTION, EXAMPLES)
    parser.add_argument("--data", metavar="DIR", help="has alpaca/, gsm8k/, cifar10/ (default: $BAOC_DATA, or the hub)")
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the table, or the JSON."""
    workloads = checkout.load("workloads")
    options = workloads.Options(data=args.data)
    print(json.dumps(workloads.entries(options), indent=2) if args.json else workloads.describe(options))

"""``python -m experiments workloads``: what there is to train, and whether its data is there."""

from __future__ import annotations

import argparse
import json

from baoc.tools.cli import common
from baoc.tools.cli.parser import Commands
from experiments import workloads
from experiments.workloads.arguments import add_data

SUMMARY = "what there is to train, and whether its data is there"

DESCRIPTION = """\
List every workload that the experiments can train. A workload is named size/dataset; those on `embedded` and `digits`
need no download. `python -m experiments train NAME` trains one with AdamW."""

EXAMPLES = """\
examples:
  python -m experiments workloads
  python -m experiments workloads --data ~/data"""


def register(commands: Commands) -> None:
    """Add the command."""
    parser = common.add_parser(commands, "workloads", SUMMARY, DESCRIPTION, EXAMPLES)
    add_data(parser)
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the table, or the JSON."""
    options = workloads.Options(data=args.data)
    print(json.dumps(workloads.entries(options), indent=2) if args.json else workloads.describe(options))

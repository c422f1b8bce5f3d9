"""``python -m experiments statemem``: the paper's StateMem column beside ours, and the reason for every difference."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from baoc.tools.cli import common
from baoc.tools.cli.parser import Commands
from experiments import statemem

SUMMARY = "the paper's state memory beside ours, and why they differ"

DESCRIPTION = """\
Compare the optimizer-state memory that the paper reports with what our builds of its methods hold. Models are on the
meta device: nothing is allocated or trained. MB is 2^20 bytes. "their rule" is how the paper's figure comes about;
"same" means to the last printed digit."""

EXAMPLES = """\
examples:
  python -m experiments statemem
  python -m experiments statemem --json"""


def register(commands: Commands) -> None:
    """Add the command."""
    parser = common.add_parser(commands, "statemem", SUMMARY, DESCRIPTION, EXAMPLES)
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the table, or the JSON."""
    print(json.dumps([asdict(row) for row in statemem.rows()], indent=2) if args.json else statemem.table())

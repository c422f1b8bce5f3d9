"""``baoc explain PLAN [BLOCK]``: what a plan decided, what its budgets are worth, and why."""

from __future__ import annotations

import argparse
import json

from baoc.cli import common, screen
from baoc.report import explain, find_block

SUMMARY = "what a plan decided, what its budgets are worth, and why"

DESCRIPTION = """\
Show a plan: its blocks and why they have what they have, its configurations,
how much of each budget it uses, and what more of it would be worth. With BLOCK,
show all about that block."""

EXAMPLES = """\
examples:
  baoc explain plan.json
  baoc explain plan.json blocks.3.attention
  baoc explain plan.json '*head*' --json"""


def register(commands: common.Commands) -> None:
    """Add the command to the parser of ``baoc``."""
    parser = common.add_parser(commands, "explain", SUMMARY, DESCRIPTION, EXAMPLES)
    parser.add_argument("plan", metavar="PLAN", help="a plan file")
    parser.add_argument(
        "block", metavar="BLOCK", nargs="?", help="a block, one of its parameters, or a pattern that fits one block"
    )
    parser.add_argument("--wide", action="store_true", help="names and reasons as long as they are")
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the explanation, or its JSON."""
    plan = common.load_plan(args.plan)
    if args.block is None:
        content, text = explain.plan_content(plan), explain.explain_plan(plan, wide=args.wide)
    else:
        block = find_block(plan, args.block)
        content, text = explain.block_content(block), explain.explain_block(block, wide=args.wide)
    if args.json:
        print(json.dumps(content, indent=2))
    else:
        screen.show(text)

"""``baoc diff A B``: what is different between two plans."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from baoc.cli import common, screen
from baoc.core.plan import Plan
from baoc.core.text import human_bytes
from baoc.report import Change, diff
from baoc.report.diff import diff_table, diff_text

SUMMARY = "what is different between two plans"

DESCRIPTION = """\
Show the parameters whose configuration, lr scale or block is not the same in
both plans, or whose state is in host memory in one of them, with their bytes
before and after. The exit code is 0 whether there are any or not."""

EXAMPLES = """\
examples:
  baoc diff plan.json other.json
  baoc diff plan.json other.json --json"""


def register(commands: common.Commands) -> None:
    """Add the command to the parser of ``baoc``."""
    parser = common.add_parser(commands, "diff", SUMMARY, DESCRIPTION, EXAMPLES)
    parser.add_argument("before", metavar="A", help="a plan file")
    parser.add_argument("after", metavar="B", help="another one")
    parser.add_argument("--wide", action="store_true", help="a row for every parameter, with all that is different")
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the table, or the JSON."""
    before, after = common.load_plan(args.before), common.load_plan(args.after)
    changes = diff(before, after)
    if args.json:
        print(json.dumps(_content(before, after, changes), indent=2))
        return
    if not changes:
        print(f"no difference: {_count(_parameters(before))} alike, {human_bytes(before.state_bytes)} of state")
        return
    screen.show(diff_table(changes) if args.wide else diff_text(changes))
    print()
    total = len(_parameters(before) | _parameters(after))
    kinds = [f"{_number(kind, changes)} {label}" for kind, label in _LABELS.items() if _number(kind, changes)]
    print(f"{len(changes)} of {total} tensors differ: {', '.join(kinds)}")
    change = after.state_bytes - before.state_bytes
    sign = "+" if change >= 0 else "-"
    share = f", {change / before.state_bytes:+.1%}" if before.state_bytes else ""
    print(
        f"state: {human_bytes(before.state_bytes)} -> {human_bytes(after.state_bytes)} "
        f"({sign}{human_bytes(abs(change))}{share})"
    )
    if before.host_bytes or after.host_bytes:
        print(f"in host memory: {human_bytes(before.host_bytes)} -> {human_bytes(after.host_bytes)}")


_LABELS = {
    "configuration": "in configuration",
    "lr_scale": "in lr scale",
    "block": "in block",
    "host": "in where state is",
    "shape": "in shape",
    "removed": "only in the first plan",
    "added": "only in the second plan",
}


def _number(kind: str, changes: list[Change]) -> int:
    return sum(kind in change.what for change in changes)


def _parameters(plan: Plan) -> set[str]:
    return {name for block in plan.blocks for name in block.parameters}


def _count(names: set[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) != 1 else ''}"


def _content(before: Plan, after: Plan, changes: list[Change]) -> dict[str, object]:
    return {
        "state_bytes_before": before.state_bytes,
        "state_bytes_after": after.state_bytes,
        "host_bytes_before": before.host_bytes,
        "host_bytes_after": after.host_bytes,
        "changes": [
            {
                "parameter": change.parameter,
                "what": list(change.what),
                "before": asdict(change.before) if change.before else None,
                "after": asdict(change.after) if change.after else None,
            }
            for change in changes
        ],
    }

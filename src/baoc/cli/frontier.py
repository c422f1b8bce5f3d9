"""``baoc frontier PROFILE``: what every memory budget buys, from one profile."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from baoc.cli import common, screen
from baoc.core.text import human_bytes
from baoc.planning.planner import Planner
from baoc.report import Frontier, frontier, plot
from baoc.report.frontier import frontier_table

SUMMARY = "risk and time against memory, over all budgets"

DESCRIPTION = """\
Plan a profile for many memory budgets, from the smallest that can be met to
twice AdamW16's state, each larger by the same factor, and show the risk (the
expected change of the loss, in percent) and the time of each plan. The knee is
where more memory begins to pay less: the point furthest below the line between
the ends of the curve, with both axes scaled alike."""

EXAMPLES = """\
examples:
  baoc frontier model.profile
  baoc frontier model.profile --points 50 --time 1.1 --plot frontier.svg"""


def register(commands: common.Commands) -> None:
    """Add the command to the parser of ``baoc``."""
    parser = common.add_parser(commands, "frontier", SUMMARY, DESCRIPTION, EXAMPLES)
    parser.add_argument("profile", metavar="PROFILE", help="a file that `baoc plan --profile-out` wrote")
    parser.add_argument(
        "--points",
        metavar="N",
        type=partial(common.at_least, 2),
        default=20,
        help="how many budgets (default: %(default)s)",
    )
    parser.add_argument("--plot", metavar="FILE", help="also draw it, as .png, .svg or .pdf (needs matplotlib)")
    common.add_planning(parser)
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the table, or the JSON, and draw the plot."""
    if args.plot is not None:
        plot.check(args.plot)
        common.check_writable(args.plot)
    common.check_risk(args)
    settings = common.settings_of(args)
    profile = common.load_profile(args.profile)
    planner = Planner(profile.shapes, profile, common.hyper_of(args, profile.betas), settings)
    with screen.working("planning for all budgets"):
        result = frontier(planner, args.points, args.time)
    if args.json:
        print(json.dumps(_content(result), indent=2))
    else:
        _print(result, args.profile, len(planner.blocks))
    if args.plot is not None:
        plot.plot(result, args.plot, Path(args.profile).name)
        if not args.json:
            print(f"saved the plot to {args.plot}")


def _print(result: Frontier, source: str, blocks: int) -> None:
    first, last = result.points[0], result.points[-1]
    print(f"{source}: {blocks} blocks, time within {result.time_budget:g} of AdamW16's")
    budgets = (human_bytes(point.memory_budget) for point in (first, last))
    print(f"{len(result.points)} budgets from {' to '.join(budgets)}")
    print()
    screen.show(frontier_table(result))
    print()
    if result.knee is None:
        print("the curve has no knee: no budget in between does better than a straight line")
    else:
        point = result.points[result.knee]
        what = "expected loss" if result.is_loss else "risk"
        size = f"{point.share:.1%} of AdamW16's state, {human_bytes(point.state_bytes)}"
        print(f"knee: {size}, {what} {result.risk_text(point)}")


def _content(result: Frontier) -> dict[str, object]:
    return {
        "reference_bytes": result.reference_bytes,
        "time_budget": result.time_budget,
        "spacing": "geometric",
        "knee": result.knee,
        "points": [asdict(point) for point in result.points],
    }

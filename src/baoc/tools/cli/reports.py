"""The commands that read plans, gradient statistics and logs: ``explain``, ``diff``, ``frontier`` and ``report``."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path

from baoc.core.plan import Plan
from baoc.core.text import human_bytes
from baoc.planners.paper.statistics import GradientStatistics
from baoc.tools.cli import common, screen
from baoc.tools.cli.parser import Parser, UsageError
from baoc.tools.cli.plan import SOURCES, load_problem
from baoc.tools.report import Change, Frontier, ReportError, Run, diff, find_block, frontier
from baoc.tools.report.diff import diff_table, diff_text
from baoc.tools.report.explain import block_content, explain_block, explain_plan, plan_content
from baoc.tools.report.frontier import POINTS, check_plot, frontier_table, plot
from baoc.tools.report.runlog import is_run

# ---- explain ----

EXPLAIN = """\
Show a plan: its blocks and the reasons for their configurations, how much of
each budget the plan uses, and what more of it would gain. With BLOCK, show the
details of that block."""

EXPLAIN_EXAMPLES = """\
examples:
  baoc explain plan.json
  baoc explain plan.json blocks.3.attention
  baoc explain plan.json '*head*' --json"""


def add_explain(parser: Parser) -> None:
    """Add the options of ``baoc explain PLAN [BLOCK]``."""
    parser.description, parser.epilog = EXPLAIN, EXPLAIN_EXAMPLES
    parser.add_argument("plan", metavar="PLAN", help="a plan file")
    parser.add_argument(
        "block", metavar="BLOCK", nargs="?", help="a block, one of its parameters, or a pattern that matches one block"
    )
    parser.add_argument("--wide", action="store_true", help="do not shorten names and reasons")
    common.add_json(parser)
    parser.set_defaults(run=run_explain)


def run_explain(args: argparse.Namespace) -> None:
    """Print the explanation as text or JSON."""
    plan = common.load_plan(args.plan)
    if args.block is None:
        content, text = plan_content(plan), explain_plan(plan, wide=args.wide)
    else:
        block = find_block(plan, args.block)
        content, text = block_content(block), explain_block(block, wide=args.wide)
    if args.json:
        print(json.dumps(content, indent=2))
    else:
        screen.show(text)


# ---- diff ----

DIFF = """\
Show the parameters whose configuration, lr scale, block or place of state
differs between two plans, with their bytes before and after. The exit code is 0
with or without differences."""

DIFF_EXAMPLES = """\
examples:
  baoc diff plan.json other.json
  baoc diff plan.json other.json --json"""

_DIFFERENCES = {
    "configuration": "in configuration",
    "lr_scale": "in lr scale",
    "block": "in block",
    "host": "in the place of state",
    "shape": "in shape",
    "removed": "only in the first plan",
    "added": "only in the second plan",
}


def add_diff(parser: Parser) -> None:
    """Add the options of ``baoc diff A B``."""
    parser.description, parser.epilog = DIFF, DIFF_EXAMPLES
    parser.add_argument("before", metavar="A", help="a plan file")
    parser.add_argument("after", metavar="B", help="another plan file")
    parser.add_argument("--wide", action="store_true", help="one row per parameter, with all differences")
    common.add_json(parser)
    parser.set_defaults(run=run_diff)


def run_diff(args: argparse.Namespace) -> None:
    """Print the differences as text or JSON."""
    before, after = common.load_plan(args.before), common.load_plan(args.after)
    changes = diff(before, after)
    if args.json:
        print(json.dumps(_diff_content(before, after, changes), indent=2))
        return
    if not changes:
        count = len(_parameters(before))
        tensors = f"{count} tensor{'s' if count != 1 else ''}"
        screen.show(f"no difference: {tensors}, {human_bytes(before.state_bytes)} of state")
        return
    screen.show(diff_table(changes) if args.wide else diff_text(changes))
    total = len(_parameters(before) | _parameters(after))
    counts = {label: sum(kind in change.what for change in changes) for kind, label in _DIFFERENCES.items()}
    kinds = ", ".join(f"{count} {label}" for label, count in counts.items() if count)
    change = after.state_bytes - before.state_bytes
    sign = "+" if change >= 0 else "-"
    share = f", {change / before.state_bytes:+.1%}" if before.state_bytes else ""
    lines = [
        "",
        f"{len(changes)} of {total} tensors differ: {kinds}",
        f"state: {human_bytes(before.state_bytes)} -> {human_bytes(after.state_bytes)} "
        f"({sign}{human_bytes(abs(change))}{share})",
    ]
    if before.host_bytes or after.host_bytes:
        lines.append(f"in host memory: {human_bytes(before.host_bytes)} -> {human_bytes(after.host_bytes)}")
    print("\n".join(lines))


def _parameters(plan: Plan) -> set[str]:
    return {name for block in plan.blocks for name in block.parameters}


def _diff_content(before: Plan, after: Plan, changes: list[Change]) -> dict[str, object]:
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


# ---- frontier ----

FRONTIER = f"""\
Plan for many memory budgets, from the smallest feasible one to twice the state
of AdamW16, each larger by the same factor. Show the predicted change of the
loss (with --planner paper: the risk) and the time of each plan. The knee is the
point furthest below the line between the ends of the curve, with both axes
scaled to the same length: more memory gains less beyond it.

{SOURCES}"""

FRONTIER_EXAMPLES = """\
examples:
  baoc frontier llama-3.1-8b
  baoc frontier plan.json
  baoc frontier model.stats --planner paper
  baoc frontier gpt2-small --points 50 --time 1.1 --plot frontier.svg"""


def add_frontier(parser: Parser) -> None:
    """Add the options of ``baoc frontier SOURCE``."""
    parser.description, parser.epilog = FRONTIER, FRONTIER_EXAMPLES
    parser.add_argument("source", metavar="SOURCE", help="a model, file.py:function, a plan, or gradient statistics")
    parser.add_argument(
        "--points",
        metavar="N",
        type=partial(common.at_least, 2),
        default=POINTS,
        help="number of budgets (default: %(default)s)",
    )
    parser.add_argument("--plot", metavar="FILE", help="also write a plot, as .png, .svg or .pdf (needs matplotlib)")
    common.add_planning(parser)
    common.add_json(parser)
    parser.set_defaults(run=run_frontier, steps=None, seed=0)


def run_frontier(args: argparse.Namespace) -> None:
    """Print the frontier as text or JSON, and write the plot."""
    if args.plot is not None:
        check_plot(args.plot)
        common.check_writable(args.plot)
    problem = load_problem(args)
    with screen.working("planning for all budgets"):
        result = frontier(problem, args.points)
    if args.json:
        print(json.dumps(_frontier_content(result), indent=2))
    else:
        screen.show(_frontier_text(result, args.source))
    if args.plot is not None:
        plot(result, args.plot, Path(args.source).name)
        if not args.json:
            screen.show(f"saved the plot to {args.plot}")


def _frontier_text(result: Frontier, source: str) -> str:
    first, last = result.points[0], result.points[-1]
    budgets = (human_bytes(point.memory_budget) for point in (first, last))
    if result.knee is None:
        knee = "the curve has no knee: no budget between its ends is better than a straight line"
    else:
        point = result.points[result.knee]
        what = "expected loss" if result.is_loss else "risk"
        size = f"{point.share:.1%} of AdamW16's state, {human_bytes(point.state_bytes)}"
        knee = f"knee: {size}, {what} {result.risk_text(point)}"
    is_limited = math.isfinite(result.time_budget)
    return (
        f"{source}: {f'time limit {result.time_budget:g} x AdamW16' if is_limited else 'no time limit'}\n"
        f"{len(result.points)} budgets from {' to '.join(budgets)}\n\n{frontier_table(result)}\n\n{knee}"
    )


def _frontier_content(result: Frontier) -> dict[str, object]:
    return {
        "reference_bytes": result.reference_bytes,
        "time_budget": result.time_budget if math.isfinite(result.time_budget) else None,
        "spacing": "geometric",
        "knee": result.knee,
        "points": [asdict(point) for point in result.points],
    }


# ---- report ----

REPORT = """\
Write one HTML file that opens in any browser without a network. It shows the
tensors of the model in forward order, colored by configuration, with a slider
over all budgets. It compares two plans and shows a training run.

FILE is one of these, all of the same model:
  statistics         of gradients, written by `baoc plan --statistics-out` or
                     `optimizer.statistics.save` (at most one)
  a plan             plan.json, to compare with (any number)
  a log of a run     written by `baoc.tools.report.RunLog` (at most one)"""

REPORT_EXAMPLES = """\
examples:
  baoc report model.stats -o report.html
  baoc report model.stats plan.json run.jsonl -o report.html
  baoc report plan.json -o report.html --title 'our 1B model'"""


def add_report(parser: Parser) -> None:
    """Add the options of ``baoc report FILE ... -o HTML``."""
    parser.description, parser.epilog = REPORT, REPORT_EXAMPLES
    parser.add_argument("files", metavar="FILE", nargs="+", help="gradient statistics, a plan, or a log of a run")
    parser.add_argument("-o", "--output", metavar="HTML", required=True, help="the page to write")
    parser.add_argument("--title", metavar="TEXT", help="title of the page (default: the name of the first file)")
    common.add_planning(parser)
    common.add_json(parser)
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> None:
    """Write the page, and print where it is as text or JSON."""
    from baoc.tools.report.explorer import Sources, write

    common.check_writable(args.output)
    planner = common.planner_of(args)
    found: list[GradientStatistics] = []
    runs: list[Run] = []
    plans: dict[str, Plan] = {}
    for name in args.files:
        path = Path(name)
        if is_run(path):
            runs.append(Run.load(path))
        elif path.suffix == ".json":
            plans[name if path.name in plans else path.name] = common.load_plan(name)
        else:
            found.append(common.load_statistics(name))
    for several, what in ((found, "files of gradient statistics"), (runs, "logs of runs")):
        if len(several) > 1:
            raise ReportError(f"a page shows at most one of the {len(several)} {what}. Write one page for each.")
    statistics = found[0] if found else None
    if args.planner == common.PAPER and statistics is None:
        raise UsageError("--planner paper plans from gradients: pass a file of gradient statistics too.")
    sources = Sources(
        args.title or Path(args.files[0]).stem,
        statistics,
        plans,
        runs[0] if runs else None,
        planner,
        common.hyper_of(args, statistics.betas) if statistics else common.hyper_of(args),
    )
    with screen.working("planning for all budgets"):
        write(sources, args.output)
    nbytes = Path(args.output).stat().st_size
    if args.json:
        print(json.dumps({"output": args.output, "bytes": nbytes}, indent=2))
    else:
        screen.show(f"wrote {args.output} ({human_bytes(nbytes)}). Open it in a browser.")

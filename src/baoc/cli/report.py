"""``baoc report FILE ... -o report.html``: profiles, plans and runs as one page to look at."""

from __future__ import annotations

import argparse
from pathlib import Path

from baoc.cli import common, screen
from baoc.core.plan import Plan
from baoc.core.text import human_bytes
from baoc.profiling.profile import Profile
from baoc.report import ReportError
from baoc.report.content import Sources
from baoc.report.explorer import write
from baoc.report.runlog import Run, is_run

SUMMARY = "a page to explore: the model, its plans over all budgets, and how a run went"

DESCRIPTION = """\
Write one HTML file that opens in any browser, without a network. It shows the
model as its tensors in forward order, coloured by configuration, with a slider
over all budgets; compares two plans; and shows a run.

FILE is any of these, in any number, all of one model:
  a profile          as `baoc plan --profile-out` or `optimizer.profile.save`
                     writes it (at most one)
  a plan             plan.json, to compare with
  a run's log        as `baoc.report.RunLog` writes it (at most one)"""

EXAMPLES = """\
examples:
  baoc report model.profile -o report.html
  baoc report model.profile plan.json run.jsonl -o report.html
  baoc report plan.json -o report.html --title 'our 1B model'"""


def register(commands: common.Commands) -> None:
    """Add the command to the parser of ``baoc``."""
    parser = common.add_parser(commands, "report", SUMMARY, DESCRIPTION, EXAMPLES)
    parser.add_argument("files", metavar="FILE", nargs="+", help="a profile, a plan, or a run's log")
    parser.add_argument("-o", "--output", metavar="HTML", required=True, help="where to write the page")
    parser.add_argument("--title", metavar="TEXT", help="of the page (default: the first file's name)")
    common.add_planning(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write the page."""
    common.check_writable(args.output)
    common.check_risk(args)
    profiles: list[Profile] = []
    runs: list[Run] = []
    plans: dict[str, Plan] = {}
    for name in args.files:
        path = Path(name)
        if is_run(path):
            runs.append(Run.load(path))
        elif path.suffix == ".json":
            plans[name if path.name in plans else path.name] = common.load_plan(name)
        else:
            profiles.append(common.load_profile(name))
    for found, what in ((profiles, "profiles"), (runs, "logs of runs")):
        if len(found) > 1:
            raise ReportError(f"there are {len(found)} {what}; a page shows one. Write a page for each.")
    profile = profiles[0] if profiles else None
    hyper = common.hyper_of(args, profile.betas) if profile else common.hyper_of(args)
    sources = Sources(
        args.title or Path(args.files[0]).stem,
        profile,
        plans,
        runs[0] if runs else None,
        common.settings_of(args),
        args.time,
        hyper,
    )
    with screen.working("planning for all budgets"):
        write(sources, args.output)
    print(f"wrote {args.output} ({human_bytes(Path(args.output).stat().st_size)}): open it in a browser")

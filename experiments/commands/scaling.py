"""``python -m experiments scaling``: fit the laws that carry effects to other scales."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from statistics import median

from baoc.core.files import replaced
from baoc.planners.model_facts import FINETUNE, SCRATCH
from baoc.planners.scaling import Laws, Scale
from baoc.tools.cli import common
from baoc.tools.cli.parser import Commands
from experiments import scaling
from experiments.ablation.catalog import SETTINGS
from experiments.runs import Store
from experiments.runs.page import write_page
from experiments.scaling.data import Data, read
from experiments.scaling.fit import Fit

RESULTS = Path("docs") / "results"
LAWS = Path("src") / "baoc" / "planners" / "scaling.json"
SUMMARY = "fit how effects change with size and length, to published losses and the ladder"
DESCRIPTION = """\
Fit the laws that carry the effect table to the user's scale: what steps are worth, how many Muon saves, and how far
rules without momentum fall behind. They are fitted to published end-of-run losses (experiments/scaling/published.csv)
and to finished runs of `python -m experiments ladder`. Nothing is trained.

Writes the laws that ship (--output) and the page (--page)."""
EXAMPLES = """\
examples:
  python -m experiments scaling"""


def register(commands: Commands) -> None:
    """Add the command."""
    parser = common.add_parser(commands, "scaling", SUMMARY, DESCRIPTION, EXAMPLES)
    parser.add_argument(
        "--results",
        metavar="DIR",
        type=Path,
        default=RESULTS,
        help="(default: %(default)s)",
    )
    parser.add_argument("--output", metavar="FILE", type=Path, default=LAWS, help="(default: %(default)s)")
    parser.add_argument("--page", metavar="FILE", type=Path, help="(default: RESULTS/scaling.md)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Fit, and write the laws and the page."""
    data, laws, fit = made(args.results)
    with replaced(args.output) as file:
        file.write(to_json(laws).encode())
    page = args.page or args.results / "scaling.md"
    command = shlex.join(["python", "-m", "experiments", "scaling"])
    print(f"saved {args.output} and {write_page(page.with_suffix(''), scaling.text(data, laws, fit, command))}")


def made(results: Path) -> tuple[Data, Laws, Fit]:
    """Return the data in a folder of results, and the laws that are fitted to it."""
    table = table_scale(results)
    data = read(results / "ladder", table)
    laws, fit = scaling.fitted(data, table, largest(results))
    return data, laws, fit


def to_json(laws: Laws) -> str:
    """Return the content of the file that ships."""
    return json.dumps({"made by": "python -m experiments scaling", **asdict(laws)}, indent=2) + "\n"


def table_scale(results: Path) -> Scale:
    """Return a typical run from scratch that the effect table is made of: medians of parameters and steps.

    Its length counts as the shortest of the laws' data: the runs are shorter.
    """
    longest: dict[str, tuple[float, float]] = {}
    for workload, parameters, steps in _ablation(results, "scratch"):
        longest[workload] = max(longest.get(workload, (0, 0)), (steps, parameters))
    parameters = median(parameters for _, parameters in longest.values())
    return Scale(parameters, parameters, median(steps for steps, _ in longest.values()))


def largest(results: Path) -> dict[str, float]:
    """Return the parameters of the largest model in the effect table, by regime."""
    sizes: dict[str, list[float]] = {}
    for regime, name in ((SCRATCH, "scratch"), (FINETUNE, "fine-tuning")):
        sizes.setdefault(regime, []).extend(parameters for _, parameters, _ in _ablation(results, name))
    for row in Store(results / "zoo", must_exist=True).rows:
        if "regime" in row:
            sizes.setdefault(row["regime"], []).append(row["parameters"])
    return {regime: float(max(known)) for regime, known in sorted(sizes.items())}


def _ablation(results: Path, regime: str) -> list[tuple[str, float, float]]:
    """Return workload, parameters and steps of the fitted runs of a regime."""
    wanted = {(each.workload, each.steps) for each in SETTINGS if each.is_fitted and each.regime == regime}
    rows = Store(results / "ablation", must_exist=True).rows
    return [
        (row["workload"], row["parameters"], row["steps"]) for row in rows if (row["workload"], row["steps"]) in wanted
    ]

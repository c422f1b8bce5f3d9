"""``baoc calibrate file.py:function``: measure what configurations do to the loss of a workload of one's own."""

from __future__ import annotations

import argparse
import contextlib
import sys
from functools import partial

import torch

from baoc.calibrate import calibrate, effects_table
from baoc.cli import common, screen
from baoc.cli.workload import load_workload
from baoc.core.text import table
from baoc.planning.risk import REGIMES
from baoc.planning.settings import AUTO

SUMMARY = "measure what configurations do to the loss of your workload, for plans that stand on it"

DESCRIPTION = """\
Train your model for a few hundred steps with each configuration on each role
(hidden weights, embeddings, heads), and write how the loss compares with
AdamW32's. `baoc plan --table FILE` and BAOC(..., table=FILE) plan by it.

SOURCE is file.py:function, as for `baoc plan`; the model is copied for every
run."""

EXAMPLES = """\
examples:
  baoc calibrate train.py:make_workload --lr 3e-4 -o mine.json
  baoc calibrate train.py:make_workload --configuration lion-8 -o mine.json
  baoc plan train.py:make_workload --table mine.json --memory 25%"""


def register(commands: common.Commands) -> None:
    """Add the command to the parser of ``baoc``."""
    count = partial(common.at_least, 1)
    parser = common.add_parser(commands, "calibrate", SUMMARY, DESCRIPTION, EXAMPLES)
    parser.add_argument("source", metavar="SOURCE", help="file.py:function")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="where the table goes, such as mine.json")
    parser.add_argument("--steps", metavar="N", type=count, default=200, help="of each run (default: %(default)s)")
    parser.add_argument(
        "--repeats", metavar="N", type=count, default=2, help="runs of each configuration (default: %(default)s)"
    )
    parser.add_argument(
        "--configuration", metavar="CONFIG", action="append", help="to try; repeatable (default: the most useful ones)"
    )
    parser.add_argument("--regime", choices=(AUTO, *REGIMES), default=AUTO, help="(default: the weights tell)")
    parser.add_argument(
        "--lr", metavar="X", type=common.positive_number, default=1e-3, help="AdamW's best (default: %(default)s)"
    )
    parser.add_argument("--weight-decay", metavar="X", type=common.number, default=0.01, help="(default: %(default)s)")
    parser.add_argument("--seed", metavar="N", type=common.whole, default=0, help="of torch (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the effects and write the table."""
    common.check_writable(args.output)
    torch.manual_seed(args.seed)
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is not our output
        workload = load_workload(args.source)
    with contextlib.redirect_stdout(sys.stderr), screen.Progress("calibration", "run") as progress:
        measured = calibrate(
            workload.model,
            workload.guarded_loss,
            workload.batches,
            steps=args.steps,
            repeats=args.repeats,
            lr=args.lr,
            weight_decay=args.weight_decay,
            configurations=args.configuration,
            regime=args.regime,
            on_run=lambda done, total, what, loss: progress(done, total, f"{what}, loss {loss:.4f}"),
        )
    rows = effects_table(measured)
    screen.show(table(list(rows[0]), [list(row.values()) for row in rows], right=["loss", "runs"]))
    measured.save(args.output)
    print(f"saved the table to {args.output}; plan by it with --table {args.output}, or table= in BAOC")

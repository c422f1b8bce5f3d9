"""``python -m experiments zoo``: many small tasks, each with AdamW32 at its best learning rate and with BAOC."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from baoc.tools.cli import common
from baoc.tools.cli.parser import Commands
from experiments import zoo

SUMMARY = "BAOC beside AdamW32 on many small tasks: wins, ties, losses and the worst case"
DESCRIPTION = """\
Train small tasks of the kinds that people train: fields, PINNs, images and tensors as parameters, reinforcement
learning, embeddings, graphs, sequences, images, generative models, tables. AdamW32 runs at the best of five learning
rates, BAOC at each budget at that one, a third and three times of it. A run takes seconds on one core.

Each finished run is kept in OUTPUT/runs.jsonl and not repeated: give the same command again. The page is OUTPUT.md."""
EXAMPLES = """\
examples:
  python -m experiments zoo --jobs 2 --output docs/results/zoo
  python -m experiments zoo --task siren-image --task plain-cnn --budget 0.25 --seeds 1
  python -m experiments zoo --models ~/models --task stories15m"""


def register(commands: Commands) -> None:
    parser = common.add_parser(commands, "zoo", SUMMARY, DESCRIPTION, EXAMPLES)
    count = partial(common.at_least, 1)
    parser.add_argument(
        "--task", metavar="NAME", action="append", choices=list(zoo.TASKS), default=[], help=_help("task", zoo.TASKS)
    )
    parser.add_argument(
        "--budget", action="append", choices=zoo.BUDGETS, default=[], help="repeatable (default: all of them)"
    )
    parser.add_argument(
        "--configuration",
        metavar="NAME",
        action="append",
        default=[],
        help="such as adamw-8: also train each task with it on all weights; repeatable",
    )
    parser.add_argument("--best-lr-only", action="store_true", help="leave out a third and three times of the best lr")
    parser.add_argument("--seeds", metavar="N", type=count, default=3, help="how many (default: %(default)s)")
    parser.add_argument(
        "--models",
        metavar="DIR",
        type=Path,
        help=f"has the pretrained minilm/, stories15m/ and smollm2/ (default: ${zoo.FOLDER})",
    )
    parser.add_argument(
        "--output", metavar="DIR", type=Path, default=Path("results") / "zoo", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--jobs", metavar="N", type=count, default=1, help="processes of one thread each (default: %(default)s)"
    )
    parser.add_argument("--tables-only", action="store_true", help="train nothing; make the page of what is there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Train what is missing, and write the page."""
    if args.models:
        os.environ[zoo.FOLDER] = str(args.models)  # for the other processes too
    tasks = [task for name, task in zoo.TASKS.items() if not args.task or name in args.task]
    if not args.tables_only:
        absent = [task for task in tasks if zoo.missing(task)]
        if absent:
            names = ", ".join(task.name for task in absent)
            print(f"left out: {names}, whose weights are not there. Give --models or {zoo.FOLDER}.", file=sys.stderr)
        present = [task for task in tasks if task not in absent]
        budgets, factors = args.budget or zoo.BUDGETS, (0,) if args.best_lr_only else zoo.BESIDE
        zoo.train(present, budgets, args.seeds, args.output, args.jobs, args.configuration, factors)
    words = [word for name in args.task for word in ("--task", name)]
    words += [word for budget in args.budget for word in ("--budget", budget)]
    words += [word for name in args.configuration for word in ("--configuration", name)]
    words += ["--best-lr-only"] if args.best_lr_only else []
    words += ["--seeds", str(args.seeds), "--output", str(args.output)]
    print(f"saved {zoo.write(tasks, args.seeds, args.output, ['python', '-m', 'experiments', 'zoo', *words])}")


def _help(word: str, names: dict[str, zoo.Task]) -> str:
    return f"one {word} of {', '.join(names)}; repeatable (default: all)"

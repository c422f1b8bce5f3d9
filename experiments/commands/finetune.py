"""``python -m experiments finetune``: real pretrained weights, each on a task with a test set."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from baoc.tools.cli import common
from experiments import finetune
from experiments.zoo.pretrained import FOLDER

SUMMARY = "real pretrained weights on tasks with test sets: plans beside AdamW32 and 8-bit AdamW"
DESCRIPTION = """\
Fine-tune MiniLM, ResNet-20, stories15M and SmolLM2-135M, each on a task with a test set. AdamW32 and 8-bit AdamW run
at the best of a grid of learning rates, BAOC and 8-bit Muon at AdamW32's. The weights and datasets are not part of the
project: DIR of --models has minilm/, resnet20/, stories15m/ and smollm2/, that of --data gsm8k/, cifar10/ and imdb/.

Each finished run is kept in OUTPUT/runs.jsonl and not repeated: give the same command again. The page is OUTPUT.md."""
EXAMPLES = """\
examples:
  python -m experiments finetune --models ~/models --data ~/data --output docs/results/finetune
  python -m experiments finetune --models ~/models --data ~/data --task minilm-intents --seeds 1
  python -m experiments finetune --tables-only --output docs/results/finetune"""


def register(commands: common.Commands) -> None:
    """Add the command."""
    parser = common.add_parser(commands, "finetune", SUMMARY, DESCRIPTION, EXAMPLES)
    count = partial(common.at_least, 1)
    names = ", ".join(finetune.TASKS)
    parser.add_argument(
        "--task",
        metavar="NAME",
        action="append",
        choices=list(finetune.TASKS),
        default=[],
        help=f"one task of {names}; repeatable (default: all)",
    )
    parser.add_argument("--seeds", metavar="N", type=count, default=3, help="at most so many (default: %(default)s)")
    parser.add_argument("--models", metavar="DIR", type=Path, help=f"has the weights (default: ${FOLDER})")
    parser.add_argument("--data", metavar="DIR", type=Path, help="has the datasets (default: $BAOC_DATA)")
    parser.add_argument(
        "--output", metavar="DIR", type=Path, default=Path("results") / "finetune", help="(default: %(default)s)"
    )
    parser.add_argument("--tables-only", action="store_true", help="train nothing; make the page of what is there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Train what is missing, and write the page."""
    for name, folder in ((FOLDER, args.models), ("BAOC_DATA", args.data)):
        if folder:
            os.environ[name] = str(folder)
    tasks = [task for name, task in finetune.TASKS.items() if not args.task or name in args.task]
    if not args.tables_only:
        present = [task for task in tasks if task.is_there]
        if absent := ", ".join(task.name for task in tasks if task not in present):
            print(f"left out: {absent}, whose weights are not there. Give --models or {FOLDER}.", file=sys.stderr)
        finetune.train(present, args.seeds, args.output)
    words = [word for name in args.task for word in ("--task", name)]
    words += ["--seeds", str(args.seeds), "--output", str(args.output)]
    print(f"saved {finetune.write(tasks, args.output, ['python', '-m', 'experiments', 'finetune', *words])}")

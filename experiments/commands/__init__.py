"""The command line of the experiments. A command is one module with ``register``, and one entry in ``COMMANDS``."""

from __future__ import annotations

import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence

from baoc.tools.cli import INTERRUPTED, run
from baoc.tools.cli.parser import Parser
from experiments.commands import (
    ablation,
    finetune,
    frontier,
    ladder,
    paper,
    record,
    scaling,
    statemem,
    train,
    workloads,
    zoo,
)
from experiments.methods import MethodError
from experiments.runs import RunError

COMMANDS = (paper, ablation, frontier, ladder, scaling, zoo, finetune, workloads, train, record, statemem)

DESCRIPTION = "Check what is claimed of budgeted optimizers: the paper's experiments, and what they are made of."

EXAMPLES = """\
examples:
  python -m experiments workloads
  python -m experiments paper exp1 --workload gpt-small/embedded --seeds 1 --steps 100
  python -m experiments paper exp2 --scale paper
  python -m experiments frontier --data ~/data --jobs 2"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = Parser(
        prog="python -m experiments",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    code = run(parser, COMMANDS, argv, (MethodError, RunError))
    if code == INTERRUPTED:
        kept = "Finished runs are kept. The same command goes on from the last checkpoint."
        print(f"{parser.prog}: interrupted. {kept}", file=sys.stderr)
    return code

"""The command line of the experiments. A command is one module with ``register``, and one entry in ``COMMANDS``.

An experiment of :mod:`experiments.runs.catalog` is a command by being there.
"""

from __future__ import annotations

from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence

from baoc.tools.cli import program
from baoc.tools.cli.common import Parser
from experiments.commands import ablation, frontier, record, run, statemem, train, workloads, zoo
from experiments.methods import MethodError
from experiments.runs import RunError

COMMANDS = (run, ablation, frontier, zoo, workloads, train, record, statemem)

DESCRIPTION = "Check what is claimed of budgeted optimizers: the paper's experiments, and what they are made of."

EXAMPLES = """\
examples:
  python -m experiments workloads
  python -m experiments fixed-budget --workload gpt-small/embedded --seeds 1 --steps 100
  python -m experiments sweep --method baoc@0.3 --method baoc@0.6 --method adamw8
  python -m experiments diagnostics --variant "repaired risk" --variant "lr as given" --reuse results/fixed-budget
  python -m experiments long --workload gpt2/gsm8k --data ~/data --device cuda --bf16"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = Parser(
        prog="python -m experiments",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    return program.run(parser, COMMANDS, argv, (MethodError, RunError))

"""The command line. A command is one module of this package with ``register``, and one entry in ``COMMANDS``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from baoc._version import __version__
from baoc.cli import diff, estimate, experiment, explain, frontier, plan, quiet, statemem, workloads
from baoc.cli.common import Parser, UsageError
from baoc.core.configuration import ConfigurationError
from baoc.core.plan import PlanError
from baoc.models.packages import ModelError
from baoc.planning.estimate import EstimateError
from baoc.profiling.profile import ProfileError
from baoc.report import ReportError

COMMANDS = (estimate, plan, explain, frontier, diff, experiment, workloads, statemem)
USER_ERRORS = (
    ConfigurationError,
    EstimateError,
    ModelError,
    PlanError,
    ProfileError,
    ReportError,
    UsageError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
"""What is the user's to mend: one line and exit code 2. Anything else is our bug, and shows its traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    >>> main(["estimate", "vit", "--configuration", "adamw-16", "--configuration", "adamw[m=bf16,v=int8]"])
    vit (ViT): 10,949,002 parameters in 80 tensors
    <BLANKLINE>
    configuration         short name     state  of AdamW16  bytes/parameter
    --------------------  ----------  --------  ----------  ---------------
    adamw[m=bf16,v=bf16]  adamw-16    41.9 MiB      100.0%            4.014
    adamw[m=bf16,v=int8]              31.7 MiB       75.6%            3.036
    0
    """
    quiet.hush()
    parser = Parser(prog="baoc", description="Optimizer memory as a budget you set.")
    parser.add_argument("--version", action="version", version=f"baoc {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for command in COMMANDS:
        command.register(commands)
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return 2
    try:
        args.run(args)
        sys.stdout.flush()
    except USER_ERRORS as error:
        print(f"baoc: {' '.join(_text(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    return 0


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {os.fspath(error.filename)!r}."
    return str(error)

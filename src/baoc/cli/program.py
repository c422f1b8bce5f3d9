"""A program of several commands: it parses, runs the one that was asked for, and says in one line what is wrong."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from baoc.cli import quiet, screen
from baoc.cli.common import UsageError
from baoc.core.configuration import ConfigurationError
from baoc.core.plan import PlanError
from baoc.fit import FitError
from baoc.models.packages import ModelError
from baoc.planning.estimate import EstimateError
from baoc.planning.risk import TableError
from baoc.profiling.profile import ProfileError
from baoc.report import ReportError

if TYPE_CHECKING:
    from baoc.cli.common import Commands

USER_ERRORS: tuple[type[Exception], ...] = (
    ConfigurationError,
    EstimateError,
    FitError,
    ModelError,
    PlanError,
    ProfileError,
    ReportError,
    TableError,
    UsageError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
"""What is the user's to mend: one line and exit code 2. Anything else is our bug, and shows its traceback."""


class Command(Protocol):
    """A module with one command, or with several of a kind."""

    def register(self, commands: Commands) -> None:
        """Add the parser; its default ``run`` is called with what was typed. It may return an exit code."""


def run(
    parser: ArgumentParser,
    commands: Iterable[Command],
    argv: Sequence[str] | None = None,
    errors: tuple[type[Exception], ...] = USER_ERRORS,
) -> int:
    """Run a command; returns the exit code."""
    quiet.hush()
    parsers = parser.add_subparsers(metavar="COMMAND", title="commands")
    for command in commands:
        command.register(parsers)
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return 2
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except errors as error:
        screen.complain(f"{parser.prog}:", " ".join(_text(error).split()))
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {os.fspath(error.filename)!r}."
    return str(error)

"""The argument parser of the commands. It imports nothing that takes time."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

from baoc.tools.cli.screen import printable

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class UsageError(ValueError):
    """Options are invalid or contradict each other."""


class Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors, whose options can be added on first use.

    Attributes:
        add_options: If set, it is called with the parser before the first arguments are parsed. The parser of a
            command uses it to import the module of the command only if that command runs.
    """

    add_options: Callable[[Parser], None] | None = None

    def error(self, message: str) -> NoReturn:
        """Print the error on one line and exit with code 2."""
        self.exit(2, printable(f"{self.prog}: {message} (see {self.prog} --help)") + "\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; see :class:`argparse.ArgumentParser`."""
        if self.add_options is not None:
            add_options, self.add_options = self.add_options, None
            add_options(self)
        return super().parse_known_args(args, namespace)

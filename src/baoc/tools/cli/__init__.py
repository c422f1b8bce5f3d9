"""The command line ``baoc``: parse arguments, call a command, print user errors on one line.

Each command is one entry in ``COMMANDS``. Its module is imported only if the command runs.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baoc._version import __version__
from baoc.tools.cli import screen
from baoc.tools.cli.parser import Commands, Parser, UsageError

_KNOWN_MESSAGES = {
    # CUDA kernels that a CPU build of torch, or another GPU, cannot load. The 8-bit optimizers do not use them.
    "torchao": "Failed to load ",
    # torchao registers its enums in a deprecated way.
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",
    # Only 4-bit matrix products would use it.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    # A newer torchao than diffusers supports. Only quantized checkpoints are affected.
    "diffusers.quantizers.torchao.torchao_quantizer": "Unable to import `torchao` Tensor objects",
}
"""By logger: messages of other packages that do not concern the user. All other messages are shown."""
EXAMPLES = """\
examples:
  baoc fit llama-3.1-8b --gpu 24GB
  baoc plan gpt2-small --memory 25% -o plan.json
  baoc plan --help"""
INTERRUPTED = 130  # as shells count SIGINT
_KNOWN_WARNING = "OptimState8bit does not implement _stable_hash_for_caching"  # torch's advice to torchao


class Registers(Protocol):
    """Something that adds one or more commands."""

    def register(self, commands: Commands) -> None:
        """Add parsers. The default ``run`` of a parser is called with its arguments and may return an exit code."""


@dataclass(frozen=True)
class Command:
    """A command whose module is imported on first use.

    Args:
        name: Name of the command.
        module: A module of this package. Its function ``add_<name>(parser)`` adds the description and the options.
        summary: One line for the list of commands.
    """

    name: str
    module: str
    summary: str

    def register(self, commands: Commands) -> None:
        """Add the parser of the command."""
        parser = commands.add_parser(self.name, help=self.summary, formatter_class=RawDescriptionHelpFormatter)
        assert isinstance(parser, Parser)
        parser.add_options = self._add_options

    def _add_options(self, parser: Parser) -> None:
        module = importlib.import_module(f"{__name__}.{self.module}")
        getattr(module, f"add_{self.name}")(parser)


COMMANDS = (
    Command("fit", "fit", "estimate the memory of training on each GPU, and find the best plan that fits"),
    Command("plan", "plan", "choose a configuration for each block within a memory budget"),
    Command("explain", "reports", "show what a plan contains, how it uses its budgets, and why"),
    Command("frontier", "reports", "show the predicted loss and the time over all memory budgets"),
    Command("diff", "reports", "show the differences between two plans"),
    Command("report", "reports", "write an HTML page with a model, its plans over all budgets, and a run"),
    Command("calibrate", "measure", "measure how configurations change the loss of your workload"),
    Command("measure", "measure", "time updates on this machine, for the paper's planner"),
    Command("selfcheck", "measure", "check the GPU kernels on this machine and time them"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments. The default is ``sys.argv[1:]``.

    Returns:
        The exit code.

    Example:
        >>> main(["fit", "vit", "--configuration", "adamw-16", "--configuration", "adamw[m=bf16,v=int8]"])
        vit (ViT): 10,949,002 parameters in 80 tensors
        <BLANKLINE>
        configuration            state  of AdamW16  bytes each
        --------------------  --------  ----------  ----------
        adamw-16              41.9 MiB      100.0%       4.014
        adamw[m=bf16,v=int8]  31.6 MiB       75.3%       3.022
        0
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000)  # importing torch and transformers makes many objects and little garbage
    description = "Optimizer memory as a budget you set."
    parser = Parser("baoc", description=description, epilog=EXAMPLES, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"baoc {__version__}")
    try:
        return run(parser, COMMANDS, argv)
    finally:
        gc.set_threshold(*thresholds)


def user_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that are the user's to fix. All others are bugs and show their traceback."""
    from baoc.core.configuration import ConfigurationError
    from baoc.core.plan import PlanError
    from baoc.planners.effect_table import TableError
    from baoc.planners.paper.statistics import StatisticsError
    from baoc.tools.estimate import EstimateError
    from baoc.tools.fit.memory import FitError
    from baoc.tools.models import ModelError
    from baoc.tools.report import ReportError

    ours = (
        ConfigurationError,
        EstimateError,
        FitError,
        ModelError,
        PlanError,
        StatisticsError,
        ReportError,
        TableError,
    )
    return (*ours, UsageError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def run(
    parser: ArgumentParser,
    commands: Iterable[Registers],
    argv: Sequence[str] | None = None,
    errors: tuple[type[Exception], ...] = (),
) -> int:
    """Run a command.

    Args:
        parser: The parser of the program.
        commands: Its commands.
        argv: The arguments. The default is ``sys.argv[1:]``.
        errors: User errors besides those of :func:`user_errors`.

    Returns:
        The exit code: 2 for a user error, which is printed on one line, and 130 after Ctrl-C.
    """
    hide_known_messages()
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
    except BrokenPipeError:  # a reader such as `head` closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if not isinstance(error, (*errors, *user_errors())):
            raise
        screen.complain(f"{parser.prog}:", " ".join(_text(error).split()))
        return 2
    return 0


def hide_known_messages() -> None:
    """Hide log messages and warnings of other packages that do not concern the user."""
    for name, keep in _FILTERS.items():
        logging.getLogger(name).addFilter(keep)
    warnings.filterwarnings("ignore", message=_KNOWN_WARNING, category=UserWarning)


def _without(message: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: message not in record.getMessage()


_FILTERS = {name: _without(message) for name, message in _KNOWN_MESSAGES.items()}  # a logger adds each one only once


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {os.fspath(error.filename)!r}."
    return str(error)

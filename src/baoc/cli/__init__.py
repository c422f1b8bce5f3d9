"""The command line. A command is one module of this package with ``register``, and one entry in ``COMMANDS``."""

from __future__ import annotations

from collections.abc import Sequence

from baoc._version import __version__
from baoc.cli import calibrate, diff, explain, fit, frontier, plan, program, report, selfcheck
from baoc.cli.common import Parser

COMMANDS = (fit, plan, explain, frontier, diff, report, calibrate, selfcheck)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    >>> main(["fit", "vit", "--configuration", "adamw-16", "--configuration", "adamw[m=bf16,v=int8]"])
    vit (ViT): 10,949,002 parameters in 80 tensors
    <BLANKLINE>
    configuration            state  of AdamW16  bytes each
    --------------------  --------  ----------  ----------
    adamw-16              41.9 MiB      100.0%       4.014
    adamw[m=bf16,v=int8]  31.6 MiB       75.3%       3.022
    0
    """
    parser = Parser(prog="baoc", description="Optimizer memory as a budget you set.")
    parser.add_argument("--version", action="version", version=f"baoc {__version__}")
    return program.run(parser, COMMANDS, argv)

"""The command line ``baoc``.

Each command is one entry in ``COMMANDS``. Its module is imported only if the command runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from baoc._version import __version__
from baoc.tools.cli.common import Parser
from baoc.tools.cli.program import Command, run

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
    parser = Parser(prog="baoc", description="Optimizer memory as a budget you set.")
    parser.add_argument("--version", action="version", version=f"baoc {__version__}")
    return run(parser, COMMANDS, argv)

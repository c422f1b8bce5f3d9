"""The command line of the pictures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from baoc.tools.cli.parser import Parser
from experiments import pictures
from experiments.pictures import effects, memory, plans, report, run
from experiments.runs.figures import can_draw

PICTURES = {
    "memory.png": memory.draw,
    "plans.png": plans.draw,
    "effects.png": effects.draw,
    "run.png": run.draw,
    "report.png": report.draw,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Draw all of them, or those that are named; returns the exit code."""
    parser = Parser(prog="python -m experiments.pictures", description=(pictures.__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", metavar="FOLDER", type=Path, default=Path("docs/pictures"), help="(%(default)s)")
    parser.add_argument("--only", metavar="NAME", choices=PICTURES, action="append", help=", ".join(PICTURES))
    args = parser.parse_args(argv)
    if not can_draw():
        parser.error("pictures need matplotlib: pip install -e '.[plot]'")
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.only or PICTURES:
        try:
            PICTURES[name](args.output / name)
        except FileNotFoundError as error:
            parser.error(str(error))
        print(args.output / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())

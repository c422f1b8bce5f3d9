"""``python -m experiments.rules``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.rules import cells, page
from experiments.rules.running import train_all
from experiments.runs import Store
from experiments.runs.page import write_page
from experiments.workloads import Options


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.rules", description=__doc__)
    parser.add_argument("--data", help="has alpaca/, gsm8k/ and cifar10/ (default: $BAOC_DATA, or the hub)")
    parser.add_argument("--output", type=Path, required=True, help="a folder for the runs; the page is OUTPUT.md")
    parser.add_argument("--only", nargs="*", default=list(cells.QUESTIONS), choices=list(cells.QUESTIONS))
    parser.add_argument("--tables-only", action="store_true", help="train nothing; make the page of what is there")
    arguments = parser.parse_args(argv)
    if not arguments.tables_only:
        with Store(arguments.output).writing("rules") as store:
            for question in arguments.only:
                train_all(cells.QUESTIONS[question](), store, Options(data=arguments.data))
    command = shlex.join(["python", "-m", "experiments.rules", "--output", str(arguments.output)])
    print(write_page(arguments.output, page.text(Store(arguments.output), command)), file=sys.stderr)


if __name__ == "__main__":
    main()

"""Run their protocol with their optimizers and our plans: ``python -m benchmarks.epfl --source DIR --text FILE``.

DIR is github.com/epfml/llm-optimizer-benchmark, FILE is what it downloads as the raw text of shakespeare-char (tiny
Shakespeare). Each finished run is kept in OUTPUT/runs.jsonl and not repeated. The page is OUTPUT.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.epfl import page, running
from benchmarks.epfl.source import SourceError
from experiments.runs import RunError, Store
from experiments.runs.page import write_page


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, and write the page; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.epfl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", metavar="DIR", type=Path, help="their code")
    parser.add_argument("--text", metavar="FILE", type=Path, help="the raw text")
    parser.add_argument("--seeds", metavar="N", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path("results") / "epfl")
    parser.add_argument("--tables-only", action="store_true", help="train nothing; make the page of what is there")
    args = parser.parse_args(argv)
    if not args.tables_only and not (args.source and args.text):
        parser.error("give --source and --text, or --tables-only.")
    try:
        if not args.tables_only:
            with Store(args.output).writing("epfl") as store:
                running.run(args.source, args.text, args.seeds, store)
        rows = Store(args.output, must_exist=True).rows
    except (SourceError, RunError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(f"saved {write_page(args.output, page.text(rows))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

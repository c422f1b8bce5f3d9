"""Commands: kill a training script, damage its files, interrupt an optimizer."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from benchmarks.torture import interrupt, kill, mutate

MODULES = {"kill": kill, "mutate": mutate, "interrupt": interrupt}
TIMES = {"kill": 200, "mutate": 5000, "interrupt": 1000}


def main() -> int:
    """Run one of them. The exit code is 1 if anything was found."""
    os.environ.setdefault("BAOC_QUIET", "1")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torture", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, times in TIMES.items():
        command = commands.add_parser(name)
        command.add_argument("--times", type=int, default=times, help="how many; mutate: of each kind of file")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument(
            "--only", nargs="*", help="kill: scenarios; mutate: kinds of file; interrupt: actions (default: all)"
        )
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    found = MODULES[args.command].run(args.times, args.seed, args.only)
    for key, value in found.items():
        if isinstance(value, list):
            print(f"{key}: {len(value)}")
            for line in value:
                print(f"  {line}")
        else:
            print(f"{key}: {value}")
    return 1 if any(value for value in found.values() if isinstance(value, list)) else 0


if __name__ == "__main__":
    sys.exit(main())

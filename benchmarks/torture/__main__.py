"""Commands: kill, damage, interrupt, split, race and mislead an optimizer."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from benchmarks.torture import distributed, interrupt, kill, mutate, options, race

COMMANDS = {
    "kill": (kill.run, 200, "scenarios"),
    "mutate": (mutate.run, 5000, "kinds of file"),
    "interrupt": (interrupt.run, 1000, "actions"),
    "distributed": (distributed.run, 100, "faults"),
    "race": (race.run, 200, "overlaps"),
    "arguments": (options.run_arguments, 2000, "groups of arguments"),
    "defaults": (options.run_defaults, 200, "planners"),
}
"""By name: the function, how often by default, and what ``--only`` selects."""


def main() -> int:
    """Run one of them. The exit code is 1 if anything was found."""
    os.environ.setdefault("BAOC_QUIET", "1")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torture", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, times, kinds) in COMMANDS.items():
        command = commands.add_parser(name)
        command.add_argument("--times", type=int, default=times, help="how many; mutate: of each kind of file")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--only", nargs="*", help=f"{kinds} (default: all)")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    found = COMMANDS[args.command][0](args.times, args.seed, args.only)
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

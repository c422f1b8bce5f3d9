"""The commands of the torture."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from benchmarks.torture import kill, mutate


def main() -> int:
    """Run one of them; the exit code says whether anything was found."""
    os.environ.setdefault("BAOC_QUIET", "1")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torture", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, times in (("kill", 200), ("mutate", 5000)):
        command = commands.add_parser(name)
        command.add_argument("--times", type=int, default=times, help="kills in all, or mutations of each kind of file")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--only", nargs="*", help="scenarios, or kinds of file (default: all)")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    module = kill if args.command == "kill" else mutate
    found = module.run(args.times, args.seed, args.only)
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

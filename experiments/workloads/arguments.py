"""A workload and its options on a command line."""

from __future__ import annotations

import argparse
from dataclasses import fields
from functools import partial

from baoc.tools.cli.common import at_least
from experiments.workloads.base import Options


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Which one."""
    parser.add_argument(
        "workload", metavar="NAME", help="one of `python -m experiments workloads`, or a .py file with your own"
    )


def add_data(parser: argparse.ArgumentParser) -> None:
    """Where its data is."""
    parser.add_argument(
        "--data", metavar="DIR", help="has alpaca/, gsm8k/, cifar10/, imagenet/ (default: $BAOC_DATA, or the hub)"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything in :class:`~experiments.workloads.Options`."""
    count = partial(at_least, 1)
    add_data(parser)
    parser.add_argument(
        "--cache", metavar="DIR", help="for trained tokenizers (default: $BAOC_CACHE, or ~/.cache/baoc)"
    )
    parser.add_argument(
        "--pretrained",
        metavar="PATH",
        help="weights to start from: a folder, a folder with one folder per size (gpt2/, t5-base/), a hub id, or `hub`",
    )
    parser.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="compute losses under bfloat16 autocast",
    )
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--batch-size", metavar="N", type=count, help="instead of the workload's own")
    parser.add_argument("--length", metavar="N", type=count, help="of sequences, in tokens, instead of the workload's")


def options_of(arguments: argparse.Namespace) -> Options:
    """What was typed."""
    return Options(**{field.name: getattr(arguments, field.name) for field in fields(Options)})

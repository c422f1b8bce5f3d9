"""A workload and its options on a command line."""

from __future__ import annotations

import argparse
from dataclasses import fields
from functools import partial

from baoc.cli.common import at_least
from experiments.workloads.base import Options


def add_options(parser: argparse.ArgumentParser) -> None:
    """Everything in :class:`~experiments.workloads.Options`."""
    count = partial(at_least, 1)
    parser.add_argument("--data", help="folder with alpaca/, gsm8k/, cifar10/ (default: $BAOC_DATA, or else the hub)")
    parser.add_argument("--cache", help="folder for trained tokenizers (default: $BAOC_CACHE, or else ~/.cache/baoc)")
    parser.add_argument("--pretrained", help="local path or hub id of weights to start from")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--batch-size", metavar="N", type=count, help="instead of the workload's own")
    parser.add_argument("--length", metavar="N", type=count, help="of sequences, in tokens, instead of the workload's")


def options_of(arguments: argparse.Namespace) -> Options:
    """What was typed."""
    return Options(**{field.name: getattr(arguments, field.name) for field in fields(Options)})

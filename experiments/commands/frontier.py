"""``python -m experiments frontier``: the loss at every budget, beside all that could be had for as many bytes."""

from __future__ import annotations

import argparse
from dataclasses import replace

from baoc.tools.cli import common
from baoc.tools.cli.parser import Commands
from experiments import frontier, runs
from experiments.commands.ablation import add_arguments, said
from experiments.frontier.catalog import BY_TYPE, OURS, PAPERS, PEERS, UNIFORM
from experiments.workloads.arguments import options_of

SUMMARY = "BAOC at every budget, single configurations and others' optimizers: test loss against bytes"
DESCRIPTION = """\
Train BAOC at budgets from nothing to all of AdamW16's state, every single configuration, and others' optimizers, on
seven workloads. BAOC and all of ours run at the learning rate that is best for AdamW32, others at their own.

Each finished run is kept in OUTPUT/runs.jsonl and not repeated: give the same command again. The page is OUTPUT.md."""
EXAMPLES = """\
examples:
  python -m experiments frontier --data ~/data --jobs 2 --output docs/results/frontier
  python -m experiments frontier --workload gpt-small/alpaca --method baoc@0.25 --method adamw8 --seeds 1"""


def register(commands: Commands) -> None:
    parser = common.add_parser(commands, "frontier", SUMMARY, DESCRIPTION, EXAMPLES)
    add_arguments(parser, "frontier", [setting.workload for setting in frontier.SETTINGS])
    parser.add_argument(
        "--method",
        metavar="NAME",
        action="append",
        choices=[*OURS, *PAPERS, *BY_TYPE, *UNIFORM, *PEERS],
        default=[],
        help="one of the experiment's own; repeatable (default: all)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Train what is missing, and write the page and the figure."""
    settings = [
        replace(setting, steps=args.steps or setting.steps)
        for setting in frontier.SETTINGS
        if not args.workload or setting.workload in args.workload
    ]
    if not args.tables_only:
        options = runs.RunOptions(options_of(args), eval_batches=args.eval_batches)
        frontier.train(settings, _chosen(args.method), args.output, args.seeds, options, args.jobs)
    for path in frontier.write(settings, args.output, said(args, "frontier")):
        print(f"saved {path}")


def _chosen(names: list[str]) -> frontier.Chosen:
    every = frontier.Chosen()
    if not names:
        return every

    def kept(group: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in group if name in names)

    return frontier.Chosen(kept(every.ours), kept(every.peers), kept(every.others))

"""``baoc experiment NAME``: the paper's experiments, from training to tables and figures."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from types import ModuleType

from baoc.cli import checkout, common

SUMMARY = "run one of the paper's experiments: train, tune, make its tables and figures"

NAMES = {
    "fixed-budget": "all methods, BAOC at half of AdamW16's state",
    "sweep": "BAOC and two heuristics over many budgets",
    "long": "a longer schedule, with Muon, COSMOS and SPAM",
    "diagnostics": "BAOC with one setting changed at a time",
    "partition": "BAOC with other ways to cut blocks",
    "online": "planning anew during training, with and without inheriting state",
}

DESCRIPTION = """\
Train every method on every workload, and write the paper's tables (Markdown and CSV) and figures.

A method tries its learning rates on one seed; the validation split chooses; all seeds are trained with that one. Each
finished run is kept in OUTPUT/runs.jsonl and not repeated, and a run that was stopped goes on from its last checkpoint:
give the same command again. More seeds, methods or workloads can be added later.

experiments:
""" + "\n".join(f"  {name:13} {text}" for name, text in NAMES.items())

EXAMPLES = """\
examples:
  baoc experiment fixed-budget --workload gpt-small/embedded --seeds 1 --steps 100
  baoc experiment sweep --method baoc@0.3 --method baoc@0.6 --method adamw8
  baoc experiment diagnostics --variant "paper's risk" --variant "lr as given" --reuse results/fixed-budget
  baoc experiment long --workload gpt2/gsm8k --data ~/data --device cuda --bf16
  baoc experiment fixed-budget --tables-only"""


def register(commands: common.Commands) -> None:
    """Add the command to the parser of ``baoc``."""
    parser = common.add_parser(commands, "experiment", SUMMARY, DESCRIPTION, EXAMPLES)
    count = partial(common.at_least, 1)
    parser.add_argument("experiment", metavar="NAME", choices=NAMES, help=f"one of {', '.join(NAMES)}")
    parser.add_argument(
        "--workload",
        metavar="NAME",
        action="append",
        default=[],
        help="one of `baoc workloads`, or a .py file with your own; repeatable (default: small ones, without download)",
    )
    parser.add_argument(
        "--method",
        metavar="NAME",
        action="append",
        default=[],
        help="such as adamw16, muon or baoc@0.25, or file.py:function; repeatable (default: the experiment's own)",
    )
    parser.add_argument(
        "--variant",
        metavar="NAME",
        action="append",
        default=[],
        help="of BAOC's settings, such as 'gamma 0.9'; repeatable (default: all that the experiment has)",
    )
    parser.add_argument("--seeds", metavar="N", type=count, default=3, help="how many (default: %(default)s)")
    parser.add_argument("--steps", metavar="N", type=count, help="of each run (default: the workload's own number)")
    parser.add_argument("--output", metavar="DIR", type=Path, help="where results go (default: results/NAME)")
    parser.add_argument(
        "--reuse",
        metavar="DIR",
        action="append",
        type=Path,
        default=[],
        help="another experiment's OUTPUT, whose runs are copied where they are the same; repeatable",
    )
    parser.add_argument(
        "--no-tuning", action="store_true", help="take the middle of each method's learning rates, untried"
    )
    parser.add_argument("--data", metavar="DIR", help="has alpaca/, gsm8k/, cifar10/ (default: $BAOC_DATA, or the hub)")
    parser.add_argument("--pretrained", metavar="PATH", help="weights to start from: a path or a hub id")
    parser.add_argument("--device", type=common.device, default="cpu", help="(default: %(default)s)")
    parser.add_argument("--bf16", action="store_true", help="compute losses under bfloat16 autocast")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--batch-size", metavar="N", type=count, help="instead of the workload's own")
    parser.add_argument("--length", metavar="N", type=count, help="of sequences, in tokens, instead of the workload's")
    parser.add_argument("--eval-batches", metavar="N", type=count, help="evaluate on so many batches only")
    parser.add_argument(
        "--checkpoint-every", metavar="N", type=count, default=100, help="in steps (default: %(default)s)"
    )
    parser.add_argument("--tables-only", action="store_true", help="train nothing; make tables of what is there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Train what is missing, and print where the results are."""
    runs = checkout.load("runs")
    methods = checkout.load("methods")
    try:
        request = _request(args, runs)
        files = runs.tables_of(request) if args.tables_only else runs.run(request)
    except (runs.RunError, methods.MethodError) as error:
        raise common.UsageError(str(error)) from error
    print(files[0].read_text(encoding="utf-8"))
    for file in files:
        print(f"saved {file}")


def _request(args: argparse.Namespace, runs: ModuleType) -> object:
    shared = ("data", "pretrained", "bf16", "checkpointing", "batch_size", "length")
    workload = checkout.load("workloads").Options(**{name: getattr(args, name) for name in shared})
    return runs.Request(
        args.experiment,
        output=args.output,
        reuse=tuple(args.reuse),
        workloads=tuple(args.workload),
        methods=tuple(args.method),
        variants=tuple(args.variant),
        seeds=args.seeds,
        steps=args.steps,
        tuning=not args.no_tuning,
        options=runs.RunOptions(workload, args.device, args.eval_batches, args.checkpoint_every),
    )

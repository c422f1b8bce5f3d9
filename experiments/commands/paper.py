"""``python -m experiments paper NAME``: one of the paper's experiments, from training to tables and figures.

``python -m experiments states``, which is ours, runs in the same way.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from baoc.tools.cli import common
from baoc.tools.cli.parser import Commands
from experiments import runs
from experiments.runs import ranks
from experiments.runs.catalog import FULL, PAPER, SCALES, SMALL, STATES_EXPERIMENT
from experiments.workloads.arguments import add_options, options_of
from experiments.workloads.weights import HUB

SUMMARY = "one of the paper's experiments, small on a CPU or at the paper's scale"
_PROTOCOL = """\
A method tries its learning rates on one seed; the validation split chooses; all seeds are trained with that one. Each
finished run is kept in runs.jsonl and not repeated, and a run that was stopped goes on from its last checkpoint: give
the same command again. More seeds, methods or workloads can be added later."""
DESCRIPTION = """\
Run one of the paper's experiments, and write its table with the paper's columns, its figure, and the page OUTPUT.md
with what the paper says and what was seen.

{experiments}

--scale small trains small models of the same families on CPUs. --scale paper trains the pretrained models of the paper
on one GPU, or on several with torchrun, in bfloat16 autocast. What is missing is said before anything is trained.

{protocol}"""
EXAMPLES = """\
examples:
  python -m experiments paper exp1
  python -m experiments paper exp2 --data ~/data --seeds 1 --steps 100 --jobs 2
  python -m experiments paper diagnostics --variant no-SGD --variant "gamma=0.9"
  python -m experiments paper exp1 --scale paper --workload gpt2/gsm8k
  torchrun --nproc-per-node 3 -m experiments paper exp3 --scale paper
  python -m experiments paper exp1 --workload smollm2/gsm8k --pretrained ~/models/smollm2 --data ~/data"""
_STATES_EXAMPLES = """\
examples:
  python -m experiments states --workload gpt-small/embedded --seeds 1 --steps 100
  python -m experiments states --tables-only"""


def register(commands: Commands) -> None:
    """Add both commands."""
    listed = "\n".join(f"  {name:<12} {experiment.summary}" for name, experiment in PAPER.items())
    description = DESCRIPTION.format(experiments=listed, protocol=_PROTOCOL)
    parser = common.add_parser(commands, "paper", SUMMARY, description, EXAMPLES)
    parser.add_argument("experiment", metavar="NAME", choices=list(PAPER), help=f"one of {', '.join(PAPER)}")
    parser.add_argument("--scale", choices=SCALES, default=SMALL, help="(default: %(default)s)")
    parser.add_argument(
        "--variant",
        metavar="NAME",
        action="append",
        default=[],
        help="of the paper's planner, such as 'gamma=0.9'; repeatable (default: all that the experiment has)",
    )
    parser.add_argument("--epochs", metavar="N", type=partial(common.at_least, 1), help="instead of --steps")
    _add_arguments(parser, "results/paper-SCALE, with a folder for each experiment")
    parser.set_defaults(run=run, device=None, bf16=None)

    summary = STATES_EXPERIMENT.summary
    description = f"{summary[0].upper()}{summary[1:]}.\n\n{_PROTOCOL}"
    parser = common.add_parser(commands, "states", summary, description, _STATES_EXAMPLES)
    _add_arguments(parser, "results/states")
    parser.set_defaults(run=run, experiment="states", scale=SMALL, variant=[], epochs=None)


def run(args: argparse.Namespace) -> None:
    """Train what is missing, and print where the results are."""
    request = _request(args)
    files = runs.tables_of(request) if args.tables_only else runs.run(request)
    if files and ranks.is_first():
        print(files[0].read_text(encoding="utf-8"))
        for file in files:
            print(f"saved {file}")


def _add_arguments(parser: argparse.ArgumentParser, output: str) -> None:
    count = partial(common.at_least, 1)
    parser.add_argument(
        "--workload",
        metavar="NAME",
        action="append",
        default=[],
        help="one of `python -m experiments workloads`, or a .py file with your own; repeatable "
        "(default: the experiment's own)",
    )
    parser.add_argument(
        "--method",
        metavar="NAME",
        action="append",
        default=[],
        help="such as adamw16, muon or baoc@0.25, or file.py:function; repeatable (default: the experiment's own)",
    )
    parser.add_argument("--seeds", metavar="N", type=count, default=3, help="how many (default: %(default)s)")
    parser.add_argument("--steps", metavar="N", type=count, help="of each run (default: the workload's own number)")
    parser.add_argument("--output", metavar="DIR", type=Path, help=f"where results go (default: {output})")
    parser.add_argument(
        "--reuse",
        metavar="DIR",
        action="append",
        type=Path,
        default=[],
        help="a folder with runs.jsonl, whose runs are copied where they are the same; repeatable",
    )
    parser.add_argument(
        "--no-tuning", action="store_true", help="take the middle of each method's learning rates, untried"
    )
    parser.add_argument("--jobs", metavar="N", type=count, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--device", type=common.device, default="cpu", help="(default: cpu; at --scale paper cuda)")
    add_options(parser)
    parser.add_argument("--eval-batches", metavar="N", type=count, help="evaluate on so many batches only")
    parser.add_argument(
        "--checkpoint-every", metavar="N", type=count, default=100, help="in steps (default: %(default)s)"
    )
    parser.add_argument("--tables-only", action="store_true", help="train nothing; make tables of what is there")


def _request(args: argparse.Namespace) -> runs.Request:
    is_full = args.scale == FULL
    args.device = args.device or ("cuda" if is_full else "cpu")
    args.bf16 = is_full if args.bf16 is None else args.bf16
    args.pretrained = args.pretrained or (HUB if is_full else None)
    return runs.Request(
        args.experiment,
        output=args.output,
        reuse=tuple(args.reuse),
        workloads=tuple(args.workload),
        methods=tuple(args.method),
        variants=tuple(args.variant),
        seeds=args.seeds,
        steps=args.steps,
        epochs=args.epochs,
        tuning=not args.no_tuning,
        options=runs.RunOptions(options_of(args), args.device, args.eval_batches, args.checkpoint_every),
        scale=args.scale,
        jobs=args.jobs,
    )

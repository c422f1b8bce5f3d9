"""``python -m experiments NAME``: one of the paper's experiments, from training to tables and figures."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from baoc.tools.cli import common
from experiments import runs
from experiments.workloads.arguments import add_options, options_of

DESCRIPTION = """\
{what}.

Train every method on every workload, and write the paper's tables (Markdown and CSV) and figures.

A method tries its learning rates on one seed; the validation split chooses; all seeds are trained with that one. Each
finished run is kept in OUTPUT/runs.jsonl and not repeated, and a run that was stopped goes on from its last checkpoint:
give the same command again. More seeds, methods or workloads can be added later."""

EXAMPLES = """\
examples:
  python -m experiments {name} --workload gpt-small/embedded --seeds 1 --steps 100
  python -m experiments {name} --workload gpt2/gsm8k --data ~/data --device cuda --bf16
  python -m experiments {name} --tables-only"""


def register(commands: common.Commands) -> None:
    """Add a command for every experiment of the catalog."""
    for name, experiment in runs.EXPERIMENTS.items():
        summary = experiment.summary
        description = DESCRIPTION.format(what=summary[0].upper() + summary[1:])
        parser = common.add_parser(commands, name, summary, description, EXAMPLES.format(name=name))
        _add_arguments(parser, name)
        parser.set_defaults(run=run, experiment=name)


def run(args: argparse.Namespace) -> None:
    """Train what is missing, and print where the results are."""
    request = _request(args)
    files = runs.tables_of(request) if args.tables_only else runs.run(request)
    print(files[0].read_text(encoding="utf-8"))
    for file in files:
        print(f"saved {file}")


def _add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    count = partial(common.at_least, 1)
    parser.add_argument(
        "--workload",
        metavar="NAME",
        action="append",
        default=[],
        help="one of `python -m experiments workloads`, or a .py file with your own; repeatable "
        "(default: small ones, without download)",
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
    parser.add_argument("--output", metavar="DIR", type=Path, help=f"where results go (default: results/{name})")
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
    parser.add_argument("--device", type=common.device, default="cpu", help="(default: %(default)s)")
    add_options(parser)
    parser.add_argument("--eval-batches", metavar="N", type=count, help="evaluate on so many batches only")
    parser.add_argument(
        "--checkpoint-every", metavar="N", type=count, default=100, help="in steps (default: %(default)s)"
    )
    parser.add_argument("--tables-only", action="store_true", help="train nothing; make tables of what is there")


def _request(args: argparse.Namespace) -> runs.Request:
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
        options=runs.RunOptions(options_of(args), args.device, args.eval_batches, args.checkpoint_every),
    )

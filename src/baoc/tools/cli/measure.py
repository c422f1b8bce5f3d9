"""The commands that measure on this machine: ``calibrate``, ``measure`` and ``selfcheck``."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from functools import partial
from pathlib import Path

import torch

from baoc.core.configuration import BUDGET_REFERENCE, parse
from baoc.core.text import table
from baoc.plan import measured_times
from baoc.planners.base import AUTO
from baoc.planners.model_facts import REGIMES, ModelFacts
from baoc.planners.paper.planner import PaperPlanner
from baoc.planners.paper.problem import GRANULARITIES
from baoc.tools.cli import common, screen
from baoc.tools.cli.parser import Parser, UsageError
from baoc.tools.cli.plan import load_workload
from baoc.tools.models.resolve import resolve

# ---- calibrate ----

CALIBRATE = """\
Train your model for a few hundred steps with each configuration on each role
(hidden weights, embeddings, heads), and compare the losses with AdamW32. The
result is an effect table for `baoc plan --table FILE` and for
EffectPlanner(table=FILE).

SOURCE is file.py:function, as for `baoc plan`. Every run starts from a copy of
the model."""

CALIBRATE_EXAMPLES = """\
examples:
  baoc calibrate train.py:make_workload --lr 3e-4 -o mine.json
  baoc calibrate train.py:make_workload --configuration lion-8 -o mine.json
  baoc plan train.py:make_workload --table mine.json --memory 25%"""


def add_calibrate(parser: Parser) -> None:
    """Add the options of ``baoc calibrate SOURCE -o FILE``."""
    parser.description, parser.epilog = CALIBRATE, CALIBRATE_EXAMPLES
    count = partial(common.at_least, 1)
    parser.add_argument("source", metavar="SOURCE", help="file.py:function")
    parser.add_argument(
        "-o", "--output", metavar="FILE", required=True, help="the effect table to write, such as mine.json"
    )
    parser.add_argument("--steps", metavar="N", type=count, default=200, help="steps of a run (default: %(default)s)")
    parser.add_argument(
        "--repeats", metavar="N", type=count, default=2, help="runs of each configuration (default: %(default)s)"
    )
    parser.add_argument(
        "--configuration",
        metavar="CONFIG",
        action="append",
        help="a configuration to measure; repeatable (default: the most useful ones)",
    )
    parser.add_argument("--regime", choices=(AUTO, *REGIMES), default=AUTO, help="(default: detected from the model)")
    parser.add_argument(
        "--lr",
        metavar="X",
        type=common.positive_number,
        default=1e-3,
        help="best learning rate of AdamW (default: %(default)s)",
    )
    parser.add_argument("--weight-decay", metavar="X", type=common.number, default=0.01, help="(default: %(default)s)")
    parser.add_argument(
        "--seed", metavar="N", type=common.whole, default=0, help="seed of torch (default: %(default)s)"
    )
    common.add_json(parser)
    parser.set_defaults(run=run_calibrate)


def run_calibrate(args: argparse.Namespace) -> None:
    """Print the effects as text or JSON, and write the table."""
    from baoc.tools.calibrate import calibrate, effects_table, reach

    common.check_writable(args.output)
    torch.manual_seed(args.seed)
    with contextlib.redirect_stdout(sys.stderr):  # keep prints of user code out of the output
        workload = load_workload(args.source)
    with contextlib.redirect_stdout(sys.stderr), screen.Progress("calibration", "run") as progress:
        measured = calibrate(
            workload.model,
            workload.guarded_loss,
            workload.batches,
            steps=args.steps,
            repeats=args.repeats,
            lr=args.lr,
            weight_decay=args.weight_decay,
            configurations=args.configuration,
            regime=args.regime,
            on_run=lambda done, total, what, loss: progress(done, total, f"{what}, loss {loss:.4f}"),
        )
    rows = effects_table(measured)
    if args.json:
        measured.save(args.output)
        print(json.dumps({"output": args.output, "effects": rows}, indent=2))
        return
    screen.show(table(list(rows[0]), [list(row.values()) for row in rows], right=["loss", "runs"]))
    with contextlib.redirect_stdout(sys.stderr):
        facts, tokens = ModelFacts.of(workload.model), workload.tokens()
    if tokens:
        screen.show(reach(facts, next(iter(measured.effects)), args.steps, tokens))
    measured.save(args.output)
    screen.show(f"saved the effect table to {args.output}: use --table or EffectPlanner(table=...).")


# ---- measure ----

MEASURE = """\
Time one update of every structural unit of a model with each of the paper's
configurations. The result is a file for PaperPlanner(times=FILE) and for
`baoc plan --planner paper --times FILE`. Weights, gradients and state of one
unit at a time are made for it; the model itself is not.

SOURCE is any model of `baoc fit`, such as gpt2-small, a config.json, or
file.py:function."""

MEASURE_EXAMPLES = """\
examples:
  baoc measure gpt2-small --device cuda -o times.json
  baoc plan train.py:make_workload --planner paper --times times.json"""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_measure(parser: Parser) -> None:
    """Add the options of ``baoc measure SOURCE -o FILE``."""
    parser.description, parser.epilog = MEASURE, MEASURE_EXAMPLES
    default = PaperPlanner()
    parser.add_argument("source", metavar="SOURCE", help="a model, or file.py:function")
    parser.add_argument("-o", "--output", metavar="FILE", required=True, help="the file to write, such as times.json")
    parser.add_argument("--device", type=common.device, default="cpu", help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of parameters (default: %(default)s)")
    parser.add_argument(
        "--granularity", choices=GRANULARITIES, default=default.granularity, help="(default: %(default)s)"
    )
    parser.add_argument(
        "--configuration",
        metavar="CONFIG",
        action="append",
        help="a configuration to measure; repeatable (default: the paper's)",
    )
    common.add_json(parser)
    parser.set_defaults(run=run_measure)


def run_measure(args: argparse.Namespace) -> None:
    """Print the ratios to AdamW16 as text or JSON, and write the times."""
    common.check_writable(args.output)
    with contextlib.redirect_stdout(sys.stderr), screen.working("building the model"):  # its code may print
        facts = ModelFacts.of(resolve(args.source))
    try:
        candidates = args.configuration or PaperPlanner().candidates
        planner = PaperPlanner(granularity=args.granularity, candidates=candidates)
    except ValueError as error:
        raise UsageError(str(error)) from error
    with screen.working("timing updates"):
        times = measured_times(planner, facts, torch.device(args.device), DTYPES[args.dtype])
    times.save(args.output)
    reference, units = str(BUDGET_REFERENCE), times.seconds.values()
    titles = ["least", "mean", "most"]
    found: dict[str, dict[str, float]] = {}
    for name in next(iter(units), {}):
        ratios = [unit[name] / unit[reference] for unit in units]
        found[parse(name).alias] = dict(zip(titles, (min(ratios), statistics.fmean(ratios), max(ratios))))
    if args.json:
        content = {"output": args.output, "device": times.device, "units": len(units), "ratios": found}
        print(json.dumps(content, indent=2))
        return
    rows = [[name, *(f"{ratio:.2f}" for ratio in each.values())] for name, each in found.items()]
    screen.show(table(["ratio to adamw-16", *titles], rows, right=titles))
    screen.show(f"{len(units)} different units on {times.device}, {args.dtype}")
    screen.show(f"saved the update times to {args.output}. Plan with --times, or with PaperPlanner(times=...).")


# ---- selfcheck ----

SELFCHECK = """\
Compare the Triton kernels on a GPU with the reference on the CPU, for every
configuration, dtype and kind of row. Time steps beside torch's fused AdamW,
torchao and bitsandbytes if they are installed. This takes some minutes, mostly
to compile. Paste the JSON into an issue. The exit code is 1 if a comparison
fails."""

SELFCHECK_EXAMPLES = """\
examples:
  baoc selfcheck --output selfcheck.json
  TRITON_INTERPRET=1 baoc selfcheck --device cpu --tiny   # without a GPU"""


def add_selfcheck(parser: Parser) -> None:
    """Add the options of ``baoc selfcheck``."""
    parser.description, parser.epilog = SELFCHECK, SELFCHECK_EXAMPLES
    parser.add_argument("--device", type=common.device, default="cuda", help="(default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="check few configurations and small tensors")
    parser.add_argument("--no-times", action="store_true", help="compare only")
    parser.add_argument("--output", metavar="FILE", help="also write the JSON to a file")
    common.add_json(parser)
    parser.set_defaults(run=run_selfcheck)


def run_selfcheck(args: argparse.Namespace) -> int:
    """Print the result as text or JSON; the exit code is 1 if a comparison fails."""
    from baoc.optim.kernels import triton

    device = torch.device(args.device)
    obstacle = triton.obstacle(device)
    if obstacle is None and device.type == "cuda" and not torch.cuda.is_available():
        obstacle = "torch finds no GPU; use TRITON_INTERPRET=1 and --device cpu to check a tiny case without one"
    if obstacle:
        raise UsageError(f"cannot check {device}: {obstacle}.")
    common.check_writable(args.output)
    from baoc.tools.selfcheck import check

    with screen.Progress("selfcheck", "part") as progress:
        report = check(device, tiny=args.tiny, times=not args.no_times, on_part=progress)
    text = json.dumps(report.content(), indent=2)
    if args.json:
        print(text)
    else:
        screen.show(str(report))
    if args.output:
        Path(args.output).write_text(text + "\n")
    return 0 if report.passed else 1

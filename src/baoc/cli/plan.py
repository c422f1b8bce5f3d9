"""``baoc plan``: from a model and its data, or from a saved profile, to a plan within a budget."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from functools import partial
from pathlib import Path

import torch

from baoc.cli import common, screen
from baoc.cli.workload import is_workload, load_workload
from baoc.core.text import human_bytes
from baoc.models import MODELS
from baoc.models.resolve import resolve
from baoc.planning.estimate import trainable_shapes
from baoc.planning.planner import DEFAULT_MEMORY, Planner, check_budgets
from baoc.profiling.facts import Facts
from baoc.profiling.profile import Profile

SUMMARY = "warm up, then plan which block gets which configuration within a budget"

DESCRIPTION = """\
Make a plan: the configuration of every block that has the least risk within a
memory and a time budget.

SOURCE is one of
  file.py:function   a function without arguments that returns (model, batches,
                     loss_fn), or an object with .model, .batches and .loss;
                     loss_fn(model, batch) is the loss. The model is trained
                     for a few steps.
  a profile          a file that --profile-out wrote: any other budget, without
                     training
  a model            with --dry-run, all that `baoc fit` knows, such as
                     gpt2-small"""

EXAMPLES = """\
examples:
  baoc plan train.py:make_workload --memory 40% -o plan.json
  baoc plan train.py:make_workload --profile-out model.profile
  baoc plan model.profile --memory 25% --forbid 'sgd*' --forbid 'head.*=muon*'
  baoc plan train.py:make_workload --memory 1.5GiB --dry-run"""


def register(commands: common.Commands) -> None:
    """Add the command to the parser of ``baoc``."""
    parser = common.add_parser(commands, "plan", SUMMARY, DESCRIPTION, EXAMPLES)
    parser.add_argument("source", metavar="SOURCE", help="file.py:function, or a saved profile")
    parser.add_argument(
        "--memory",
        metavar="BUDGET",
        type=common.budget,
        default=DEFAULT_MEMORY,
        help="for optimizer state: a share of AdamW16's (40%% or 0.4), a size (1.5GiB), bytes, or auto for the least "
        "that is expected to be as good as any (default: %(default)s)",
    )
    common.add_host_memory(parser)
    parser.add_argument(
        "--steps",
        metavar="N",
        type=partial(common.at_least, 1),
        default=50,
        help="of the warm-up (default: %(default)s)",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="save the plan, such as plan.json")
    parser.add_argument("--profile-out", metavar="FILE", help="save what the warm-up learned, for other budgets")
    parser.add_argument("--wide", action="store_true", help="show all that is known of each block")
    parser.add_argument("--dry-run", action="store_true", help="plan without gradients: assume a typical model")
    parser.add_argument(
        "--seed", metavar="N", type=common.whole, default=0, help="of torch and of the samples (default: %(default)s)"
    )
    common.add_planning(parser)
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the plan, or its JSON, and save it."""
    common.check_writable(args.output)
    common.check_writable(args.profile_out)
    check_budgets(args.memory, args.host_memory)
    common.settings_of(args)  # wrong options should not cost a warm-up
    planner = _planner(args)
    plan = planner.plan(args.memory, args.time, host_memory=args.host_memory)
    if args.json:
        print(plan.to_json())
    else:
        screen.show(plan.table(wide=args.wide))
    if args.output is not None:
        plan.save(args.output)
        _note(f"saved the plan to {args.output}", args)
    else:
        _note("the plan was not saved: add -o plan.json", args)


def _planner(args: argparse.Namespace) -> Planner:
    if is_workload(args.source):
        return _from_workload(args)
    common.check_risk(args)
    if args.profile_out is not None:
        raise common.UsageError("--profile-out needs a warm-up: give file.py:function, without --dry-run.")
    if Path(args.source).is_file() and not args.source.endswith(".json"):
        if args.dry_run:
            raise common.UsageError(f"{args.source!r} is a profile, which needs no --dry-run: leave it out.")
        profile = common.load_profile(args.source)
        return Planner(profile.shapes, profile, common.hyper_of(args, profile.betas), common.settings_of(args))
    if args.dry_run:
        with contextlib.redirect_stdout(sys.stderr):
            model = resolve(args.source)
            shapes = trainable_shapes(model)
        return Planner(shapes, None, common.hyper_of(args), common.settings_of(args), Facts.of(model))
    if args.source in MODELS or Path(args.source).exists():
        raise common.UsageError(
            f"{args.source!r} has no data to warm up on. Give file.py:function, or plan without gradients: --dry-run."
        )
    raise common.UsageError(f"there is no file {args.source!r}. Give file.py:function, or a profile.")


def _from_workload(args: argparse.Namespace) -> Planner:
    if args.dry_run and args.profile_out is not None:
        raise common.UsageError("--profile-out needs a warm-up: leave out --dry-run.")
    torch.manual_seed(args.seed)
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is not our output
        workload = load_workload(args.source)
        common.check_risk(args)  # not before: the file may have registered it
        shapes, facts = trainable_shapes(workload.model), Facts.of(workload.model)
        profile: Profile | None = None
        if not args.dry_run:
            with screen.Progress("warm-up", lines=5) as progress:

                def tell(step: int, steps: int, loss: float) -> None:
                    progress(step, steps, f"loss {loss:.4g}" if math.isfinite(loss) else "loss not finite")

                profile = workload.profile(
                    steps=args.steps, lr=args.lr, weight_decay=args.weight_decay, seed=args.seed, on_step=tell
                )
    if profile is not None:
        if profile.steps < args.steps:
            skipped = f", {profile.skipped} with non-finite gradients" if profile.skipped else ""
            print(f"the profile is of {profile.steps} steps, not {args.steps}{skipped}", file=sys.stderr)
        if args.profile_out is not None:
            profile.save(args.profile_out)
            _note(f"saved the profile to {args.profile_out} ({human_bytes(_size(args.profile_out))})", args)
    return Planner(shapes, profile, common.hyper_of(args), common.settings_of(args), None if profile else facts)


def _note(text: str, args: argparse.Namespace) -> None:
    print(text, file=sys.stderr if args.json else sys.stdout)


def _size(path: str) -> int:
    return Path(path).stat().st_size

"""The command ``plan``: from a model, a workload or gradient statistics to a plan within a budget."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from baoc.core.plan import FORMAT
from baoc.core.text import human_bytes
from baoc.plan import collect_statistics, measured
from baoc.planners.base import AUTO, Budget
from baoc.planners.effect_problem import EffectProblem
from baoc.planners.model_facts import ModelFacts, TokenCounter
from baoc.planners.paper.planner import WARMUP
from baoc.planners.paper.problem import PaperProblem
from baoc.planners.paper.statistics import GradientStatistics, LossFunction
from baoc.tools.cli import common, screen
from baoc.tools.cli.parser import Parser, UsageError
from baoc.tools.models import ModelError
from baoc.tools.models.resolve import call_function, explained, importable, resolve
from baoc.tools.report.frontier import model_of

SOURCES = """\
SOURCE is one of
  a model            any model of `baoc fit`, such as gpt2-small, or a
                     config.json
  file.py:function   a function without arguments that returns a model, or
                     (model, batches, loss_fn), or an object with .model,
                     .batches and .loss. loss_fn(model, batch) returns the loss
  a plan             a file that -o wrote: other plans for the same model
  statistics         a file that --statistics-out wrote"""

PLAN = f"""\
Make a plan: the configurations with the least predicted loss within a memory
and a time budget. Nothing is trained, except with --planner paper, which trains
file.py:function for a few steps to sample its gradients.

{SOURCES}"""

PLAN_EXAMPLES = """\
examples:
  baoc plan gpt2-small --memory 25%
  baoc plan train.py:make_workload --memory 1.5GiB -o plan.json
  baoc plan train.py:make_workload --planner paper --statistics-out model.stats
  baoc plan model.stats --planner paper --memory 50% --forbid 'sgd*'"""


def add_plan(parser: Parser) -> None:
    """Add the options of ``baoc plan SOURCE``."""
    parser.description, parser.epilog = PLAN, PLAN_EXAMPLES
    parser.add_argument("source", metavar="SOURCE", help="a model, file.py:function, a plan, or gradient statistics")
    parser.add_argument(
        "--memory",
        metavar="BUDGET",
        type=common.budget,
        default=AUTO,
        help="ceiling for optimizer state: a share of AdamW16's (40%% or 0.4), a size (1.5GiB), bytes, or auto for the "
        "smallest plan that is predicted to be as good as any (default: %(default)s)",
    )
    common.add_host_memory(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="save the plan, for example to plan.json")
    parser.add_argument("--wide", action="store_true", help="show all details of each block")
    parser.add_argument("--dry-run", action="store_true", help="plan from shapes alone: run no batch of a workload")
    parser.add_argument(
        "--seed", metavar="N", type=common.whole, default=0, help="seed of torch and the samples (default: %(default)s)"
    )
    common.add_planning(parser)
    warmup = parser.add_argument_group("warm-up of file.py:function with --planner paper")
    warmup.add_argument("--steps", metavar="N", type=partial(common.at_least, 1), help=f"how many (default: {WARMUP})")
    warmup.add_argument("--statistics-out", metavar="FILE", help="save the gradient statistics, for other budgets")
    common.add_json(parser)
    parser.set_defaults(run=run_plan)


def run_plan(args: argparse.Namespace) -> None:
    """Print the plan as text or JSON, and save it."""
    common.check_writable(args.output)
    common.check_writable(args.statistics_out)
    budget = Budget(args.memory, args.host_memory)
    plan = load_problem(args).plan(budget)
    if args.json:
        print(plan.to_json())
    else:
        screen.show(plan.table(wide=args.wide))
    if args.output is not None:
        plan.save(args.output)
        _note(f"saved the plan to {args.output}", args)
    else:
        _note("the plan was not saved: add -o plan.json", args)


def load_problem(args: argparse.Namespace) -> EffectProblem | PaperProblem:
    """Read a source and return the problem to plan.

    Args:
        args: Options of :func:`baoc.tools.cli.common.add_planning`, and ``source``. The command may also have
            ``steps``, ``seed``, ``statistics_out`` and ``dry_run``.

    Returns:
        The problem. It makes plans for any memory budget.

    Raises:
        UsageError: If an option is invalid, or the source has no data for ``--planner paper``.
        ModelError: If the source cannot be read or built.
    """
    is_dry = getattr(args, "dry_run", False)
    if is_workload(args.source):
        return _problem_of_workload(args, is_dry)
    planner = common.planner_of(args)
    if getattr(args, "statistics_out", None) is not None:
        raise UsageError("--statistics-out needs a warm-up, so SOURCE must be file.py:function.")
    if Path(args.source).is_file() and not args.source.endswith(".json"):
        statistics = common.load_statistics(args.source)
        model = dataclasses.replace(statistics.model, hyper=common.hyper_of(args, statistics.betas))
        return planner.problem(model) if is_dry else measured(planner, model).problem(model, statistics)
    if is_plan(args.source):
        if args.planner == common.PAPER:
            raise UsageError(
                f"--planner paper plans from gradients, and {args.source!r} is a plan. Pass gradient statistics."
            )
        return planner.problem(model_of(common.load_plan(args.source), common.hyper_of(args)))
    with contextlib.redirect_stdout(sys.stderr), screen.working("building the model"):  # its code may print
        found = resolve(args.source)
    if args.planner == common.PAPER and not is_dry:
        advice = ", or add --dry-run to assume a typical model" if hasattr(args, "dry_run") else ""
        raise UsageError(
            f"--planner paper plans from gradients, and {args.source!r} has no data to train on. Pass file.py:function "
            f"or gradient statistics{advice}."
        )
    return planner.problem(ModelFacts.of(found, common.hyper_of(args)))


def _problem_of_workload(args: argparse.Namespace, is_dry: bool) -> EffectProblem | PaperProblem:
    out, is_paper = getattr(args, "statistics_out", None), args.planner == common.PAPER
    if is_dry and out is not None:
        raise UsageError("--statistics-out needs a warm-up, which --dry-run leaves out.")
    torch.manual_seed(getattr(args, "seed", 0))
    with contextlib.redirect_stdout(sys.stderr):  # keep prints of user code out of the output
        workload = load_workload(args.source, needs_data=is_paper and not is_dry)
        planner = common.planner_of(args)  # after the import: the file may register a risk model
        model = ModelFacts.of(workload.model, common.hyper_of(args))
        if is_dry:
            return planner.problem(model)
        if not is_paper:
            return planner.problem(model.with_tokens(args.tokens or workload.tokens()))
        statistics = _warm_up(workload, args)
    if out is not None:
        statistics.save(out)
        _note(f"saved the gradient statistics to {out} ({human_bytes(Path(out).stat().st_size)})", args)
    return measured(planner, model).problem(model, statistics)


def _warm_up(workload: Workload, args: argparse.Namespace) -> GradientStatistics:
    """Train for a few steps and sample gradients. Say so if there were fewer steps than requested."""
    steps = args.steps or WARMUP
    with screen.Progress("warm-up", lines=5) as progress:

        def on_step(step: int, steps: int, loss: float) -> None:
            progress(step, steps, f"loss {loss:.4g}" if math.isfinite(loss) else "non-finite loss")

        statistics = workload.statistics(
            steps=steps, lr=args.lr, weight_decay=args.weight_decay, seed=args.seed, on_step=on_step
        )
    if statistics.steps < steps:
        skipped = f", {statistics.skipped} with non-finite gradients" if statistics.skipped else ""
        screen.show(f"the statistics cover {statistics.steps} steps instead of {steps}{skipped}", sys.stderr)
    return statistics


def _note(text: str, args: argparse.Namespace) -> None:
    screen.show(text, sys.stderr if args.json else sys.stdout)


# ---- workloads ----


@dataclass(frozen=True)
class Workload:
    """A user's model, batches and loss, from ``file.py:function``. There are no batches if it has only a model."""

    path: Path
    model: nn.Module
    batches: Iterable[Any] = ()
    loss: LossFunction | None = None

    def guarded_loss(self, model: Any, batch: Any) -> Tensor:
        """Return the loss. Errors of user code become a one-line message with the line number."""
        assert self.loss is not None, "a workload with batches has a loss"
        with importable(self.path.parent), explained(f"the loss of {self.path} failed", self.path):
            return self.loss(model, batch)

    def statistics(self, **options: Any) -> GradientStatistics:
        """Run the warm-up; see :func:`baoc.collect_statistics`."""
        return collect_statistics(self.model, self.guarded_loss, self.batches, **options)

    def tokens(self) -> int | None:
        """Count the tokens of one batch in a forward pass; ``None`` if there is no batch."""
        counter = TokenCounter(self.model)
        try:
            for batch in self.batches:
                self.guarded_loss(self.model, batch)
                break
        finally:
            tokens = counter.stop()
        return tokens


def is_workload(source: str) -> bool:
    """Return whether a source names a Python file.

    Example:
        >>> is_workload("train.py:make"), is_workload("train.py"), is_workload("model.stats")
        (True, True, False)
    """
    return source.endswith(".py") or source.rpartition(":")[0].endswith(".py")


def is_plan(source: str) -> bool:
    """Return whether a source is a JSON file that states it is a plan, whether or not it is a valid one."""
    path = Path(source)
    if path.suffix != ".json" or not path.is_file():
        return False
    return re.search(rf'"format":\s*"{FORMAT}"', path.read_text(encoding="utf-8", errors="replace")) is not None


def load_workload(source: str, *, needs_data: bool = True) -> Workload:
    """Call the function of a source. The model stays on the device that the function chose.

    Args:
        source: ``file.py:function``.
        needs_data: Whether the function must return batches and a loss, not only a model.

    Returns:
        The workload.

    Raises:
        ModelError: If the function cannot be called, or does not return a model, batches and a loss.
    """
    file, _, name = source.rpartition(":") if not source.endswith(".py") else (source, "", "")
    path = Path(file)
    result = call_function(path, name)
    if isinstance(result, (tuple, list)):
        parts = tuple(result)
    else:
        parts = tuple(getattr(result, part) for part in ("model", "batches", "loss") if hasattr(result, part))
    if len(parts) == 3 and isinstance(parts[0], nn.Module) and isinstance(parts[1], Iterable) and callable(parts[2]):
        return Workload(path, *parts)
    if isinstance(result, nn.Module) and not needs_data:
        return Workload(path, result)
    raise ModelError(
        f"{source} returned {_type_name(result)}. It must return (model, batches, loss_fn), or an object with .model, "
        f".batches and .loss, where loss_fn(model, batch) returns the loss{'' if needs_data else '; or only a model'}."
    )


def _type_name(result: object) -> str:
    if isinstance(result, (tuple, list)):
        return f"({', '.join(type(part).__name__ for part in result)})"
    return "None" if result is None else f"a {type(result).__name__}"

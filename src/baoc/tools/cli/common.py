"""Shared parts of the commands: the argument parser, common options, argument types and input files."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from baoc.core.configuration import ConfigurationError
from baoc.core.plan import Plan, PlanError
from baoc.core.spec import DEFAULT_BETAS, Hyper
from baoc.planners.base import AUTO
from baoc.planners.effect_classes import TOKENS
from baoc.planners.effects import EffectPlanner
from baoc.planners.model_facts import REGIMES
from baoc.planners.paper.planner import PaperPlanner
from baoc.planners.paper.problem import GRANULARITIES
from baoc.planners.paper.risk import RISKS
from baoc.planners.paper.statistics import GradientStatistics
from baoc.planners.scaling import TOKENS_PER_PARAMETER
from baoc.tools.cli.parser import Commands, UsageError


def add_parser(commands: Commands, name: str, summary: str, description: str, examples: str) -> argparse.ArgumentParser:
    """Add the parser of a command.

    Args:
        commands: The subparsers of the program.
        name: Name of the command.
        summary: One line for the list of commands.
        description: Text above the options.
        examples: Text below the options.

    Returns:
        The parser.
    """
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_host_memory(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--host-memory``."""
    parser.add_argument(
        "--host-memory",
        metavar="BUDGET",
        type=budget,
        help="budget for state in host memory; --memory then limits the state on the GPU",
    )


def add_steps(parser: argparse.ArgumentParser | argparse._ArgumentGroup, option: str) -> None:
    """Add the option for the length of the training that effects are predicted for."""
    parser.add_argument(
        option,
        metavar="N",
        type=partial(at_least, 1),
        help=f"steps of the whole training (default: {TOKENS_PER_PARAMETER} tokens per parameter)",
    )


EFFECTS, PAPER = "effects", "paper"
_PAPER_OPTIONS = ("risk", "gamma", "granularity", "times")
_EFFECT_OPTIONS = ("regime", "tokens", "planned_steps", "table", "tolerance")
_WARMUP_OPTIONS = ("steps", "statistics_out")  # only some commands have them


def add_planning(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose and configure a planner."""
    parser.add_argument(
        "--planner",
        choices=(EFFECTS, PAPER),
        default=EFFECTS,
        help="effects: by measured effects of configurations; paper: Algorithm 1 of the paper (default: %(default)s)",
    )
    parser.add_argument(
        "--time",
        metavar="RATIO",
        type=time_limit,
        help="limit of the estimated time of a training step, relative to AdamW16; with --planner paper, of the "
        f"average update of a block; inf for none (default: {EffectPlanner().time:g} and {PaperPlanner().time:g})",
    )
    parser.add_argument(
        "--forbid",
        metavar="[PATTERN=]CONFIG",
        action="append",
        default=[],
        help="do not use a configuration ('sgd*'), or not for some parameters ('head.*=muon*'); repeatable",
    )
    parser.add_argument(
        "--prefer",
        metavar="[PATTERN=]CONFIG",
        action="append",
        default=[],
        help="prefer a configuration, with the same patterns; repeatable",
    )
    parser.add_argument(
        "--lr", metavar="X", type=positive_number, default=1e-3, help="learning rate (default: %(default)s)"
    )
    parser.add_argument(
        "--weight-decay", metavar="X", type=number, default=0.01, help="weight decay (default: %(default)s)"
    )
    effects = parser.add_argument_group("with --planner effects")
    effects.add_argument(
        "--regime",
        choices=(AUTO, *REGIMES),
        help="the kind of training that effects are for (default: detected from the model)",
    )
    effects.add_argument(
        "--tokens",
        metavar="N",
        type=partial(at_least, 1),
        help=f"tokens of a training step (default: counted in one batch of a workload, else {TOKENS})",
    )
    add_steps(effects, "--planned-steps")
    effects.add_argument(
        "--table", metavar="FILE", help="effect table that `baoc calibrate` wrote (default: the one that ships)"
    )
    effects.add_argument(
        "--tolerance",
        metavar="PERCENT",
        type=number,
        help=f"difference in loss below which two plans are a tie (default: {EffectPlanner().tolerance})",
    )
    paper = parser.add_argument_group("with --planner paper")
    paper.add_argument(
        "--risk", metavar="NAME", help=f"risk model: {', '.join(RISKS)} (default: {PaperPlanner().risk})"
    )
    paper.add_argument(
        "--gamma", metavar="X", type=number, help=f"weight of Agg in Eq. 2 (default: {PaperPlanner().gamma:g})"
    )
    paper.add_argument(
        "--times",
        metavar="T",
        help="update times: gpu (a cost model), measure (time updates now), or a file that `baoc measure` wrote "
        f"(default: {PaperPlanner().times})",
    )
    paper.add_argument(
        "--granularity",
        metavar="G",
        help=f"how blocks are cut: {', '.join(GRANULARITIES)} (default: {PaperPlanner().granularity})",
    )


def planner_of(args: argparse.Namespace) -> EffectPlanner | PaperPlanner:
    """Build the planner of the options of :func:`add_planning`.

    Args:
        args: The parsed options.

    Returns:
        The planner.

    Raises:
        UsageError: If an option is invalid, or belongs to the other planner.
    """
    is_paper = args.planner == PAPER
    own, others = (_PAPER_OPTIONS, _EFFECT_OPTIONS) if is_paper else (_EFFECT_OPTIONS, _PAPER_OPTIONS)
    for name in (*others, *(() if is_paper else _WARMUP_OPTIONS)):
        if getattr(args, name, None) is not None:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} is an option of --planner {EFFECTS if is_paper else PAPER}.")
    fields = {name: name.removeprefix("planned_") for name in ("time", *own)}
    given = {field: getattr(args, name) for name, field in fields.items() if getattr(args, name) is not None}
    try:
        kind = PaperPlanner if is_paper else EffectPlanner
        return kind(**given, forbid=patterns(args.forbid), prefer=patterns(args.prefer))
    except ValueError as error:
        raise UsageError(str(error)) from error


def hyper_of(args: argparse.Namespace, betas: tuple[float, float] = DEFAULT_BETAS) -> Hyper:
    """Return the hyperparameters of the options of :func:`add_planning`."""
    return Hyper(lr=args.lr, beta1=betas[0], beta2=betas[1], weight_decay=args.weight_decay)


def patterns(texts: Sequence[str]) -> dict[str, list[str]]:
    """Parse ``PATTERN=CONFIG`` or ``CONFIG``. A configuration may contain ``=`` inside brackets.

    Args:
        texts: The values of an option.

    Returns:
        Configurations by pattern.

    Raises:
        UsageError: If a text is incomplete.

    Example:
        >>> patterns(["sgd*", "head.*=adamw[m=bf16,v=int8]", "adamw[m=int8,v=int8]"])
        {'*': ['sgd*', 'adamw[m=int8,v=int8]'], 'head.*': ['adamw[m=bf16,v=int8]']}
    """
    rules: dict[str, list[str]] = {}
    for text in texts:
        where, equals, _ = text.partition("[")[0].partition("=")
        what = text[len(where) + 1 :] if equals else text
        if not what or (equals and not where):
            raise UsageError(f"cannot read {text!r}. Write a configuration, or PATTERN=CONFIGURATION.")
        rules.setdefault(where if equals else "*", []).append(what)
    return rules


def budget(text: str) -> float | int | str:
    """Parse a memory budget: a share (0.4 or 40%), a size (1.5GiB), or bytes (a large whole number).

    Example:
        >>> budget("0.4"), budget("40%"), budget("1.5GiB"), budget("400000")
        (0.4, '40%', '1.5GiB', 400000)
    """
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


def number(text: str) -> float:
    """Parse a non-negative number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def positive_number(text: str) -> float:
    """Parse a positive number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def time_limit(text: str) -> float:
    """Parse a positive number, or ``inf`` for no limit."""
    return math.inf if text == "inf" else positive_number(text)


def whole(text: str) -> int:
    """Parse a non-negative whole number."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def at_least(least: int, text: str) -> int:
    """Parse a whole number of at least ``least``."""
    value = int(text) if text.isdecimal() else -1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value


def device(text: str) -> str:
    """Check that torch can use a device."""
    try:
        torch.zeros(1, device=text)
    except Exception as error:  # torch raises several types
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a device that torch can use ({str(error).splitlines()[0]})"
        ) from None
    return text


def load_plan(path: str) -> Plan:
    """Read a plan file, which may have been edited by hand.

    Raises:
        PlanError: If the file is not a valid plan. The message contains the path.
        ConfigurationError: If a configuration is invalid.
    """
    try:
        return Plan.load(path)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    except (ValueError, TypeError) as error:
        raise PlanError(f"{path}: {error}") from None


def load_statistics(path: str) -> GradientStatistics:
    """Read gradient statistics.

    Raises:
        StatisticsError: If the file holds something else.
    """
    if Path(path).is_dir():
        raise IsADirectoryError(21, "this is a folder, not a file of gradient statistics", path)
    return GradientStatistics.load(path)


def check_writable(path: str | None) -> None:
    """Check, before a long run, that a file can be written.

    Raises:
        UsageError: If the path is a folder or its folder does not exist.
    """
    if path is None:
        return
    if Path(path).is_dir():
        raise UsageError(f"cannot write to {path!r}: it is a folder.")
    if not Path(path).absolute().parent.is_dir():
        raise UsageError(f"cannot write to {path!r}: there is no folder {str(Path(path).parent)!r}.")

"""What several commands share: options, budgets as people type them, and files."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch

from baoc.core.configuration import ConfigurationError
from baoc.core.plan import Plan, PlanError
from baoc.core.spec import DEFAULT_BETAS, Hyper
from baoc.planning import risk as risks
from baoc.planning.settings import AUTO, GRANULARITIES, Settings
from baoc.planning.space import DEFAULT_SPACE, SPACES
from baoc.profiling.profile import Profile

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


_FEWEST_BYTES = 1024


class UsageError(ValueError):
    """Options that do not go together or cannot be read."""


class Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_parser(commands: Commands, name: str, summary: str, description: str, examples: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for a program")


def add_host_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host-memory",
        metavar="BUDGET",
        type=budget,
        help="for state in host memory, likewise; --memory is then for what the GPU holds",
    )


def add_planning(parser: argparse.ArgumentParser) -> None:
    """The options that :class:`Settings` are made from."""
    parser.add_argument(
        "--space",
        choices=tuple(SPACES),
        default=DEFAULT_SPACE,
        help="what to choose from and how to judge it: ours, or the paper's to the letter (default: %(default)s)",
    )
    parser.add_argument(
        "--time",
        metavar="RATIO",
        type=positive_number,
        default=None,
        help="a training step may take this much of one with AdamW16, by estimate; in the paper's space, the blocks' "
        "updates on average (default: " + ", ".join(f"{space.time:g} ({name})" for name, space in SPACES.items()) + ")",
    )
    parser.add_argument(
        "--regime",
        choices=(AUTO, *risks.REGIMES),
        default=AUTO,
        help="whether the weights are trained from scratch (default: the weights tell)",
    )
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=partial(at_least, 1),
        help="that a step trains on (default: counted in the warm-up)",
    )
    parser.add_argument(
        "--table",
        metavar="FILE",
        help="of measured effects, as `baoc calibrate` writes it (default: the one that ships)",
    )
    parser.add_argument(
        "--tolerance",
        metavar="PERCENT",
        type=number,
        default=Settings().tolerance,
        help="of loss, for --memory auto (default: %(default)s)",
    )
    parser.add_argument(
        "--forbid",
        metavar="[PATTERN=]CONFIG",
        action="append",
        default=[],
        help="never use a configuration ('sgd*'), or not for these blocks or parameters ('head.*=sgd*'); repeatable",
    )
    parser.add_argument(
        "--prefer", metavar="[PATTERN=]CONFIG", action="append", default=[], help="likewise, but lower its risk"
    )
    parser.add_argument(
        "--risk",
        metavar="NAME",
        help=f"the risk model: {', '.join(risks.RISKS)} (default: the space's)",
    )
    parser.add_argument(
        "--gamma",
        metavar="X",
        type=number,
        default=risks.GAMMA,
        help="weight of the aggressiveness term (default: %(default)s)",
    )
    parser.add_argument(
        "--granularity",
        metavar="G",
        help=f"how blocks are cut: {', '.join(GRANULARITIES)} (default: the space's)",
    )
    parser.add_argument(
        "--lr",
        metavar="X",
        type=positive_number,
        default=1e-3,
        help="the learning rate you will train with (default: %(default)s)",
    )
    parser.add_argument(
        "--weight-decay",
        metavar="X",
        type=number,
        default=0.01,
        help="the weight decay you will train with (default: %(default)s)",
    )


def settings_of(args: argparse.Namespace) -> Settings:
    """Errors in what was typed are the user's."""
    try:
        return Settings(
            space=args.space,
            risk=args.risk,
            regime=args.regime,
            tokens=args.tokens,
            table=args.table,
            tolerance=args.tolerance,
            gamma=args.gamma,
            granularity=args.granularity,
            forbid=patterns(args.forbid),
            prefer=patterns(args.prefer),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def check_risk(args: argparse.Namespace) -> None:
    try:
        if args.risk is not None:
            risks.find(args.risk)
        risks.Table.load(args.table)
    except ValueError as error:
        raise UsageError(str(error)) from error


def hyper_of(args: argparse.Namespace, betas: tuple[float, float] = DEFAULT_BETAS) -> Hyper:
    return Hyper(lr=args.lr, beta1=betas[0], beta2=betas[1], weight_decay=args.weight_decay)


def patterns(texts: Sequence[str]) -> dict[str, list[str]]:
    """``PATTERN=CONFIG`` or ``CONFIG``, which may itself be spelled with ``=`` inside brackets.

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
    """A memory budget as typed: 0.4 is a share, 40% too, 1.5GiB a size, and a large whole number is bytes.

    >>> budget("0.4"), budget("40%"), budget("1.5GiB"), budget("400000")
    (0.4, '40%', '1.5GiB', 400000)
    """
    if text.isdecimal():
        if int(text) < _FEWEST_BYTES:  # 40 is rarely meant as bytes, and as such makes a bad plan without a word
            raise argparse.ArgumentTypeError(f"{text} has no unit: write {text}% for a share, or {text}B for bytes")
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def at_least(least: int, text: str) -> int:
    value = int(text) if text.isdecimal() else -1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value


def device(text: str) -> str:
    try:
        torch.zeros(1, device=text)
    except Exception as error:  # torch has many types for it
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a device of this machine ({str(error).splitlines()[0]})"
        ) from None
    return text


def load_plan(path: str) -> Plan:
    """A plan file, perhaps edited by hand: whatever is wrong with it is said in one line, with its name."""
    try:
        return Plan.load(path)
    except UnicodeDecodeError:
        raise PlanError(f"{path!r} is not a plan file: it is not text. Profiles go to `baoc plan`.") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    except (ValueError, TypeError) as error:
        raise PlanError(f"{path}: {error}") from None


def load_profile(path: str) -> Profile:
    if Path(path).is_dir():
        raise IsADirectoryError(21, "this is a folder, not a profile", path)
    return Profile.load(path)


def check_writable(path: str | None) -> None:
    """Before a long run: a file can be made there."""
    if path is None:
        return
    if Path(path).is_dir():
        raise UsageError(f"cannot write to {path!r}: it is a folder.")
    if not Path(path).absolute().parent.is_dir():
        raise UsageError(f"cannot write to {path!r}: there is no folder {str(Path(path).parent)!r}.")

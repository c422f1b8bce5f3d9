"""The command ``fit``: memory of training on each GPU, the best plan that fits, and other changes."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from functools import partial
from textwrap import fill
from typing import Any

from baoc.core.budget import memory_budget
from baoc.core.plan import PlanError
from baoc.core.text import WIDTH
from baoc.planners.base import AUTO, Budget
from baoc.planners.effects import EffectPlanner
from baoc.planners.model_facts import FINETUNE, REGIMES, SCRATCH
from baoc.tools.cli import common, screen
from baoc.tools.cli.fit_text import States, bytes_by_part, print_answer
from baoc.tools.cli.parser import Parser
from baoc.tools.fit import Answer, Fitter
from baoc.tools.fit.activations import LENGTH
from baoc.tools.fit.memory import PRECISIONS, Measured, Setup
from baoc.tools.models import FINE_TUNED, MODELS
from baoc.tools.models.resolve import resolve

DOES_NOT_FIT = 1

FIT = f"""\
Estimate the memory of training MODEL on each GPU: weights, gradients, optimizer
state and activations. Find the plan of least expected loss that fits, and list
other changes. The model is built on the meta device: nothing is downloaded,
trained or allocated.

The exit code is 0 if it fits (or without --gpu), {DOES_NOT_FIT} if it does not, and 2 for
wrong options.

MODEL is one of
  a name             {{names}}
  a config           the config.json of a transformers or diffusers model, or a
                     folder that contains one
  file.py:function   a function without arguments that returns an nn.Module, an
                     object with one as .model, or a tuple that starts with one"""

FIT_EXAMPLES = """\
examples:
  baoc fit llama-3.1-8b --gpu 24GB --world-size 8 --fsdp --checkpointing
  baoc fit ./my-model/config.json --gpu 80GB --memory 25% && ./train.sh
  baoc fit train.py:build_model --gpu 16GiB --activations 3GiB --json
  baoc fit gpt2-small --states"""


def add_fit(parser: Parser) -> None:
    """Add the options of ``baoc fit MODEL``."""
    parser.description, parser.epilog = FIT.format(names=_names()), FIT_EXAMPLES
    parser.add_argument("model", metavar="MODEL", help="a name, a config.json, or file.py:function")
    parser.add_argument(
        "--gpu",
        metavar="SIZE",
        type=size,
        help="memory of one GPU, such as 24GB (24e9 bytes) or 80GiB",
    )
    parser.add_argument(
        "--world-size",
        metavar="N",
        type=partial(common.at_least, 1),
        default=1,
        help="number of GPUs (default: %(default)s)",
    )
    parser.add_argument(
        "--fsdp",
        action="store_true",
        help="shard weights, gradients and state over the GPUs, as FSDP2 does; without it, each GPU has a copy",
    )
    parser.add_argument(
        "--batch",
        metavar="N",
        type=partial(common.at_least, 1),
        default=1,
        help="sequences or images of a batch on each GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--length",
        metavar="N",
        type=partial(common.at_least, 1),
        default=LENGTH,
        help="tokens of a sequence (default: %(default)s)",
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="keep only the inputs of layers, and recompute other activations"
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(PRECISIONS),
        default="bf16",
        help="dtype of weights, gradients and activations; mixed is fp32 weights with bf16 autocast "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--gradients",
        choices=("auto", "keep", "release"),
        default="auto",
        help="keep gradients until the step, or release each in the backward pass (baoc.release_gradients); auto "
        "releases them if a plan, or a better one, fits only then (default: %(default)s)",
    )
    parser.add_argument(
        "--activations", metavar="SIZE", type=size, help="measured activations, instead of the estimate"
    )
    parser.add_argument(
        "--reserve",
        metavar="SIZE",
        type=size,
        default=Setup().reserve,
        help="memory for the driver, communication buffers and fragmentation (default: 1GiB)",
    )
    parser.add_argument(
        "--memory",
        metavar="BUDGET",
        type=common.budget,
        help="use this budget for state (25%%, 1.5GiB, auto) instead of the best that fits",
    )
    common.add_host_memory(parser)
    regime = parser.add_mutually_exclusive_group()
    regime.add_argument(
        "--regime",
        choices=REGIMES,
        help="the kind of training that effects are for (default: finetune for names of llama, qwen and gemma, else "
        "read off the model)",
    )
    regime.add_argument(
        "--from-scratch", dest="regime", action="store_const", const=SCRATCH, help="short for --regime scratch"
    )
    common.add_steps(parser, "--steps")
    parser.add_argument("--plan", action="store_true", help="show the plan instead of the comparison")
    _add_states(parser)
    common.add_json(parser)
    parser.set_defaults(run=run_fit)


def _add_states(parser: argparse.ArgumentParser) -> None:
    states = parser.add_argument_group("state only")
    states.add_argument("--states", action="store_true", help="only show the bytes of state of every configuration")
    states.add_argument(
        "--configuration",
        metavar="SPELLING",
        action="append",
        default=[],
        help="only show the state of this configuration, such as 'adamw[m=bf16,v=int8]'; repeatable",
    )
    states.add_argument(
        "--exclude",
        metavar="PATTERN",
        action="append",
        default=[],
        help="exclude tensors by name ('*.bias'); repeatable. Tied weights have their first name",
    )
    states.add_argument(
        "--sort",
        choices=["catalog", "state"],
        default="catalog",
        help="order of rows: that of the catalog, or largest state first (default: %(default)s)",
    )


def run_fit(args: argparse.Namespace) -> int:
    """Print the answer as text or JSON.

    Returns:
        The exit code: 0 if it fits, 1 if not.
    """
    Budget(AUTO if args.memory is None else args.memory, args.host_memory if args.memory else None)
    with contextlib.redirect_stdout(sys.stderr), screen.working("building the model"):  # its code may print
        model = resolve(args.model)
    if args.states or args.configuration or args.exclude:
        found = States(args, model)
        if args.json:
            print(json.dumps(found.content(), indent=2))
        else:
            screen.show(found.text())
        return 0
    setup = Setup(
        args.world_size,
        args.fsdp,
        args.batch,
        args.length,
        args.checkpointing,
        args.dtype,
        release=args.gradients == "release",
        reserve=args.reserve,
    )
    fitter = Fitter(Measured(model, args.activations), EffectPlanner(regime=_regime(args), steps=args.steps))
    with contextlib.redirect_stdout(sys.stderr), screen.working("searching for the best plan that fits"):
        may_release = args.gradients == "auto"
        answer = fitter.ask(setup, args.gpu, args.memory, args.host_memory, may_release=may_release)
    if args.json:
        print(json.dumps(content(args.model, answer), indent=2))
    else:
        print_answer(args.model, model, answer, with_plan=args.plan)
    return 0 if answer.fits else DOES_NOT_FIT


def _regime(args: argparse.Namespace) -> str:
    """Return the regime of the options: people fine-tune some models rather than train them from scratch."""
    named = FINETUNE if args.model.startswith(FINE_TUNED) and args.model in MODELS else AUTO
    return args.regime or named


def content(model: str, answer: Answer) -> dict[str, Any]:
    """Return the answer as values for JSON."""
    setup, plan = answer.setup, answer.chosen.plan
    return {
        "model": model,
        "parameters": sum(block.numel for block in plan.blocks),
        "world_size": setup.world_size,
        "fsdp": setup.fsdp,
        "batch": setup.batch,
        "length": setup.length,
        "tokens": answer.memory.tokens,
        "checkpointing": setup.checkpointing,
        "dtype": setup.dtype,
        "gradients": "release" if setup.release else "keep",
        "low_bits": plan.settings.get("low_bits"),
        "bytes_per_parameter": {name: round(each, 4) for name, each in answer.per_parameter.items()},
        "gpu_bytes": answer.gpu,
        "fits": answer.fits,
        "total_bytes": answer.chosen.total,
        "bytes": bytes_by_part(answer),
        "host_bytes": plan.host_bytes,
        "activations_unknown": answer.memory.unknown or None,
        "plan": json.loads(plan.to_json()),
        "choices": [
            {
                "name": choice.name,
                "state_bytes": choice.state,
                "total_bytes": choice.total,
                "fits": choice.fits(answer.gpu),
                "expected_loss": choice.loss,
                "expected_interval": choice.interval,
            }
            for choice in answer.choices
        ],
        "changes": [
            {
                "what": change.what,
                "total_bytes": change.total,
                "fits": change.fits,
                "expected_loss": change.loss,
                "expected_interval": change.interval,
                "note": change.note,
            }
            for change in answer.changes
        ],
    }


def size(text: str) -> int:
    """Parse a size.

    Example:
        >>> size("24GB"), size("1.5GiB")
        (24000000000, 1610612736)
    """
    try:
        if text.endswith("%"):
            raise PlanError("")
        return memory_budget(text, 0)
    except PlanError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 24GB or 1.5GiB") from None


def _names() -> str:
    """Return the names of the models, wrapped with a hanging indent."""
    return fill(", ".join(MODELS), WIDTH, initial_indent=" " * 21, subsequent_indent=" " * 21).lstrip()

"""``baoc fit MODEL``: what training takes on every GPU, the best plan that fits, and what else could be done."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from functools import partial
from textwrap import fill
from typing import Any

from baoc.cli import common, screen, states
from baoc.cli.fit_text import print_answer
from baoc.core.budget import memory_budget
from baoc.core.plan import PlanError
from baoc.core.text import WIDTH
from baoc.fit import PRECISIONS, Answer, Fitter, Measured, Setup
from baoc.fit.inputs import LENGTH
from baoc.models import MODELS
from baoc.models.resolve import resolve
from baoc.planning import risk as risks
from baoc.planning.planner import DEFAULT_MEMORY, check_budgets
from baoc.planning.settings import Settings

SUMMARY = "will it fit? Memory of a training step on every GPU, and the best plan for it"
DOES_NOT_FIT = 1

DESCRIPTION = f"""\
Show what training MODEL takes on every GPU (weights, gradients, optimizer
state, activations), the plan of least expected loss for what is left, and what
else could be changed. The model is built on the meta device: nothing is
downloaded, trained or allocated.

The exit code is 0 if it fits (or no --gpu is given), {DOES_NOT_FIT} if it does not, and 2 if
the question was wrong.

MODEL is one of
  a name             {{names}}
  a config           the config.json of a transformers or diffusers model, or a
                     folder that holds one
  file.py:function   a function without arguments that returns an nn.Module, an
                     object with one as .model, or a tuple that starts with one"""

EXAMPLES = """\
examples:
  baoc fit llama-3.1-8b --gpu 24GB --world-size 8 --fsdp --checkpointing
  baoc fit ./my-model/config.json --gpu 80GB --memory 25% && ./train.sh
  baoc fit train.py:build_model --gpu 16GiB --activations 3GiB --json
  baoc fit gpt2-small --states"""


def register(commands: common.Commands) -> None:
    """Add the command to the parser of ``baoc``."""
    parser = common.add_parser(commands, "fit", SUMMARY, DESCRIPTION.format(names=_names()), EXAMPLES)
    parser.add_argument("model", metavar="MODEL", help="a name, a config.json, or file.py:function")
    parser.add_argument(
        "--gpu",
        metavar="SIZE",
        type=size,
        help="memory of one GPU, such as 24GB, which is read as 24e9 bytes, or 80GiB",
    )
    parser.add_argument(
        "--world-size", metavar="N", type=partial(common.at_least, 1), default=1, help="GPUs (default: %(default)s)"
    )
    parser.add_argument(
        "--fsdp",
        action="store_true",
        help="shard weights, gradients and state over them, as FSDP2 does; without it each holds all",
    )
    parser.add_argument(
        "--batch",
        metavar="N",
        type=partial(common.at_least, 1),
        default=1,
        help="sequences or images on each GPU at once (default: %(default)s)",
    )
    parser.add_argument(
        "--length",
        metavar="N",
        type=partial(common.at_least, 1),
        default=LENGTH,
        help="tokens of a sequence (default: %(default)s)",
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="of activations: keep the inputs of layers, compute the rest again"
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(PRECISIONS),
        default="bf16",
        help="of weights, gradients and activations; mixed is fp32 weights under bf16 autocast (default: %(default)s)",
    )
    parser.add_argument(
        "--activations", metavar="SIZE", type=size, help="as measured, instead of counted on the meta device"
    )
    parser.add_argument(
        "--reserve",
        metavar="SIZE",
        type=size,
        default=Setup().reserve,
        help="for the driver, buffers of communication and fragments (default: 1GiB)",
    )
    parser.add_argument(
        "--memory",
        metavar="BUDGET",
        type=common.budget,
        help="ask about this budget for state (25%%, 1.5GiB, auto), instead of the best that fits",
    )
    common.add_host_memory(parser)
    parser.add_argument(
        "--regime", choices=risks.REGIMES, default=risks.REGIMES[0], help="of training (default: %(default)s)"
    )
    states.add_options(parser)
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the answer, or its JSON; the exit code says whether it fits."""
    check_budgets(DEFAULT_MEMORY if args.memory is None else args.memory, args.host_memory)
    with contextlib.redirect_stdout(sys.stderr):  # what a model prints while it is built is not our output
        model = resolve(args.model)
    if states.is_asked(args):
        found = states.States(args, model)
        if args.json:
            print(json.dumps(found.content(), indent=2))
        else:
            screen.show(found.text())
        return 0
    setup = Setup(
        args.world_size, args.fsdp, args.batch, args.length, args.checkpointing, args.dtype, reserve=args.reserve
    )
    fitter = Fitter(Measured(model, args.activations), Settings(regime=args.regime))
    with contextlib.redirect_stdout(sys.stderr), screen.working("looking for the best plan that fits"):
        answer = fitter.ask(setup, args.gpu, args.memory, args.host_memory)
    if args.json:
        print(json.dumps(content(args.model, answer), indent=2))
    else:
        print_answer(args.model, model, answer)
    return 0 if answer.fits else DOES_NOT_FIT


def content(model: str, answer: Answer) -> dict[str, Any]:
    """The answer for a program."""
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
        "gpu_bytes": answer.gpu,
        "fits": answer.fits,
        "total_bytes": answer.chosen.total,
        "bytes": {**answer.memory.parts, "optimizer state": answer.chosen.state},
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
            }
            for choice in answer.choices
        ],
        "changes": [
            {
                "what": change.what,
                "total_bytes": change.total,
                "fits": change.fits,
                "expected_loss": change.loss,
                "note": change.note,
            }
            for change in answer.changes
        ],
    }


def size(text: str) -> int:
    """A size as typed.

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
    """The models' names, in lines that begin below the first."""
    return fill(", ".join(MODELS), WIDTH, initial_indent=" " * 21, subsequent_indent=" " * 21).lstrip()

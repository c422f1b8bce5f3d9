"""``baoc estimate MODEL``: the state bytes of every configuration, before any training."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from baoc.core.configuration import BEYOND, CATALOG, REFERENCE, parse
from baoc.core.roles import roles_of
from baoc.core.spec import SMALL_NUMEL, Shape
from baoc.core.text import human_bytes, table
from baoc.models import MODELS
from baoc.models.resolve import resolve
from baoc.planning.estimate import Estimate, estimate, split_excluded, trainable_shapes

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

SUMMARY = "the optimizer state of a model under every configuration, before training"

DESCRIPTION = f"""\
Show how many bytes of optimizer state each configuration would hold for MODEL. The model is built on the meta
device: nothing is downloaded, trained or allocated. Every byte counts, scales and factors included; tensors with
fewer than {SMALL_NUMEL} elements keep fp32 state. Only trainable parameters count, tied weights once.

MODEL is one of
  a name             {", ".join(MODELS)}
  a config           the config.json of a transformers or diffusers model, or a folder that holds one
  file.py:function   a function without arguments that returns an nn.Module, an object with one as .model,
                     or a tuple that starts with one"""

EXAMPLES = """\
examples:
  baoc estimate gpt2-small
  baoc estimate ./my-model/config.json --world-size 8
  baoc estimate train.py:build_model --exclude '*.lora_*' --exclude 'head.*'
  baoc estimate llama-3.2-1b --configuration adamw-8 --configuration 'adamw[m=bf16,v=int8]'
  baoc estimate vit --json > estimate.json"""


def register(commands: Commands) -> None:
    """Add the command to the parser of ``baoc``."""
    parser = commands.add_parser(
        "estimate",
        help=SUMMARY,
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a name, a config.json, or file.py:function")
    parser.add_argument(
        "--exclude",
        metavar="PATTERN",
        action="append",
        default=[],
        help="leave out tensors with such names ('*.bias'); may be repeated. Tied weights go by their first name",
    )
    parser.add_argument(
        "--configuration",
        metavar="SPELLING",
        action="append",
        default=[],
        help="show this one, such as 'adamw[m=bf16,v=int8]', instead of the whole catalog; may be repeated",
    )
    parser.add_argument(
        "--world-size",
        metavar="N",
        type=_positive,
        default=1,
        help="also show the bytes of the fullest of N ranks, with parameters sharded on dim 0 as FSDP2 does",
    )
    parser.add_argument(
        "--sort",
        choices=["catalog", "state"],
        default="catalog",
        help="the order of rows: as in the catalog, or by state, largest first (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON for a program")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the table, or the JSON."""
    configurations = list(dict.fromkeys(map(parse, args.configuration))) or (*CATALOG, *BEYOND)
    with contextlib.redirect_stdout(sys.stderr):  # what a model prints while it is built is not our output
        model = resolve(args.model)
    kept, excluded = split_excluded(trainable_shapes(model), args.exclude)
    rows = estimate(kept, configurations, roles=roles_of(model), world_size=args.world_size)
    if args.sort == "state":
        rows.sort(key=lambda row: -row.state_bytes)
    if args.json:
        print(json.dumps(_content(args, kept, excluded, rows), indent=2))
        return
    print(f"{args.model} ({type(model).__name__}): {_amount(kept)}")
    if excluded:
        print(f"excluded: {_amount(excluded)}, {_some(list(excluded))}")
    if frozen := {name: tuple(param.shape) for name, param in model.named_parameters() if not param.requires_grad}:
        print(f"frozen, so without state: {_amount(frozen)}")
    if args.world_size > 1:
        print(f"sharded on dim 0 over {args.world_size} ranks; per rank: what the fullest one holds")
    print()
    print(_table(rows, per_rank=args.world_size > 1))


def _table(rows: Sequence[Estimate], *, per_rank: bool) -> str:
    header = ["configuration", "short name", "state", *["per rank"] * per_rank, "of AdamW16", "bytes/parameter"]
    cells = [
        [
            str(row.configuration),
            row.configuration.alias if row.configuration.alias != str(row.configuration) else "",
            human_bytes(row.state_bytes),
            *[human_bytes(row.state_bytes_per_rank)] * per_rank,
            f"{row.share_of_reference:.1%}",
            f"{row.bytes_per_parameter:.3f}",
        ]
        for row in rows
    ]
    return table(header, cells, right=header[2:])


def _content(
    args: argparse.Namespace, kept: Mapping[str, Shape], excluded: Mapping[str, Shape], rows: Sequence[Estimate]
) -> dict[str, Any]:
    return {
        "model": args.model,
        "parameters": _numel(kept),
        "tensors": len(kept),
        "excluded": list(excluded),
        "world_size": args.world_size,
        "reference": str(REFERENCE),
        "reference_bytes": rows[0].reference_bytes,
        "configurations": [
            {
                "configuration": str(row.configuration),
                "alias": row.configuration.alias,
                "state_bytes": row.state_bytes,
                "share_of_reference": row.share_of_reference,
                "bytes_per_parameter": row.bytes_per_parameter,
                "state_bytes_per_rank": row.state_bytes_per_rank,
            }
            for row in rows
        ],
    }


def _amount(shapes: Mapping[str, Shape]) -> str:
    return f"{_numel(shapes):,} parameters in {len(shapes)} tensor{'s' if len(shapes) != 1 else ''}"


def _numel(shapes: Mapping[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _some(names: Sequence[str], shown: int = 4) -> str:
    text = ", ".join(names[:shown])
    return text if len(names) <= shown else f"{text} and {len(names) - shown} more"


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number

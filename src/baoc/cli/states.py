"""The part of ``baoc fit`` that is about optimizer state alone: its bytes under every configuration."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from baoc.core.configuration import BEYOND, CATALOG, REFERENCE, parse
from baoc.core.roles import roles_of
from baoc.core.spec import Shape
from baoc.core.text import human_bytes, table
from baoc.planning.estimate import Estimate, estimate, split_excluded, trainable_shapes


def add_options(parser: argparse.ArgumentParser) -> None:
    """What may be asked about states."""
    states = parser.add_argument_group("state alone")
    states.add_argument(
        "--states", action="store_true", help="show the bytes of state under every configuration, and nothing else"
    )
    states.add_argument(
        "--configuration",
        metavar="SPELLING",
        action="append",
        default=[],
        help="likewise for this one, such as 'adamw[m=bf16,v=int8]'; may be repeated",
    )
    states.add_argument(
        "--exclude",
        metavar="PATTERN",
        action="append",
        default=[],
        help="leave out tensors with such names ('*.bias'); may be repeated. Tied weights go by their first name",
    )
    states.add_argument(
        "--sort",
        choices=["catalog", "state"],
        default="catalog",
        help="the order of rows: as in the catalog, or by state, largest first (default: %(default)s)",
    )


def is_asked(args: argparse.Namespace) -> bool:
    return bool(args.states or args.configuration or args.exclude)


class States:
    """State bytes of the chosen tensors under the chosen configurations."""

    def __init__(self, args: argparse.Namespace, model: nn.Module) -> None:
        self._args, self._model = args, model
        self._shards = args.world_size if args.fsdp else 1
        configurations = list(dict.fromkeys(map(parse, args.configuration))) or (*CATALOG, *BEYOND)
        self._kept, self._excluded = split_excluded(trainable_shapes(model), args.exclude)
        self._rows = estimate(self._kept, configurations, roles=roles_of(model), world_size=self._shards)
        if args.sort == "state":
            self._rows.sort(key=lambda row: -row.state_bytes)

    def text(self) -> str:
        """A table within 80 columns, and what it leaves out."""
        lines = [f"{self._args.model} ({type(self._model).__name__}): {_amount(self._kept)}"]
        if self._excluded:
            lines.append(f"excluded: {_amount(self._excluded)}, {_some(list(self._excluded))}")
        params = self._model.named_parameters()
        if frozen := {name: tuple(param.shape) for name, param in params if not param.requires_grad}:
            lines.append(f"frozen, so without state: {_amount(frozen)}")
        if self._shards > 1:
            lines.append(f"sharded on dim 0 over {self._shards} ranks; per rank: what the fullest one holds")
        return "\n".join([*lines, "", _table(self._rows, per_rank=self._shards > 1)])

    def content(self) -> dict[str, Any]:
        """For a program."""
        return {
            "model": self._args.model,
            "parameters": _numel(self._kept),
            "tensors": len(self._kept),
            "excluded": list(self._excluded),
            "world_size": self._args.world_size,
            "fsdp": self._args.fsdp,
            "reference": str(REFERENCE),
            "reference_bytes": self._rows[0].reference_bytes,
            "configurations": [
                {
                    "configuration": str(row.configuration),
                    "alias": row.configuration.alias,
                    "state_bytes": row.state_bytes,
                    "share_of_reference": row.share_of_reference,
                    "bytes_per_parameter": row.bytes_per_parameter,
                    "state_bytes_per_rank": row.state_bytes_per_rank,
                }
                for row in self._rows
            ],
        }


def _table(rows: Sequence[Estimate], *, per_rank: bool) -> str:
    header = ["configuration", "state", *["per rank"] * per_rank, "of AdamW16", "bytes each"]
    cells = [
        [
            row.configuration.alias,
            human_bytes(row.state_bytes),
            *[human_bytes(row.state_bytes_per_rank)] * per_rank,
            f"{row.share_of_reference:.1%}",
            f"{row.bytes_per_parameter:.3f}",
        ]
        for row in rows
    ]
    return table(header, cells, right=header[1:])


def _amount(shapes: Mapping[str, Shape]) -> str:
    return f"{_numel(shapes):,} parameters in {len(shapes)} tensor{'s' if len(shapes) != 1 else ''}"


def _numel(shapes: Mapping[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _some(names: Sequence[str], shown: int = 4) -> str:
    text = ", ".join(names[:shown])
    return text if len(names) <= shown else f"{text} and {len(names) - shown} more"

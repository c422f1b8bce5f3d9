"""The output of ``baoc fit`` in 80 columns: a sentence, a bar with a table of its parts, or the bytes of state only."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from textwrap import fill, wrap
from typing import Any

from torch import nn

from baoc.core.configuration import BUDGET_REFERENCE, CATALOG, EXTENDED, parse
from baoc.core.roles import roles_of
from baoc.core.spec import Shape
from baoc.core.text import REGIME_TEXTS, WIDTH, human_bytes, human_count, one_line, short_prediction, table
from baoc.planners.total import WORKSPACE, table_of_parts
from baoc.tools.cli import screen
from baoc.tools.estimate import Estimate, estimate, split_excluded, trainable_shapes
from baoc.tools.fit import GIVEN, SMALLEST, Answer, Change, Choice

BAR_WIDTH = 78
FREE = "free"
_MARKS = {
    "weights": ("w", "white on blue"),
    "low bits": ("b", "white on bright_blue"),
    "gradients": ("g", "black on cyan"),
    "state": ("s", "black on yellow"),
    WORKSPACE: ("u", "black on bright_yellow"),
    "activations": ("a", "white on magenta"),
    "gathered layers": ("l", "black on white"),
    "reserve": ("r", "white on bright_black"),
    FREE: (".", ""),
}
"""A letter and a color for each part. The letters are enough without colors."""


def print_answer(name: str, model: nn.Module, answer: Answer, *, with_plan: bool = False) -> None:
    """Print the answer of ``baoc fit``: a sentence, the bar, a table of its parts, and other ways.

    Args:
        name: The model as the user typed it.
        model: The model.
        answer: The answer.
        with_plan: Whether to show the plan instead of a comparison with other optimizers.
    """
    style = "" if answer.gpu is None else "bold green" if answer.fits else "bold red"
    for line in wrap(verdict(name, answer), WIDTH):
        screen.show_styled((line, style))
    screen.show(fill(_setup(model, answer), WIDTH) + "\n")
    others = {**answer.others, **_free(answer)}
    cells = _cells(_in_order({**answer.parts, **others}), BAR_WIDTH - 2)
    screen.show_styled("[", *((_MARKS[part][0] * count, _MARKS[part][1]) for part, count in cells.items()), "]")
    screen.show_styled(_limit(answer))
    header, rule, *rows = table_of_parts(answer.per_parameter, answer.numel, _in_order(others)).splitlines()
    screen.show(f"    {header}\n    {rule}")
    for row in rows:
        mark, style = _MARKS.get(row.partition("  ")[0], (" ", ""))
        screen.show_styled((f" {mark} ", style), f" {row}")
    if answer.memory.activations is None:
        unknown = f"Activations are not counted: {answer.memory.unknown}. Measure them and pass --activations."
        screen.show("\n" + fill(unknown, WIDTH))
    screen.show("\n" + "\n\n".join(_plan_and_others(answer, with_plan)))


def _in_order(parts: Mapping[str, int]) -> dict[str, int]:
    """Return parts in the order of the bar."""
    return {part: parts[part] for part in _MARKS if part in parts}


def verdict(name: str, answer: Answer) -> str:
    """Return one sentence that says whether the setup fits."""
    total, one = human_bytes(answer.chosen.total), answer.setup.world_size == 1
    if answer.gpu is None:
        return f"Training {name} takes {total} on {'one GPU' if one else 'each GPU'}."
    gpus = f"one GPU of {human_bytes(answer.gpu)}" if one else f"each GPU of {human_bytes(answer.gpu)}"
    if answer.fits:
        spare = human_bytes(answer.gpu - answer.chosen.total)
        return f"Training {name} fits: it takes {total} on {gpus}, which leaves {spare} free."
    missing = human_bytes(answer.chosen.total - answer.gpu)
    state = human_bytes(answer.chosen.state)
    what = f"with the requested budget ({state})" if answer.chosen.name == GIVEN else f"with the least state ({state})"
    return f"Training {name} does not fit: {what}, {gpus} needs {missing} more."


def _setup(model: nn.Module, answer: Answer) -> str:
    setup, count = answer.setup, sum(block.numel for block in answer.chosen.plan.blocks)
    spread = "FSDP2" if setup.fsdp else "a copy on each"
    gpus = ["one GPU"] if setup.world_size == 1 else [f"{setup.world_size} GPUs", spread]
    extra = ["checkpointing"] * setup.checkpointing + ["gradients released"] * setup.release
    each = "" if setup.world_size == 1 else " each"
    regime = REGIME_TEXTS.get(answer.chosen.plan.settings.get("regime", ""), "")
    kind = [regime.removeprefix("in ")] if regime else []
    tokens = f"{answer.memory.tokens} tokens{each}"
    facts = [f"{human_count(count)} parameters", *gpus, tokens, setup.dtype, *extra, *kind]
    return f"{type(model).__name__}: {', '.join(facts)}"


def _plan_and_others(answer: Answer, with_plan: bool) -> list[str]:
    """Return the plan, in a sentence or as a table, and what other optimizers and other setups would do."""
    paragraphs = [str(answer.chosen.plan)] if with_plan else []
    if answer.fits and not with_plan:
        said = one_line(answer.chosen.plan)
        paragraphs.append(fill(f"{_titled(answer.chosen.name)}: {said}. --plan shows it.", WIDTH))
    # the smallest plan is no advice
    others = [each for each in answer.choices if each != answer.chosen and each.name != SMALLEST]
    found = {
        "Other optimizers:": [] if with_plan else [_other(answer, each.name, each) for each in others],
        "Other changes, each with the best plan that then fits:": [
            _other(answer, each.what, each, f" ({each.note})" if each.note else "") for each in answer.changes
        ],
    }
    return [*paragraphs, *("\n".join([title, *lines]) for title, lines in found.items() if lines)]


def _titled(name: str) -> str:
    return f"{name[0].upper()}{name[1:]}"


def _other(answer: Answer, name: str, other: Choice | Change, note: str = "") -> str:
    """Return a line about another optimizer or setup: its memory, and its predicted loss if it fits."""
    fits = other.fits(answer.gpu) if isinstance(other, Choice) else other.fits
    verdict = "" if answer.gpu is None else ", fits" if fits else ", does not fit"
    loss = f", {_loss(other)}" if fits or isinstance(other, Choice) else ""
    text = f"{name}: {human_bytes(other.total)}{verdict}{loss}{note}"
    return fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def bytes_by_part(answer: Answer) -> dict[str, int]:
    """Return the bytes of each part with the chosen plan, low bits as a part of the state."""
    workspace = {WORKSPACE: answer.chosen.workspace} if answer.chosen.workspace else {}
    return {**answer.memory.parts, "optimizer state": answer.chosen.state, **workspace}


def _free(answer: Answer) -> dict[str, int]:
    """Return what the GPU has left, if anything."""
    spare = 0 if answer.gpu is None else answer.gpu - answer.chosen.total
    return {FREE: spare} if spare > 0 else {}


def _cells(parts: Mapping[str, int], width: int) -> dict[str, int]:
    """Divide the width of the bar by the largest-remainder method.

    >>> _cells({"weights": 2, "gradients": 1, "free": 1}, 7)
    {'weights': 3, 'gradients': 2, 'free': 2}
    """
    total = max(1, sum(parts.values()))
    exact = {part: width * nbytes / total for part, nbytes in parts.items()}
    cells = {part: math.floor(cell) for part, cell in exact.items()}
    left = width - sum(cells.values())
    for part in sorted(exact, key=lambda part: cells[part] - exact[part])[:left]:
        cells[part] += 1
    return cells


def _limit(answer: Answer) -> str:
    """Return the line below the bar, which marks the memory of the GPU."""
    if answer.gpu is None:
        return f" {human_bytes(answer.chosen.total)}".rjust(BAR_WIDTH)
    label = f"{human_bytes(answer.gpu)} "
    end = BAR_WIDTH - 2
    if answer.chosen.total:
        end = round(end * min(1.0, answer.gpu / answer.chosen.total))
    return f"{label}^".rjust(end + 1) if end >= len(label) else f"{' ' * end}^ {label}".rstrip()


def _loss(choice: Choice | Change) -> str:
    """Return a predicted loss with its interval, if that is wide enough to be seen."""
    if choice.loss is None:
        return "not measured"
    return short_prediction(choice.loss, choice.interval)


# ---- state only ----


class States:
    """Bytes of state of the selected tensors under the selected configurations.

    Args:
        args: The options of ``baoc fit``.
        model: The model.
    """

    def __init__(self, args: argparse.Namespace, model: nn.Module) -> None:
        self._args, self._model = args, model
        self._shards = args.world_size if args.fsdp else 1
        configurations = list(dict.fromkeys(map(parse, args.configuration))) or (*CATALOG, *EXTENDED)
        self._kept, self._excluded = split_excluded(trainable_shapes(model), args.exclude)
        self._rows = estimate(self._kept, configurations, roles=roles_of(model), world_size=self._shards)
        if args.sort == "state":
            self._rows.sort(key=lambda row: -row.state_bytes)

    def text(self) -> str:
        """Return a table in 80 columns, and what it leaves out."""
        lines = [f"{self._args.model} ({type(self._model).__name__}): {_amount(self._kept)}"]
        if self._excluded:
            lines.append(f"excluded: {_amount(self._excluded)}, {_some(list(self._excluded))}")
        params = self._model.named_parameters()
        if frozen := {name: tuple(param.shape) for name, param in params if not param.requires_grad}:
            lines.append(f"frozen, without state: {_amount(frozen)}")
        if self._shards > 1:
            lines.append(f"sharded on dim 0 over {self._shards} ranks; per rank: the one that holds the most")
        return "\n".join([*lines, "", _state_table(self._rows, per_rank=self._shards > 1)])

    def content(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "model": self._args.model,
            "parameters": _numel(self._kept),
            "tensors": len(self._kept),
            "excluded": list(self._excluded),
            "world_size": self._args.world_size,
            "fsdp": self._args.fsdp,
            "reference": str(BUDGET_REFERENCE),
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


def _state_table(rows: Sequence[Estimate], *, per_rank: bool) -> str:
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

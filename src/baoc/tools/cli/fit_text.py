"""The output of ``baoc fit`` in 80 columns: a sentence, a bar and a table, or the bytes of state only."""

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
from baoc.core.text import WIDTH, human_bytes, human_count, one_line, short_prediction, table
from baoc.planners.total import BASELINE
from baoc.tools.cli import screen
from baoc.tools.estimate import Estimate, estimate, split_excluded, trainable_shapes
from baoc.tools.fit import GIVEN, SMALLEST, Answer, Change, Choice

BAR_WIDTH = 78
STATE = "optimizer state"
WORKSPACE = "update workspace"
FREE = "free"
_MARKS = {
    "weights": ("w", "white on blue"),
    "gradients": ("g", "black on cyan"),
    STATE: ("s", "black on yellow"),
    "activations": ("a", "white on magenta"),
    "gathered layers": ("l", "black on white"),
    WORKSPACE: ("u", "black on bright_yellow"),
    "reserve": ("r", "white on bright_black"),
    FREE: (".", ""),
}
"""A letter and a color for each part. The letters are enough without colors."""


def print_answer(name: str, model: nn.Module, answer: Answer, *, with_plan: bool = False) -> None:
    """Print the answer of ``baoc fit``: a sentence, the bar, and one table.

    Args:
        name: The model as the user typed it.
        model: The model.
        answer: The answer.
        with_plan: Whether the table is the plan instead of a comparison with other optimizers.
    """
    style = "" if answer.gpu is None else "bold green" if answer.fits else "bold red"
    for line in wrap(verdict(name, answer), WIDTH):
        screen.show_styled((line, style))
    screen.show(fill(_setup(model, answer), WIDTH) + "\n")
    parts = _parts(answer)
    cells = _cells(parts, BAR_WIDTH - 2)
    screen.show_styled("[", *((_MARKS[part][0] * count, _MARKS[part][1]) for part, count in cells.items()), "]")
    screen.show_styled(_limit(answer))
    for start in range(0, len(parts), 2):
        left, *right = list(parts.items())[start : start + 2]
        screen.show_styled(*_legend(*left), *(text for each in right for text in ("       ", *_legend(*each))))
    if answer.memory.activations is None:
        unknown = f"Activations are not counted: {answer.memory.unknown}. Measure them and pass --activations."
        screen.show("\n" + fill(unknown, WIDTH))
    plan_or_choices = str(answer.chosen.plan) if with_plan else _choices(answer)
    details = [_bytes_per_parameter(answer)] if with_plan else []
    parts_of_text = [*details, plan_or_choices, *_advice(answer, with_plan)]
    screen.show("\n" + "\n\n".join(parts_of_text))


def _bytes_per_parameter(answer: Answer) -> str:
    """Return bytes per parameter of weights, low bits, gradients and state, and what each saves."""
    weights = "16-bit weights" if answer.setup.precision.weights == 2 else "fp32 weights"
    how = "released" if answer.setup.release else "kept"
    found = {name: (each, BASELINE[name] - each) for name, each in answer.per_parameter.items()}
    found["all"] = (sum(each for each, _ in found.values()), sum(saved for _, saved in found.values()))
    parts = ", ".join(f"{name} {each:.2f} ({saved:+.2f})" for name, (each, saved) in found.items())
    text = f"Bytes per parameter, and saved against fp32 AdamW: {parts}. {weights}, gradients {how}."
    return fill(text, WIDTH)


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
    extra = ["checkpointing"] if setup.checkpointing else []
    each = "" if setup.world_size == 1 else " each"
    facts = [f"{human_count(count)} parameters", *gpus, f"{answer.memory.tokens} tokens{each}", setup.dtype, *extra]
    return f"{type(model).__name__}: {', '.join(facts)}"


def _legend(part: str, nbytes: int) -> list[str | tuple[str, str]]:
    mark, style = _MARKS[part]
    return [" ", (f" {mark} ", style), f" {part:<17}{human_bytes(nbytes):>11}"]


def _advice(answer: Answer, with_plan: bool) -> list[str]:
    """Return what the table does not say: the plan in a sentence, and other changes of the setup."""
    has_sentence = answer.fits and not with_plan
    lines = [fill(f"The plan: {one_line(answer.chosen.plan)}. --plan shows it.", WIDTH)] if has_sentence else []
    changes = []
    for change in answer.changes:
        fits = "" if answer.gpu is None else ", fits" if change.fits else ", does not fit"
        loss = "" if change.loss is None or not change.fits else f", {_loss(change)}"
        note = f" ({change.note})" if change.note else ""
        text = f"{change.what}: {human_bytes(change.total)}{fits}{loss}{note}"
        changes.append(fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
    if changes:
        lines.append("\n".join(["Other changes, each with the best plan that then fits:", *changes]))
    return lines


def bytes_by_part(answer: Answer) -> dict[str, int]:
    """Return the bytes of each part with the chosen plan."""
    workspace = {WORKSPACE: answer.chosen.workspace} if answer.chosen.workspace else {}
    return {**answer.memory.parts, STATE: answer.chosen.state, **workspace}


def _parts(answer: Answer) -> dict[str, int]:
    """Return the bytes of each part in the order of the bar."""
    parts = bytes_by_part(answer)
    if answer.gpu is not None and answer.gpu > answer.chosen.total:
        parts[FREE] = answer.gpu - answer.chosen.total
    return {part: parts[part] for part in _MARKS if part in parts}


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


def _choices(answer: Answer) -> str:
    """Compare optimizers. The smallest plan is no advice: it is only shown where no other plan fits."""
    header = ["optimizer", "state", "all", "fits", "loss"]
    rows = [
        [
            choice.name,
            human_bytes(choice.state),
            human_bytes(choice.total),
            _yes(choice.fits(answer.gpu), answer),
            _loss(choice),
        ]
        for choice in answer.choices
        if choice.name != SMALLEST or (choice == answer.chosen and answer.fits)
    ]
    return table(header, rows, right=["state", "all", "loss"])


def _yes(fits: bool, answer: Answer) -> str:
    return "-" if answer.gpu is None else "yes" if fits else "no"


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

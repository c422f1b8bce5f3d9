"""The answer of ``baoc fit`` as a person reads it: a bar, two tables and a verdict, in 80 columns."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from textwrap import wrap

from torch import nn

from baoc.cli import screen
from baoc.core.text import human_bytes, human_count, table
from baoc.fit import Answer
from baoc.fit.answer import GIVEN

WIDTH = 78  # of the bar
STATE = "optimizer state"
FREE = "free"
_MARKS = {
    "weights": ("w", "white on blue"),
    "gradients": ("g", "black on cyan"),
    STATE: ("s", "black on yellow"),
    "activations": ("a", "white on magenta"),
    "gathered layers": ("l", "black on white"),
    "reserve": ("r", "white on bright_black"),
    FREE: (".", ""),
}
"""A letter and a colour for each part: the letter alone tells them apart."""


def print_answer(name: str, model: nn.Module, answer: Answer) -> None:
    """To the terminal, in colours where it has some."""
    from rich.text import Text

    console = screen.console(sys.stdout)
    console.print(_title(name, model, answer), "\n", sep="\n", end="", markup=False)
    parts = _parts(answer)
    for part, nbytes in parts.items():
        mark, style = _MARKS[part]
        console.print(Text.assemble("  ", (f" {mark} ", style), f" {part:<17}{human_bytes(nbytes):>11}"))
    if answer.memory.activations is None:
        console.print("      activations       not counted: measure them, and give --activations", markup=False)
        console.print(f"      {_wrapped(answer.memory.unknown)}", markup=False)
    bar = Text("[")
    for part, cells in _cells(parts, WIDTH - 2).items():
        mark, style = _MARKS[part]
        bar.append(mark * cells, style)
    console.print(bar.append("]"))
    console.print(_limit(answer), markup=False)
    console.print(Text(verdict(answer), "bold green" if answer.fits else "bold red"), "\n", sep="\n", end="")
    for part in (_choices(answer), *([_changes(answer)] if answer.changes else [])):
        console.print(screen.coloured(part), "\n", sep="\n", end="")
    console.print("The plan:")
    console.print(screen.coloured(str(answer.chosen.plan)))


def _wrapped(reason: str) -> str:
    return "\n      ".join(wrap(reason, WIDTH - 8))


def verdict(answer: Answer) -> str:
    """One line."""
    if answer.gpu is None:
        return f"It takes {human_bytes(answer.chosen.total)} on each GPU. Say --gpu SIZE to ask whether that fits."
    spare = answer.gpu - answer.chosen.total
    if answer.fits:
        loss = answer.chosen.loss
        expected = "" if loss is None else f"; expected loss {_signed(loss)} against AdamW32"
        return f"It fits, with {human_bytes(spare)} to spare{expected}."
    return f"It does not fit: {human_bytes(-spare)} too much on each GPU, {_with_what(answer)}."


def _with_what(answer: Answer) -> str:
    return "with the budget that was asked for" if answer.chosen.name == GIVEN else "with the smallest plan"


def _title(name: str, model: nn.Module, answer: Answer) -> str:
    setup, trained = answer.setup, [block.numel for block in answer.chosen.plan.blocks]
    tensors = sum(len(block.parameters) for block in answer.chosen.plan.blocks)
    spread = "FSDP2" if setup.fsdp else "a copy on each"
    how = "one GPU" if setup.world_size == 1 else f"{setup.world_size} GPUs, {spread}"
    tokens = f"{answer.memory.tokens} tokens each, {setup.dtype}"
    extra = ", checkpointing" if setup.checkpointing else ""
    return (
        f"{name} ({type(model).__name__}): {human_count(sum(trained))} trained parameters, {tensors} tensors\n"
        f"{how}, {tokens}{extra}"
    )


def _parts(answer: Answer) -> dict[str, int]:
    """In the order of the bar; state is where the eye looks first, after what cannot be changed."""
    parts = {**answer.memory.parts, STATE: answer.chosen.state}
    if answer.gpu is not None and answer.gpu > answer.chosen.total:
        parts[FREE] = answer.gpu - answer.chosen.total
    return {part: parts[part] for part in _MARKS if part in parts}


def _cells(parts: Mapping[str, int], width: int) -> dict[str, int]:
    """Characters for each part: the largest remainders get what rounding down leaves.

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
    """A ruler below the bar, with the GPU's end marked where the bar goes beyond it."""
    if answer.gpu is None:
        return f" {human_bytes(answer.chosen.total)}".rjust(WIDTH)
    label = f"{human_bytes(answer.gpu)} "
    end = round((WIDTH - 2) * min(1.0, answer.gpu / answer.chosen.total)) if answer.chosen.total else WIDTH - 2
    return f"{label}^".rjust(end + 1) if end >= len(label) else f"{' ' * end}^ {label}".rstrip()


def _choices(answer: Answer) -> str:
    header = ["optimizer", "state", "all", "fits", "loss"]
    rows = [
        [
            choice.name,
            human_bytes(choice.state),
            human_bytes(choice.total),
            _yes(choice.fits(answer.gpu), answer),
            "not measured" if choice.loss is None else _signed(choice.loss),
        ]
        for choice in answer.choices
    ]
    return table(header, rows, right=["state", "all", "loss"])


def _changes(answer: Answer) -> str:
    header = ["or change", "all", "fits", "loss"]
    rows = [
        [
            change.what,
            human_bytes(change.total),
            _yes(change.fits, answer),
            "not measured" if change.loss is None else _signed(change.loss),
        ]
        for change in answer.changes
    ]
    notes = [f"{change.what}: {change.note}" for change in answer.changes if change.note]
    return "\n".join([table(header, rows, right=["all", "loss"]), *notes])


def _yes(fits: bool, answer: Answer) -> str:
    return "-" if answer.gpu is None else "yes" if fits else "no"


def _signed(loss: float) -> str:
    return f"{loss:+.2f}%"

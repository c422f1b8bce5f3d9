"""The page: what loses to 8-bit AdamW first, then every task."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from baoc.core.text import human_count
from experiments.finetune.results import Difference, Results, difference
from experiments.finetune.running import BASELINE, MUON, methods
from experiments.finetune.tasks import WARM_UP, FineTuning
from experiments.finetune.training import CLIP, UNTRAINED, WEIGHT_DECAY
from experiments.runs import Row, markdown
from experiments.runs.page import estimate
from experiments.zoo.training import FACTOR, REFERENCE

ABOUT = """\
Real pretrained weights, each fine-tuned on a task with a test set. AdamW32 is `torch.optim.AdamW`, and `adamw-8` is
8-bit AdamW. Each runs at its own best learning rate, a factor of {factor:g} apart, by the validation loss of the first
seed; the grid is extended while the best is at an edge. BAOC (`baoc@` with its budget, all settings at their defaults)
and `muon-8` (8-bit Muon on hidden matrices, AdamW32 on the rest) run at **AdamW32's** best learning rate and are not
tuned; where `muon-8` was tuned as well, it has a second line. All have a warm-up of {warm:g} of the steps, a cosine to
zero, gradients clipped to {clip:g}, weight decay {decay:g} and fp32 weights. The test set is scored once, at the end.

*Difference* is of the test loss to `adamw-8`'s in percent, mean ± standard error of the differences seed by seed: runs
of one seed see the same batches. **Worse** is beyond two standard errors, however small the difference; with three
seeds, about one comparison in ten of equal methods is called worse. *Distance* is the length of all weights' change
relative to the length of the initial weights. *Bytes* are of optimizer state, per parameter."""


@dataclass(frozen=True)
class Line:
    """A method on a task."""

    task: FineTuning
    method: str
    rows: list[Row]
    """By seed, at the method's learning rate."""
    found: Difference | None

    @property
    def is_default(self) -> bool:
        return self.method == "baoc@auto"

    @property
    def verdict(self) -> str:
        if self.rows[0]["error"]:
            return "no plan"
        if self.method == BASELINE or self.found is None:
            return "-"
        return f"**{self.found.verdict}**" if self.found.verdict == "worse" else self.found.verdict


def text(tasks: Sequence[FineTuning], rows: Sequence[Row], command: Sequence[str]) -> str:
    """Return the page of what is there, without what is written by hand."""
    results = Results(rows)
    lines = {task.name: _lines(task, results) for task in tasks}
    about = ABOUT.format(factor=FACTOR, warm=WARM_UP, clip=CLIP, decay=WEIGHT_DECAY)
    parts = ["# Pretrained weights", "", about, "", f"Made by `{shlex.join(command)}`.", ""]
    parts += _lost([line for each in lines.values() for line in each])
    for task in tasks:
        if lines[task.name]:
            parts += ["", *_section(task, lines[task.name], results)]
    return "\n".join([*parts, ""])


def _lines(task: FineTuning, results: Results) -> list[Line]:
    rung = results.best_rung(task, REFERENCE)
    own = results.best_rung(task, BASELINE)
    if rung is None or own is None:
        return []
    theirs = results.of(task, BASELINE, own)
    lines = [Line(task, BASELINE, theirs, None)]
    for method in methods(task):
        if rows := results.of(task, method, rung):
            lines.append(Line(task, method, rows, difference(rows, theirs)))
    muon = results.best_rung(task, MUON)
    if muon is not None and muon != rung:
        rows = results.of(task, MUON, muon)
        lines.append(Line(task, MUON, rows, difference(rows, theirs)))
    return lines


def _lost(lines: Sequence[Line]) -> list[str]:
    """All that is worse than 8-bit AdamW, the worst first, and what the default does."""
    lost = [line for line in lines if line.found and line.found.verdict == "worse"]
    lost.sort(key=lambda line: -line.found.percent if line.found else 0)
    cells = [[line.task.name, f"`{line.method}`", _lr(line), told(line.found), _bytes(line.rows)] for line in lost]
    table = (
        markdown.table(["Task", "Method", "lr", "Difference (%)", "Bytes"], cells) if cells else ["Nothing is worse."]
    )
    absent = [f"`{line.method}` on {line.task.name}" for line in lines if line.rows[0]["error"]]
    none = ["", f"No plan fits for {', '.join(absent)}: the default bounds the time of a step."] if absent else []
    default = [line for line in lines if line.is_default]
    worse = [line.task.name for line in default if line in lost]
    said = f"worse than `{BASELINE}` on {', '.join(worse)}" if worse else f"not worse than `{BASELINE}` on any task"
    return ["## What loses", "", f"The default, `baoc@auto`, is {said} ({len(default)} tasks).", "", *table, *none]


def _section(task: FineTuning, lines: Sequence[Line], results: Results) -> list[str]:
    first = lines[0].rows[0]
    (untrained,) = results.of(task, UNTRAINED, 0) or [None]
    before = f" Before training: test loss {_scores([untrained])}." if untrained else ""
    size = human_count(first["parameters"])
    about = f"{task.about}: {size} parameters, {task.steps} steps. BAOC takes the regime `{first['regime']}`.{before}"
    has_accuracy = "accuracy" in (first["test"] or {})
    header = ["Method", "lr", "Bytes", "Test loss", *(["Accuracy"] if has_accuracy else []), "Distance"]
    cells = [_cells(line, has_accuracy) for line in lines]
    table = markdown.table([*header, "Difference (%)", "Seeds", "Verdict"], cells, numbers=True)
    plans = [f"- `{line.method}`: {_plan(line.rows[0])}" for line in lines if line.rows[0].get("plan")]
    return [f"## {task.name}", "", about, "", *table, "", "The plans:", "", *plans, "", *_grids(task, results)]


def _cells(line: Line, has_accuracy: bool) -> list[str]:
    rows = [row for row in line.rows if row["test"]]
    accuracy = estimate([100 * row["test"]["accuracy"] for row in rows], ".1f") if has_accuracy else ""
    distance = estimate([row["distance"] for row in rows], ".4f")
    name = "AdamW32" if line.method == REFERENCE else f"`{line.method}`"
    scores = [_scores(rows), *([accuracy] if has_accuracy else []), distance]
    return [name, _lr(line), _bytes(line.rows), *scores, told(line.found), str(len(line.rows)), line.verdict]


def _lr(line: Line) -> str:
    return f"{line.rows[0]['lr']:.2g}"


def _plan(row: Row) -> str:
    total = sum(row["plan"].values())
    shares = sorted(row["plan"].items(), key=lambda item: -item[1])
    return ", ".join(f"`{name}` on {100 * numel / total:.3g}%" for name, numel in shares)


def _grids(task: FineTuning, results: Results) -> list[str]:
    told_grids = []
    for method in (REFERENCE, BASELINE, MUON):
        tried = [row for rung in range(-9, 10) for row in results.of(task, method, rung)[:1] if row["seed"] == 0]
        if len(tried) > 1:
            values = (f"{row['lr']:.2g}: {_validation(row)}" for row in tried)
            told_grids.append(f"{'AdamW32' if method == REFERENCE else f'`{method}`'} {', '.join(values)}")
    return [f"Validation losses by learning rate, first seed: {'; '.join(told_grids)}."]


def _validation(row: Row) -> str:
    return f"{row['validation']['loss']:.4f}" if row["validation"] else "diverged"


def _scores(rows: Sequence[Row]) -> str:
    return estimate([row["test"]["loss"] for row in rows], ".4f")


def _bytes(rows: Sequence[Row]) -> str:
    held = [row["state_bytes"] / row["parameters"] for row in rows if "state_bytes" in row]
    return f"{statistics.fmean(held):.2f}" if held else "-"


def told(found: Difference | None) -> str:
    """Return a difference as a cell of a table.

    >>> told(Difference(1.25, 0.5, 3)), told(Difference(-1.0, math.nan, 1)), told(None)
    ('+1.25 ± 0.50', '-1.00', '-')
    """
    if found is None:
        return "-"
    if math.isinf(found.percent):
        return "diverged"
    return f"{found.percent:+.2f}" + (f" ± {found.error:.2f}" if math.isfinite(found.error) else "")

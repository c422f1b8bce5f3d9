"""The page of the zoo: what is lost first, then counts, then every task."""

from __future__ import annotations

import math
import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from baoc.core.text import human_count
from experiments.runs import Row, markdown
from experiments.runs.page import estimate
from experiments.zoo.results import PERCENT, RATIO, Comparison, Results
from experiments.zoo.running import BESIDE, BUDGETS, CONFIRMED
from experiments.zoo.task import Task
from experiments.zoo.training import BUDGETED, EVALUATIONS, FACTOR, FLOOR, REFERENCE, mean

ABOUT = """\
{count} small tasks of the kinds that people train, {seeds} seeds each, and {more} where a budget loses at AdamW32's
best learning rate. AdamW32 is `torch.optim.AdamW` at the best of at least five learning rates, a factor of {factor:g}
apart, tried with the first seed; the grid is extended while the best is at an edge. BAOC replaces it in one line, at
that learning rate, at a third and at three times of it, and is compared with AdamW32 at the same learning rate, seed by
seed: runs of one seed begin with the same weights and see the same batches.

A score is a loss on fixed held-out data or the objective itself, the mean of {evaluations} evaluations in the last
tenth of a run. A budget **loses** if its score is worse by more than two standard errors and by more than {percent:g}%,
or {ratio:g} times AdamW32's where scores span decades (a ratio, "x"), or if it diverges. Scores below {floor:g} count
as {floor:g}. A win is the same the other way round; all else is a tie. "No plan": the budget is smaller than the
smallest plan of the task, which is too small to save anything."""

AT = {0: "AdamW32's best lr", -1: "a third of it", 1: "three times it"}


@dataclass(frozen=True)
class Entry:
    """A comparison that was made."""

    task: Task
    budget: str
    factor: int
    found: Comparison

    @property
    def ratio(self) -> float:
        """The score over AdamW32's."""
        return self.found.difference if self.task.decades else 1 + self.found.difference / 100

    @property
    def text(self) -> str:
        return told(self.found, decades=self.task.decades)


def told(found: Comparison | None, *, decades: bool) -> str:
    """Return a comparison as a cell of a table; a loss is bold.

    >>> told(Comparison("loss", 12.5, 1.25), decades=False), told(Comparison("tie", 1.25, float("nan")), decades=True)
    ('**+12.5 ± 1.2%**', 'x1.25')
    """
    if found is None:
        return "-"
    if found.verdict == "no plan":
        return "no plan"
    if math.isinf(found.difference):
        return "**diverged**"
    if decades:
        spread = f" ± {100 * found.error:.0f}%" if math.isfinite(found.error) else ""
        text = f"x{found.difference:.3g}{spread}"
    else:
        spread = f" ± {found.error:.1f}" if math.isfinite(found.error) else ""
        text = f"{found.difference:+.1f}{spread}%"
    return f"**{text}**" if found.verdict == "loss" else text


def text(tasks: Sequence[Task], rows: Sequence[Row], seeds: int, command: Sequence[str]) -> str:
    """Return the page of what is there, without what is written by hand."""
    results, most = Results(rows), CONFIRMED * seeds
    trained = [task for task in tasks if results.best_rung(task) is not None]
    entries = [
        Entry(task, budget, factor, found)
        for budget in BUDGETS
        for factor in BESIDE
        for task in trained
        if (found := results.comparison(task, f"{BUDGETED}{budget}", most, factor)) is not None
    ]
    compared = {entry.task for entry in entries}
    trained = [task for task in trained if task in compared]
    about = ABOUT.format(
        count=len(trained),
        seeds=seeds,
        more=CONFIRMED * seeds,
        factor=FACTOR,
        evaluations=EVALUATIONS,
        percent=PERCENT,
        ratio=RATIO,
        floor=FLOOR,
    )
    parts = ["# The zoo", "", about, "", f"Made by `{shlex.join(command)}`.", ""]
    parts += [*_lost(entries), "", *_counts(entries), "", *_details(trained, results, most), ""]
    return "\n".join([*parts, *_tasks(trained, results, most), ""])


def _lost(entries: Sequence[Entry]) -> list[str]:
    """All that is worse than AdamW32 at its best learning rate, the worst first."""
    lost = sorted((one for one in entries if one.found.verdict == "loss" and not one.factor), key=lambda e: -e.ratio)
    cells = [[one.task.name, one.task.kind, one.budget, one.text] for one in lost]
    about = f"At {AT[0]}, the worst first."
    nothing = ["Nothing is worse than AdamW32."]
    table = markdown.table(["Task", "Kind", "Budget", "To AdamW32"], cells) if cells else nothing
    return ["## What is lost", "", about, "", *table]


def _counts(entries: Sequence[Entry]) -> list[str]:
    cells = []
    for budget in BUDGETS:
        for factor in BESIDE:
            mine = [one for one in entries if (one.budget, one.factor) == (budget, factor)]
            if not mine:
                continue
            count = Counter(one.found.verdict for one in mine)
            compared = [one for one in mine if one.found.verdict != "no plan"]
            worst = max(compared, key=lambda one: one.ratio, default=None)
            median = f"x{statistics.median(one.ratio for one in compared):.3f}" if compared else "-"
            numbers = [str(count[verdict]) for verdict in ("win", "tie", "loss", "no plan")]
            told_worst = f"{worst.task.name} {worst.text}" if worst else "-"
            cells.append([budget, AT[factor], *numbers, median, told_worst])
    header = ["Budget", "Learning rate", "Wins", "Ties", "Losses", "No plan", "Median", "Worst case"]
    about = "*Median* is of the ratio of BAOC's score to AdamW32's."
    return ["## Counts", "", about, "", *markdown.table(header, cells)]


def _details(tasks: Sequence[Task], results: Results, seeds: int) -> list[str]:
    header = ["Task", "AdamW32", *(f"{budget}{_mark(factor)}" for budget in BUDGETS for factor in BESIDE)]
    cells = []
    for task in tasks:
        best = results.best_rung(task)
        assert best is not None
        score = mean(list(results.scores(task, REFERENCE, best, seeds).values()), task.decades)
        found = (
            results.comparison(task, f"{BUDGETED}{budget}", seeds, factor) for budget in BUDGETS for factor in BESIDE
        )
        cells.append([task.name, f"{score:.4g}", *(told(one, decades=task.decades) for one in found)])
    about = f"Each budget at {AT[0]}, at {AT[-1]} (/3) and at {AT[1]} (x3). Losses are bold."
    return ["## Every task", "", about, "", *markdown.table(header, cells, numbers=True)]


def _tasks(tasks: Sequence[Task], results: Results, seeds: int) -> list[str]:
    header = ["Task", "What it is", "Parameters", "Steps", "Schedule", "AdamW32's lr", "Seconds"]
    cells = []
    for task in tasks:
        best = results.best_rung(task)
        assert best is not None
        rows = results.rows_of(task, REFERENCE, best, seeds)
        seconds = estimate([statistics.fmean(row["seconds"] for row in rows)], ".1f")
        size, lr = human_count(rows[0]["parameters"]), f"{rows[0]['lr']:.2g}"
        cells.append([task.name, task.about, size, str(task.steps), task.schedule, lr, seconds])
    about = "Seconds are CPU time of a run with AdamW32, on one thread."
    return ["## The tasks", "", about, "", *markdown.table(header, cells)]


def _mark(factor: int) -> str:
    return {0: "", -1: " /3", 1: " x3"}[factor]

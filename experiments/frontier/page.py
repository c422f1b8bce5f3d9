"""The page of the frontier: a table for each workload, and what was to be reached."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from experiments import methods, workloads
from experiments.frontier.catalog import BUDGETS, Setting
from experiments.frontier.lines import Line, budgeted, lines_of
from experiments.runs import Row, markdown
from experiments.runs.page import estimate
from experiments.runs.summary import REFERENCE
from experiments.runs.tables import EDGE

ABOUT = """\
Test loss against bytes of optimizer state. *Difference* is to AdamW32's test loss in percent (less is better), mean ±
standard error of the differences seed by seed: runs of one seed begin with the same weights and see the same batches.
*B/param* is the state that was held at the end, in bytes per parameter, and *share* the most that was ever held, of
AdamW16's state. *baoc default* is `EffectPlanner(time=2)`: with so few tokens per step, the default limit of 1.1 would
leave Muon out. *BAOC (paper)* is `PaperPlanner`. BAOC, single configurations (`code`) and the heuristic run at the
learning rate that is best for AdamW32; peers at their own. AdamW32's is the best by the validation loss of seeds 0 and
1, of factors of two that were tried until the best was not at an edge; a peer's is the best of three by that of seed 0.
{edge}: an edge."""


def text(settings: Sequence[Setting], rows: Sequence[Row], command: Sequence[str], figure: str | None = None) -> str:
    parts = ["# The frontier", "", ABOUT.format(edge=EDGE), "", f"Made by `{shlex.join(command)}`."]
    parts += ["", f"![Test loss against bytes of state]({figure})"] if figure else []
    by_setting = [(setting, lines_of(setting, rows)) for setting in settings]
    by_setting = [(setting, lines) for setting, lines in by_setting if lines]
    parts += ["", *_overview(by_setting)]
    for setting, lines in by_setting:
        parts += ["", f"## {setting.workload}", "", *_table(setting, lines, rows)]
    return "\n".join([*parts, "", *_checks(by_setting), "", *_expectations(by_setting), ""])


def _overview(by_setting: Sequence[tuple[Setting, Sequence[Line]]]) -> list[str]:
    """Workloads down, BAOC's budgets across."""
    ours = {setting.workload: budgeted(lines) for setting, lines in by_setting}
    shares = [share for share in BUDGETS if any(share in of for of in ours.values())]
    cells = [
        [name, *(estimate(list(of[share].differences.values()), "+.1f") if share in of else "-" for share in shares)]
        for name, of in ours.items()
    ]
    header = ["Workload", *(f"{share:g}" for share in shares)]
    about = "BAOC against AdamW32 in percent of its test loss, by the share of AdamW16's state that is its budget."
    return ["## BAOC at every budget", "", about, "", *markdown.table(header, cells, numbers=True)]


def _table(setting: Setting, lines: Sequence[Line], rows: Sequence[Row]) -> list[str]:
    header = ["Method", "B/param", "Share (%)", "Test loss", "Difference (%)", "n", "lr"]
    cells = [
        [
            line.label,
            f"{line.bytes_per_parameter:.2f}",
            f"{100 * line.share:.1f}",
            estimate([row["test_loss"] for row in line.rows.values()], ".3f"),
            "-" if line.method == REFERENCE else estimate(list(line.differences.values()), "+.2f"),
            str(len(line.rows)),
            line.factor,
        ]
        for line in lines
    ]
    shown = {line.method for line in lines}
    mine = [row for row in rows if row["workload"] == setting.workload and row["steps"] == setting.steps]
    failed = {row["method"]: row["error"] or "Diverged." for row in mine if row["error"] or row["diverged_at"]}
    notes = [f"- {methods.get(name).label}: {reason}" for name, reason in failed.items() if name not in shown]
    batch = mine[0]["settings"]["batch_size"] or workloads.get(setting.workload).batch_size
    lr = next(iter(lines[0].references.values()))["lr"]
    about = f"{setting.steps} steps of {batch} examples; AdamW32's lr is {lr:.2g}."
    return [about, "", *markdown.table(header, cells, numbers=True), *(["", *notes] if notes else [])]


def _checks(by_setting: Sequence[tuple[Setting, Sequence[Line]]]) -> list[str]:
    parts = ["## Checks", "", "Targets: the difference in percent that BAOC must not exceed at a budget.", ""]
    parts += markdown.table(["Workload", "Budget", "Target", "Measured", ""], list(_targets(by_setting)), numbers=True)
    parts += ["", "What fits a budget of BAOC's and is better beyond two standard errors:", ""]
    parts += [f"- {told}" for told in _beaten(by_setting)] or ["- nothing."]
    parts += ["", "Budgets that are worse than a smaller one beyond two standard errors:", ""]
    return [*parts, *([f"- {told}" for told in _not_monotone(by_setting)] or ["- none."])]


def _targets(by_setting: Sequence[tuple[Setting, Sequence[Line]]]) -> Iterator[list[str]]:
    for setting, lines in by_setting:
        ours = budgeted(lines)
        for share, target in setting.targets.items():
            line = ours.get(share)
            if line is None:
                yield [setting.workload, f"{share:g}", f"{target:+.1f}", "-", "not run"]
                continue
            verdict = "met" if line.mean <= target else f"missed by {line.mean - target:.2f}"
            measured = estimate(list(line.differences.values()), "+.2f")
            yield [setting.workload, f"{share:g}", f"{target:+.1f}", measured, verdict]


def _beaten(by_setting: Sequence[tuple[Setting, Sequence[Line]]]) -> Iterator[str]:
    for setting, lines in by_setting:
        for share, line in budgeted(lines).items():
            allowed = max(share, line.share)  # the cheapest plan is its own budget
            for other in lines:
                gain = other.better_than(line) if other.share <= allowed and not _is_ours(other) else None
                if gain is not None:
                    yield f"{setting.workload} at {share:g}: {other.label} by {gain:.2f} points."


def _not_monotone(by_setting: Sequence[tuple[Setting, Sequence[Line]]]) -> Iterator[str]:
    for setting, lines in by_setting:
        ours = sorted(budgeted(lines).items())
        for index, (share, line) in enumerate(ours):
            gains = [(smaller, other.better_than(line)) for smaller, other in ours[:index]]
            for smaller, gain in gains:
                if gain is not None:
                    yield f"{setting.workload}: {share:g} is worse than {smaller:g} by {gain:.2f} points."


def _expectations(by_setting: Sequence[tuple[Setting, Sequence[Line]]]) -> list[str]:
    """What BAOC's plans said of themselves beside what came of them."""
    cells = []
    for setting, lines in by_setting:
        for line, expected in ((line, line.expected) for line in lines):
            if expected is not None:
                measured = estimate(list(line.differences.values()), "+.2f")
                off = f"{line.mean - expected:+.2f}"
                cells.append([setting.workload, line.label, f"{expected:+.2f}", measured, off])
    about = "What plans expected of themselves, in percent of AdamW32's loss, and what was measured."
    header = ["Workload", "Method", "Expected", "Measured", "Off by (points)"]
    return ["## Expected and measured", "", about, "", *markdown.table(header, cells, numbers=True)]


def _is_ours(line: Line) -> bool:
    return line.method == REFERENCE or line.method.startswith("baoc@")

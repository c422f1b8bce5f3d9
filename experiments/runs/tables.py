"""The paper's tables, as Markdown for people and CSV for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from experiments.runs import markdown
from experiments.runs.cell import Row
from experiments.runs.summary import Line, Spread

MB = 2**20  # as in the paper
EDGE, UNTUNED, DIVERGED, OVER = "†", "…", "‡", "§"
_NOTES = {
    EDGE: "the best learning rate is at the edge of the grid",
    UNTUNED: "not all learning rates have been tried yet",
    DIVERGED: "some seeds diverged, and are not in the means",
    OVER: "no plan fits the budget after the warm-up, so training stays on AdamW16 and above the budget",
}


@dataclass(frozen=True)
class Column:
    """Something that is measured in every run."""

    title: str
    spread: Callable[[Line], Spread | None]
    is_difference: bool = False


def _seeds(value: Callable[[Row], float | None]) -> Callable[[Line], Spread | None]:
    return lambda line: line.spread(value)


def _per(field: str, unit: float) -> Callable[[Line], Spread | None]:
    return _seeds(lambda row: None if row.get(field) is None else row[field] / unit)


def _share(row: Row) -> float:
    return 100 * row["state_bytes"] / row["reference_bytes"]


def _score(split: str) -> Callable[[Line], Spread | None]:
    """Accuracies in percent."""

    def value(row: Row) -> float | None:
        score = row.get(f"{split}_metric")
        return score if score is None or row["metric"] != "accuracy" else 100 * score

    return _seeds(value)


def _blocks(row: Row) -> float | None:
    return len(row["plan"]["blocks"]) if row.get("plan") else None


COLUMNS: dict[str, Column] = {
    "state": Column("State (MB)", _per("state_bytes", MB)),
    "largest": Column("Largest state (MB)", _per("largest_state_bytes", MB)),
    "share": Column("of AdamW16 (%)", _seeds(_share)),
    "blocks": Column("Blocks", _seeds(_blocks)),
    "loss": Column("Loss", _per("train_loss", 1)),
    "time": Column("Time (s)", _per("seconds", 1)),
    "minutes": Column("Time (min)", _per("seconds", 60)),
    "step": Column("Step (ms)", _per("step_seconds", 1e-3)),
    "peak": Column("Peak (MB)", _per("peak_bytes", MB)),
    "train": Column("Train {metric}", _score("train")),
    "validation": Column("Validation {metric}", _score("validation")),
    "test": Column("Test {metric}", _score("test")),
    "against": Column("against {reference} ({unit})", lambda line: line.against_reference, is_difference=True),
    "moved": Column("Plan differs (%)", lambda line: line.moved),
}


_ABOUT = (
    "Mean ± standard deviation over n seeds. MB is 2^20 bytes. Time is of the training. "
    "Against another method: the difference of test scores seed by seed, which see the same batches."
)


def text(title: str, columns: Sequence[str], results: Mapping[str, Sequence[Line]]) -> str:
    """A table for each workload: one line per method, mean ± standard deviation, the best test score in bold."""
    parts = [f"# {title}", "", _ABOUT]
    for workload, lines in results.items():
        parts += ["", f"## {workload}", "", *_table(columns, lines)]
    body = "\n".join(parts)
    notes = [f"{mark} {note}." for mark, note in _NOTES.items() if mark in body]
    peaks = dict.fromkeys(
        row["peak_kind"] for lines in results.values() for line in lines for row in line.trained if row["peak_kind"]
    )
    if "peak" in columns and peaks:
        notes.append(f"Peak is {' or '.join(peaks)}.")
    return "\n".join([body, *(["", *"  \n".join(notes).split("\n")] if notes else []), ""])


def _table(names: Sequence[str], lines: Sequence[Line]) -> list[str]:
    metric = metric_title(lines[0])
    unit = "points" if lines[0]["metric"] == "accuracy" else "%"
    reference = lines[0].reference["label"] if lines[0].reference else "the reference"
    titles = [COLUMNS[name].title.format(metric=metric, unit=unit, reference=reference) for name in names]
    header = ["Method", *titles, "lr", "n"]
    best = _best_line(lines)
    rows = []
    for line in lines:
        cells = [_cell(COLUMNS[name], line, bold=name == "test" and line is best) for name in names]
        rows.append([_name(line), *cells, _lr(line), _count(line)])
    return markdown.table(header, rows, numbers=True)


def metric_title(line: Line) -> str:
    return "accuracy (%)" if line["metric"] == "accuracy" else str(line["metric"])


def _best_line(lines: Sequence[Line]) -> Line | None:
    scored = [(spread.mean, line) for line in lines if (spread := COLUMNS["test"].spread(line)) is not None]
    if not scored:
        return None
    choose = max if lines[0]["higher_is_better"] else min
    return choose(scored, key=lambda pair: pair[0])[1]


def _name(line: Line) -> str:
    if line.failure:
        return f"{line['label']} (does not fit)"
    if line.over_budget:
        return f"{line['label']}{OVER}"
    if not line.same_plans:
        return str(line["label"])
    some = "" if line.same_plans == len(line.rows) else f", {line.same_plans} of {len(line.rows)} seeds"
    return f"{line['label']} (same plan{some})"


def _lr(line: Line) -> str:
    return f"{line['lr']:.2g}{EDGE if line.at_edge else ''}{'' if line.is_tuned else UNTUNED}"


def _count(line: Line) -> str:
    return f"{len(line.trained)} of {len(line.rows)}{DIVERGED}" if line.diverged else str(len(line.trained))


def _cell(column: Column, line: Line, *, bold: bool) -> str:
    spread = column.spread(line)
    return _signed(spread) if column.is_difference else _text(spread, bold=bold)


def _signed(spread: Spread | None) -> str:
    """As differences are written.

    >>> _signed(Spread(-0.4512, 0.1)), _signed(Spread(2.0, None))
    ('-0.45 ± 0.10', '+2.00')
    """
    if spread is None:
        return "-"
    return f"{spread.mean:+.2f}" + ("" if spread.std is None else f" ± {spread.std:.2f}")


def _text(spread: Spread | None, *, bold: bool = False) -> str:
    """With as many digits as the paper has.

    >>> _text(Spread(7.39071, 0.0123)), _text(Spread(234.93788, None), bold=True), _text(None)
    ('7.3907 ± 0.0123', '**234.94**', '-')
    """
    if spread is None:
        return "-"
    digits = max(0, 5 - len(str(int(abs(spread.mean)))))
    text = f"{spread.mean:.{digits}f}" + ("" if spread.std is None else f" ± {spread.std:.{digits}f}")
    return f"**{text}**" if bold else text


def as_csv(results: Mapping[str, Sequence[Line]]) -> str:
    """Every number, one row for each method on each workload."""
    measured = [f"{name}_{what}" for name in COLUMNS for what in ("mean", "std")]
    fixed = ["workload", "method", "variant", "label", "metric", "lr", "lr_at_edge", "seeds", "diverged", "error"]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*fixed, *measured])
    for line in (line for lines in results.values() for line in lines):
        about = [line["workload"], line["method"], line["variant"], line["label"], line["metric"], line["lr"]]
        numbers: list[object] = []
        for column in COLUMNS.values():
            spread = column.spread(line)
            numbers += ["", ""] if spread is None else [spread.mean, "" if spread.std is None else spread.std]
        writer.writerow([*about, line.at_edge, len(line.trained), line.diverged, line.failure or "", *numbers])
    return file.getvalue()

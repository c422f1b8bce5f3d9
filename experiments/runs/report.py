"""The files with an experiment's results: tables, the overview, the choices of plans, and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from baoc import parse
from experiments.runs import figures, markdown, page, tables
from experiments.runs.catalog import Experiment
from experiments.runs.store import Store, StoreError
from experiments.runs.summary import Line, summarise
from experiments.runs.tables import COLUMNS, EDGE, OVER


def write(store: Store, experiment: Experiment) -> list[Path]:
    """Tables and figures from what is in the store; without matplotlib, the tables alone."""
    if not store.rows:
        raise StoreError(f"there are no finished runs in {str(store.folder)!r} to make tables of.")
    results = in_order(summarise(store.rows, experiment.reference), experiment)
    texts = {
        "table.md": tables.text(experiment.title, experiment.columns, results),
        "table.csv": tables.as_csv(results),
        "overview.md": overview(experiment.title, results),
        "choices.md": choices(results),
    }
    written = [page.write(store, experiment)] if experiment.one_lr else []
    for name, text in texts.items():
        if text is not None:
            written.append(store.folder / name)
            written[-1].write_text(text, encoding="utf-8")
    if experiment.figure is not None and figures.can_draw():
        path = store.folder / f"{experiment.figure}.png"
        figures.draw(experiment.figure, results, path)
        written.append(path)
    return written


def in_order(results: Mapping[str, Sequence[Line]], experiment: Experiment) -> dict[str, list[Line]]:
    """Return lines in the experiment's order: several processes finish them in any."""
    methods = {name: place for place, name in enumerate(experiment.methods)}
    variants = {name: place for place, name in enumerate(("", *experiment.variants, *experiment.more_variants))}

    def place(line: Line) -> tuple[int, int]:
        return methods.get(line["method"], len(methods)), variants.get(line["variant"], len(variants))

    return {workload: sorted(lines, key=place) for workload, lines in results.items()}


_ABOUT_OVERVIEW = (
    "Test score (for accuracies higher is better, else lower), in brackets its difference to {reference}'s seed by\n"
    "seed (points for accuracies, else percent), then the state held in percent of AdamW16's.\n"
    "§: no plan fits the budget after the warm-up, so training stays on AdamW16."
)


def overview(title: str, results: Mapping[str, Sequence[Line]]) -> str:
    """Return all methods on all workloads in one small table, with the workloads side by side."""
    reference = next((line.reference["label"] for lines in results.values() for line in lines if line.reference), "-")
    about = _ABOUT_OVERVIEW.format(reference=reference)
    return "\n".join([f"# {title}", "", about, "", *overview_table(results), ""])


def overview_table(results: Mapping[str, Sequence[Line]]) -> list[str]:
    """Return the overview's table."""
    by_label: dict[str, dict[str, Line]] = {}
    for workload, lines in results.items():
        for line in lines:
            by_label.setdefault(line["label"], {})[workload] = line
    rows = [
        [label, *(_overview_cell(found[workload]) if workload in found else "" for workload in results)]
        for label, found in by_label.items()
    ]
    return markdown.table(["Method", *results], rows)


def _overview_cell(line: Line) -> str:
    test, share, against = (COLUMNS[name].spread(line) for name in ("test", "share", "against"))
    if test is None or share is None:
        return "does not fit" if line.failure else "diverged"
    spread = f" ± {against.std:.1f}" if against is not None and against.std is not None else ""
    difference = f" ({against.mean:+.1f}{spread})" if against is not None else ""
    marks = EDGE * line.at_edge + OVER * bool(line.over_budget)
    return f"{test.mean:.3g}{difference}, {share.mean:.0f}%{marks}"


def choices(results: Mapping[str, Sequence[Line]]) -> str | None:
    """Return tables of what methods with a budget chose on every workload; ``None`` if no method had one."""
    parts = []
    for workload, lines in results.items():
        planned = [line for line in lines if "@" in line["method"] and _plans(line)]
        if planned:
            parts += ["", f"## {workload}", "", *_shares_table(planned)]
            for line in planned:
                parts += ["", f"### {line['label']}", "", *_blocks_table(line)]
    if not parts:
        return None
    about = "Percent of the parameters, mean over seeds; then the blocks of each seed, with what they got."
    return "\n".join(["# Choices", "", about, *parts, ""])


def shares(line: Line) -> dict[str, float]:
    """Which share of the parameters a configuration got, mean over seeds, the largest first."""
    plans = _plans(line)
    total: Counter[str] = Counter()
    for plan in plans.values():
        for configuration, share in plan["shares"].items():
            total[parse(configuration).alias] += share / len(plans)
    return dict(total.most_common())


def _shares_table(lines: Sequence[Line]) -> list[str]:
    by_line = [shares(line) for line in lines]
    names = dict.fromkeys(name for found in by_line for name in found)
    header = ["Method", *names]
    rows = [
        [str(line["label"]), *(f"{100 * found[name]:.1f}" if name in found else "" for name in names)]
        for line, found in zip(lines, by_line)
    ]
    return markdown.table(header, rows)


def _blocks_table(line: Line) -> list[str]:
    """Seeds that cut the model alike share their rows."""
    plans = _plans(line)
    cuts: dict[tuple[str, ...], list[int]] = {}
    for seed, plan in plans.items():
        cuts.setdefault(tuple(plan["blocks"]), []).append(seed)
    rows = []
    for blocks, seeds in cuts.items():
        for block in blocks:
            chosen = dict.fromkeys(parse(plans[seed]["blocks"][block]).alias for seed in seeds)
            rows.append([", ".join(map(str, seeds)), f"`{block}`", " or ".join(chosen)])
    return markdown.table(["Seeds", "Block", "Configuration"], rows)


def _plans(line: Line) -> dict[int, dict[str, dict[str, object]]]:
    return {row["seed"]: row["plan"] for row in line.trained if row["plan"]}

"""The files with an experiment's results."""

from __future__ import annotations

from pathlib import Path

from experiments.runs import choices, figures, overview, page, tables
from experiments.runs.catalog import Experiment
from experiments.runs.store import Store, StoreError
from experiments.runs.summary import summarise


def write(store: Store, experiment: Experiment) -> list[Path]:
    """Tables and figures from what is in the store; without matplotlib, the tables alone."""
    if not store.rows:
        raise StoreError(f"there are no finished runs in {str(store.folder)!r} to make tables of.")
    results = summarise(store.rows)
    texts = {
        "table.md": tables.text(experiment.title, experiment.columns, results),
        "table.csv": tables.as_csv(results),
        "overview.md": overview.text(experiment.title, results),
        "choices.md": choices.text(results),
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

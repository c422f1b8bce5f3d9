"""The files with an experiment's results."""

from __future__ import annotations

from pathlib import Path

from experiments.runs import choices, figures, tables
from experiments.runs.catalog import Experiment
from experiments.runs.store import Store, StoreError
from experiments.runs.summary import summarise


def write(store: Store, experiment: Experiment) -> list[Path]:
    """Tables and figures from what is in the store; without matplotlib, the tables alone."""
    if not store.rows:
        raise StoreError(f"there are no finished runs in {str(store.folder)!r} to make tables of.")
    results = summarise(store.rows)
    written = [store.folder / "table.md", store.folder / "table.csv"]
    written[0].write_text(tables.markdown(experiment.title, experiment.columns, results), encoding="utf-8")
    written[1].write_text(tables.as_csv(results), encoding="utf-8")
    chosen = choices.markdown(results)
    if chosen is not None:
        written.append(store.folder / "choices.md")
        written[-1].write_text(chosen, encoding="utf-8")
    if experiment.figure is not None and figures.can_draw():
        path = store.folder / f"{experiment.figure}.png"
        figures.draw(experiment.figure, results, path)
        written.append(path)
    return written

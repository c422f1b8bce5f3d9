"""The loss that BAOC reaches at every budget, beside all that could be had for as many bytes.

python -m experiments frontier --jobs 2 --output docs/results/frontier
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.frontier import figure, page, running
from experiments.frontier.catalog import BUDGETS, SETTINGS, Setting
from experiments.frontier.lines import lines_of
from experiments.frontier.running import Chosen
from experiments.runs import RunOptions, Store, StoreError
from experiments.runs.figures import can_draw
from experiments.runs.page import write_page

__all__ = ["BUDGETS", "SETTINGS", "Chosen", "Setting", "train", "write"]


def train(
    settings: Sequence[Setting], chosen: Chosen, folder: Path, seeds: int, options: RunOptions, workers: int = 1
) -> None:
    """Train what is missing."""
    with Store(folder).writing("frontier") as store:
        running.run(settings, chosen, store, seeds, options, workers)


def write(settings: Sequence[Setting], folder: Path, command: Sequence[str] = ()) -> list[Path]:
    """The page and the figure of the runs that are there; without matplotlib, the page alone."""
    store = Store(folder)
    if not store.rows:
        raise StoreError(f"there are no finished runs in {str(folder)!r} to make a page of.")
    drawn = []
    if can_draw():
        drawn = [folder / "frontier.png"]
        found = {setting.workload: lines_of(setting, store.rows) for setting in settings}
        figure.draw({workload: lines for workload, lines in found.items() if lines}, drawn[0])
    picture = f"{folder.name}/{drawn[0].name}" if drawn else None
    return [write_page(folder, page.text(settings, store.rows, command, picture)), *drawn]

"""Finished runs in a file: one JSON line each, never lost and never half there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from experiments.runs import ranks
from experiments.runs.cell import Cell, Row, RunError
from experiments.runs.series import Series

FORMAT = "baoc.runs"
VERSION = 1


class StoreError(RunError):
    """A folder of runs that cannot be read, or was made with other settings."""


class Store:
    """The runs of one experiment, in a folder.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     with Store(folder).writing("sweep") as store:
    ...         store.add({"key": "a run", "test_loss": 1.5})
    ...     Store(folder).rows
    [{'key': 'a run', 'test_loss': 1.5}]
    """

    def __init__(self, folder: str | os.PathLike[str], *, must_exist: bool = False) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "runs.jsonl"
        self.experiment: str | None = None
        self.rows: list[Row] = []
        self._complete = 0  # bytes of whole lines: a torn one, from a killed process, is written over
        self._file: BinaryIO | None = None
        if self.path.exists():
            self._read(self.path.read_bytes())
        elif must_exist:
            raise StoreError(f"there is no {self.path.name} in {str(self.folder)!r}.")

    @contextmanager
    def writing(self, experiment: str) -> Iterator[Store]:
        """Allow :meth:`add`, for one process at a time."""
        if not ranks.is_first():  # it knows all rows, and the first process writes them
            yield self
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.path, "r+b" if self.path.exists() else "w+b") as self._file:
            _lock(self._file, self.path)
            self._read(self._file.read())  # again: another process may have written since
            if self.experiment is None:
                self._append({"format": FORMAT, "version": VERSION, "experiment": experiment})
                self.experiment = experiment
            if self.experiment != experiment:
                raise StoreError(
                    f"{str(self.folder)!r} has the runs of the experiment {self.experiment!r}. Give another --output."
                )
            yield self
        self._file = None

    def add(self, row: Row) -> None:
        """Write a run down. When this returns, it is on the disk."""
        if ranks.is_first():
            self._append(row)
        self.rows.append(row)

    def find(self, cell: Cell) -> Row | None:
        return next((row for row in self.rows if row["key"] == cell.key), None)

    def row(self, cell: Cell) -> Row:
        """Return a finished run."""
        row = self.find(cell)
        if row is None:
            raise KeyError(f"the run {cell.key!r} is not finished.")
        return row

    def check(self, series: Series, settings: Mapping[str, Any]) -> None:
        """Refuse runs that could not be compared with those that are there."""
        new = {"steps": series.steps, "tuning": len(series.grid) > 1, **settings}
        for row in self.rows:
            old = {"steps": row["steps"], "tuning": len(row["lr_grid"]) > 1, **row["settings"]}
            changed = [name for name in new if old.get(name) != new[name]]
            if changed and row["workload"] == series.workload:
                told = ", ".join(f"{name} {new[name]!r} (was {old.get(name)!r})" for name in changed)
                raise StoreError(
                    f"the runs of {series.workload} in {str(self.folder)!r} were made with other settings: {told}. "
                    "They cannot be compared: go on with the old settings, or give another --output."
                )

    def running(self, cell: Cell) -> Path:
        """Where a run keeps its checkpoint until it is finished."""
        return self.folder / "running" / cell.folder_name

    def _append(self, content: Mapping[str, Any]) -> None:
        if self._file is None:
            raise RuntimeError("rows are added inside `with store.writing(experiment):`.")
        line = json.dumps(content, allow_nan=False).encode() + b"\n"
        self._file.seek(self._complete)
        self._file.truncate()
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._complete += len(line)

    def _read(self, data: bytes) -> None:
        self._complete = data.rfind(b"\n") + 1
        lines = []
        for number, line in enumerate(data[: self._complete].splitlines(), 1):
            try:
                lines.append(json.loads(line))
            except ValueError:
                raise StoreError(f"line {number} of {str(self.path)!r} is not JSON. Mend or delete the line.") from None
        if not lines:
            return
        first, *self.rows = lines
        if first.get("format") != FORMAT or first.get("version") != VERSION:
            raise StoreError(
                f"{str(self.path)!r} does not begin like a file of runs that this baoc reads (version {VERSION}). "
                "Give another --output."
            )
        self.experiment = first["experiment"]


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the file is closed
    except OSError:
        raise StoreError(
            f"another process is writing to {str(path)!r}. Wait for it, or give another --output."
        ) from None

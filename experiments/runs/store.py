"""Finished runs in a file: one JSON line each, never lost and never half there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from experiments.runs.cell import Cell, Row, RunError

FORMAT = "baoc.runs"
VERSION = 1


class StoreError(RunError):
    """A folder of runs that cannot be read, or was made with other settings."""


class Store:
    """The runs of a folder. The first line of its file has the settings that all of them share.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     with Store(folder).writing({"bf16": False}) as store:
    ...         store.add({"key": "a run", "test_loss": 1.5})
    ...     Store(folder).rows
    [{'key': 'a run', 'test_loss': 1.5}]
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "runs.jsonl"
        self.settings: dict[str, Any] | None = None
        self.rows: list[Row] = []
        self._complete = 0  # bytes of whole lines: a torn one, from a killed process, is written over
        self._file: BinaryIO | None = None
        if self.path.exists():
            self._read(self.path.read_bytes())

    @contextmanager
    def writing(self, settings: Mapping[str, Any]) -> Iterator[Store]:
        """Allow :meth:`add`, for one process at a time. Other settings than those of the file are refused."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.path, "r+b" if self.path.exists() else "w+b") as self._file:
            _lock(self._file, self.path)
            self._read(self._file.read())  # again: another process may have written since
            self._check(dict(settings))
            if self.settings is None:
                self._append({"format": FORMAT, "version": VERSION, "settings": dict(settings)})
                self.settings = dict(settings)
            yield self
        self._file = None

    def add(self, row: Row) -> None:
        """Write a run down. When this returns, it is on the disk."""
        self._append(row)
        self.rows.append(row)

    def find(self, cell: Cell) -> Row | None:
        return next((row for row in self.rows if row["key"] == cell.key), None)

    def running(self, cell: Cell) -> Path:
        """Where a run keeps its checkpoint until it is finished."""
        return self.folder / "running" / cell.folder_name

    def _append(self, content: Mapping[str, Any]) -> None:
        if self._file is None:
            raise RuntimeError("rows are added inside `with store.writing(settings):`.")
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
        self.settings = first["settings"]

    def _check(self, settings: dict[str, Any]) -> None:
        old = self.settings
        if old is None:
            return
        names = [name for name in {**old, **settings} if old.get(name) != settings.get(name)]
        if names:
            told = ", ".join(f"{name} {settings.get(name)!r} (was {old.get(name)!r})" for name in names)
            raise StoreError(
                f"the runs in {str(self.folder)!r} were made with other settings: {told}. They cannot be compared: go "
                "on with the old settings, or give another --output."
            )


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

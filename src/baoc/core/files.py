"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file to write to. It takes the place of the one at ``path`` when all is written, and not before.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with replaced(folder / "plan.json") as file:
    ...     _ = file.write(b"{}")
    >>> [each.name for each in folder.iterdir()]
    ['plan.json']
    """
    target = Path(os.path.realpath(path))  # a link stays a link
    if target.exists() and not target.is_file():  # a terminal or a pipe
        with target.open("wb") as file:
            yield file
        return
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            beside.chmod(target.stat().st_mode & 0o777)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)

"""Files that are complete or absent, and the JSON in them."""

from __future__ import annotations

import json
import math
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_MOST_DIGITS = 18  # of an integer: any size in bytes fits, and 64 bits hold it


@contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Write a file that replaces the one at ``path`` only once it is complete.

    The content goes to a temporary file in the same folder, is flushed to the disk and then renamed. If anything
    fails before the rename, the old file stays as it was. Symbolic links and the old file's mode are kept. A path
    that is not a regular file, such as a pipe, is written to directly.

    Args:
        path: where the file belongs.

    Yields:
        A binary file to write to.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with replaced(folder / "plan.json") as file:
        ...     _ = file.write(b"{}")
        >>> [each.name for each in folder.iterdir()]
        ['plan.json']
    """
    target = Path(os.path.realpath(path))  # the link stays, and the file that it points to is replaced
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    # A random name, because processes of several machines may write here. Not mkstemp: its files ignore the umask.
    beside = target.with_name(f".baoc-{secrets.token_hex(8)}")
    try:
        with beside.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            beside.chmod(stat.S_IMODE(target.stat().st_mode))
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def read_json(text: str, kind: str, format: str, version: int, error: type[ValueError]) -> dict[str, Any]:
    """Parse the text of a file that this package wrote, and refuse anything else in one line.

    Args:
        text: the content of the file.
        kind: what the file should be, for errors, such as ``"plan file"``.
        format: the value that ``"format"`` must have.
        version: the value that ``"version"`` must have.
        error: the exception to raise.

    Returns:
        The JSON object. Its numbers are finite, and its integers have at most 18 digits.

    Raises:
        ValueError: as ``error``, if the text is not such a file.

    Example:
        >>> read_json('{"format": "baoc.plan", "version": 1}', "plan file", "baoc.plan", 1, ValueError)
        {'format': 'baoc.plan', 'version': 1}
        >>> read_json('{"format": "baoc.plan", "version": 1, "x": 1e999}', "plan file", "baoc.plan", 1, ValueError)
        Traceback (most recent call last):
        ValueError: the plan file is damaged: 1e999 is out of range. Numbers must be finite.
    """
    try:
        content = json.loads(text, parse_float=_float, parse_int=_int, parse_constant=_out_of_range)
    except json.JSONDecodeError as problem:
        raise error(f"this is not a {kind}: line {problem.lineno} is not JSON ({problem.msg}).") from None
    except RecursionError:
        raise error(f"this is not a {kind}: its brackets are nested too deeply.") from None
    except OverflowError as problem:
        raise error(f"the {kind} is damaged: {problem}. Numbers must be finite.") from None
    if not isinstance(content, dict) or content.get("format") != format:
        raise error(f'this is not a {kind}: it has no "format": "{format}".')
    if content.get("version") != version:
        raise error(
            f"the {kind} has version {content.get('version')!r}, and this baoc reads version {version}. Make it again, "
            "or use the baoc that wrote it."
        )
    return content


def _float(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _out_of_range(text)


def _int(text: str) -> int:
    return int(text) if len(text.lstrip("-")) <= _MOST_DIGITS else int(_out_of_range(text))


def _out_of_range(text: str) -> float:
    raise OverflowError(f"{text if len(text) <= 20 else text[:20] + '...'} is out of range")

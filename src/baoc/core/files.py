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


def parse_json(text: str) -> Any:
    """Parse JSON whose numbers are finite, and whose integers have at most 18 digits.

    Raises:
        ValueError: with the reason in a few words.

    Example:
        >>> parse_json('{"x": 1e999}')
        Traceback (most recent call last):
        ValueError: 1e999 is out of range. Numbers must be finite
    """
    try:
        return json.loads(text, parse_float=_float, parse_int=_int, parse_constant=_out_of_range)
    except json.JSONDecodeError as problem:
        raise ValueError(f"line {problem.lineno} is not JSON ({problem.msg})") from None
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def read_json(
    text: str, kind: str, format: str, version: int, error: type[ValueError], source: str = "this"
) -> dict[str, Any]:
    """Parse the text of a file that this package wrote, and refuse anything else in one line.

    Args:
        text: the content of the file.
        kind: what the file should be, for errors, such as ``"a plan file"``.
        format: the value that ``"format"`` must have.
        version: the value that ``"version"`` must have.
        error: the exception to raise.
        source: where the text comes from, for errors.

    Returns:
        The JSON object, as of :func:`parse_json`.

    Raises:
        ValueError: as ``error``, if the text is not such a file.

    Example:
        >>> read_json('{"format": "baoc.plan", "version": 1}', "a plan file", "baoc.plan", 1, ValueError)
        {'format': 'baoc.plan', 'version': 1}
        >>> read_json('{"format": "other"}', "a plan file", "baoc.plan", 1, ValueError)
        Traceback (most recent call last):
        ValueError: this is not a plan file: it has no "format": "baoc.plan".
    """
    try:
        content = parse_json(text)
    except ValueError as problem:
        raise error(f"{source} is not {kind}: {problem}.") from None
    return check_header(content, kind, format, version, error, source)


def check_header(
    content: Any, kind: str, format: str, version: int, error: type[ValueError], source: str = "this"
) -> dict[str, Any]:
    """Return the content of a file if it has the right format and version. The arguments are those of `read_json`."""
    if not isinstance(content, dict) or content.get("format") != format:
        raise error(f'{source} is not {kind}: it has no "format": "{format}".')
    if content.get("version") != version:
        raise error(
            f"{source} is {kind} of version {content.get('version')!r}, and this baoc reads version {version}. Make it "
            "again, or use the baoc that wrote it."
        )
    return content


def _float(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _out_of_range(text)


def _int(text: str) -> int:
    return int(text) if len(text.lstrip("-")) <= _MOST_DIGITS else int(_out_of_range(text))


def _out_of_range(text: str) -> float:
    raise ValueError(f"{text if len(text) <= 20 else text[:20] + '...'} is out of range. Numbers must be finite")

"""Run the code in README.md and in docs/, and compare its output with what the pages show.

Marks are HTML comments on the line above a block:

- ``<!-- not run: REASON -->`` above Python that a test cannot run, and above shell commands that it cannot parse;
- ``<!-- output -->`` above the output of the block before it;
- ``<!-- output of: COMMAND -->`` above the output of a ``baoc`` command;
- ``<!-- source: FILE FIRST LAST -->`` above Python code of a file, from one definition to another, which is run too.

Numbers that come from results have marks of their own: see :mod:`tests.docs.numbers`.

An output is complete, or has a line ``...`` where lines are left out. ``python -m tests.docs.documents`` rewrites all
outputs.
"""

from __future__ import annotations

import ast
import contextlib
import io
import logging
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from baoc.core.codecs import CODECS
from baoc.core.mechanisms import MECHANISMS
from baoc.planners.paper.risk import RISKS
from baoc.tools.cli import main
from experiments.tiny_gpt import Size, TinyGPT
from tests.docs import numbers

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
CUT = "..."
_FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n\n?)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    mark: str  # of the comment above it
    span: tuple[int, int]  # of the text, in the page

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.language == "python" and not self.mark.startswith("not run")


def blocks_of(page: Path) -> list[Block]:
    """Return all blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, f.start("text")), f["language"], f["text"], f["mark"] or "", f.span("text"))
        for f in _FENCE.finditer(text)
    ]


def without_code(text: str) -> str:
    """Return the text of a page without code."""
    return re.sub(r"`[^`\n]+`", "", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL))


def prelude() -> dict[str, Any]:
    """Return what the pages assume: a ``model``, a ``loader`` of batches, and their ``loss_fn``."""
    torch.manual_seed(0)
    size = Size(width=96, depth=2, context=64, batch=8)
    return {
        "model": TinyGPT(256, size),
        "loader": [torch.randint(256, (size.batch, size.context + 1)) for _ in range(60)],
        "loss_fn": lambda model, batch: model.loss(batch),
    }


def run(page: Path) -> list[tuple[Block, str]]:
    """Run a page's Python in order, in one namespace and an empty folder. Return every output with what was printed."""
    compared, printed, namespace = [], "", prelude()
    with _folder(), _registries(), _no_logging():
        for block in blocks_of(page):
            code = block.text
            if block.mark.startswith("source: "):
                code = source(*block.mark.split()[1:])
                compared.append((block, code))
            if block.is_run:
                # with blank lines in front, so that a traceback has the page's line number
                runnable = compile("\n" * block.line + code, block.place, "exec")
                printed = _captured(exec, runnable, namespace)
            elif block.mark == "output":
                compared.append((block, printed))
            elif block.mark.startswith("output of: "):
                compared.append((block, _captured(_command, block.mark.removeprefix("output of: "))))
    return compared


def _command(line: str) -> None:
    _, *arguments = shlex.split(line)
    code = main(arguments)
    assert code != 2, f"{line} fails"


def source(path: str, first: str, last: str) -> str:
    """Return the code of a Python file from one definition to another."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines: dict[str, tuple[int, int]] = {}
    for node in ast.parse(text).body:
        names = [each.id for each in getattr(node, "targets", []) if isinstance(each, ast.Name)]
        starts = (each.lineno for each in (node, *getattr(node, "decorator_list", [])))
        lines |= dict.fromkeys([*names, getattr(node, "name", "")], (min(starts) - 1, node.end_lineno or 0))
    return "\n".join(text.splitlines()[lines[first][0] : lines[last][1]]) + "\n"


def shows(block: Block, printed: str) -> bool:
    """Return whether a block shows all that was printed, except lines that ``...`` stands for, or all its source."""
    if block.mark.startswith("source: "):
        return block.text == printed
    lines = [r"(?:.*\n)*?" if line.strip() == CUT else re.escape(line) + r"\n" for line in _lines(block.text)]
    return any(lines) and bool(re.fullmatch("".join(lines), "".join(f"{line}\n" for line in _lines(printed))))


def renewed(block: Block, printed: str) -> str:
    """Return what was printed, between the lines that start with the first words of the block's first and last line.

    Indented lines after the last one belong to it. ``...`` stands for what is left out before and after them.
    """
    shown, lines = [line for line in _lines(block.text) if line.strip() != CUT], _lines(printed)
    if block.mark.startswith("source: ") or not shown:
        return printed
    firsts = [at for at, line in enumerate(lines) if line.split()[:1] == shown[0].split()[:1]]
    lasts = [at for at, line in enumerate(lines) if line.split()[:1] == shown[-1].split()[:1]]
    start, end = firsts[0] if firsts else 0, lasts[-1] + 1 if lasts else len(lines)
    while 0 < end < len(lines) and _indent(lines[end]) > _indent(lines[end - 1]):
        end += 1
    return "\n".join([*[CUT] * (start > 0), *lines[start:end], *[CUT] * (end < len(lines))]) + "\n"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip()) if line else -1


def update(page: Path) -> bool:
    """Rewrite a page's outputs. Return whether it changed."""
    before = text = page.read_text(encoding="utf-8")
    for block, printed in reversed(run(page)):
        if not shows(block, printed):
            text = text[: block.span[0]] + renewed(block, printed) + text[block.span[1] :]
    text = numbers.filled(text)
    page.write_text(text, encoding="utf-8")
    return text != before


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def _captured(call: Callable[..., Any], *arguments: Any) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        call(*arguments)
    return out.getvalue()


@contextlib.contextmanager
def _folder() -> Iterator[None]:
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


@contextlib.contextmanager
def _registries() -> Iterator[None]:
    """Undo what a page registers."""
    with mock.patch.dict(CODECS), mock.patch.dict(MECHANISMS), mock.patch.dict(RISKS):
        yield


@contextlib.contextmanager
def _no_logging() -> Iterator[None]:
    """Let notices go to stderr, as in a script without logging."""
    root = logging.getLogger()
    with mock.patch.object(root, "handlers", []):
        yield


if __name__ == "__main__":
    torch.set_num_threads(1)
    for path in PAGES:
        if update(path):
            print(path.relative_to(ROOT), file=sys.stderr)

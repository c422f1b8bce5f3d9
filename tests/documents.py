"""The code in README.md and in docs/: read, run, and compared with what the pages say it prints.

Marks are HTML comments on the line above a block, which readers do not see:

- ``<!-- not run: REASON -->`` above Python that a test cannot run, and above shell that it cannot parse;
- ``<!-- output -->`` above what the block before it prints;
- ``<!-- output of: COMMAND -->`` above what a ``baoc`` command prints;
- ``<!-- source: FILE FIRST LAST -->`` above Python of a file, from one definition to another, which is run as well.

An output may leave out how the real one begins or ends. ``python -m tests.documents`` writes all of them anew.
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

from baoc.cli import main
from baoc.core.codecs import CODECS
from baoc.core.mechanisms import MECHANISMS
from baoc.planning.risk import RISKS
from experiments.tiny_gpt import Size, TinyGPT

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
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
    """All blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, f.start("text")), f["language"], f["text"], f["mark"] or "", f.span("text"))
        for f in _FENCE.finditer(text)
    ]


def without_code(text: str) -> str:
    """A page's prose."""
    return re.sub(r"`[^`\n]+`", "", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL))


def prelude() -> dict[str, Any]:
    """What the pages take for granted: a ``model``, a ``loader`` of batches, and their ``loss_fn``."""
    torch.manual_seed(0)
    size = Size(width=96, depth=2, context=64, batch=8)
    return {
        "model": TinyGPT(256, size),
        "loader": [torch.randint(256, (size.batch, size.context + 1)) for _ in range(60)],
        "loss_fn": lambda model, batch: model.loss(batch),
    }


def run(page: Path) -> list[tuple[Block, str]]:
    """Run a page's Python in order, in one namespace and an empty folder; every output with what was really printed."""
    compared, printed, namespace = [], "", prelude()
    with _folder(), _registries(), _nobody_logs():
        for block in blocks_of(page):
            code = block.text
            if block.mark.startswith("source: "):
                code = source(*block.mark.split()[1:])
                compared.append((block, code))
            if block.is_run:
                # blank lines before it, so that a traceback names the page's own line
                runnable = compile("\n" * block.line + code, block.place, "exec")
                printed = _captured(exec, runnable, namespace)
            elif block.mark == "output":
                compared.append((block, printed))
            elif block.mark.startswith("output of: "):
                _, *arguments = shlex.split(block.mark.removeprefix("output of: "))
                compared.append((block, _captured(main, arguments)))
    return compared


def source(path: str, first: str, last: str) -> str:
    """What stands in a Python file from one definition to another."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines: dict[str, tuple[int, int]] = {}
    for node in ast.parse(text).body:
        names = [each.id for each in getattr(node, "targets", []) if isinstance(each, ast.Name)]
        starts = (each.lineno for each in (node, *getattr(node, "decorator_list", [])))
        lines |= dict.fromkeys([*names, getattr(node, "name", "")], (min(starts) - 1, node.end_lineno or 0))
    return "\n".join(text.splitlines()[lines[first][0] : lines[last][1]]) + "\n"


def shows(block: Block, printed: str) -> bool:
    """Whether a block has consecutive lines of what was printed, or all of its source."""
    if block.mark.startswith("source: "):
        return block.text == printed
    lines, all_lines = _lines(block.text), _lines(printed)
    return bool(lines) and any(all_lines[at : at + len(lines)] == lines for at in range(len(all_lines)))


def renewed(block: Block, printed: str) -> str:
    """What was printed, from where a line begins as the first one shown to where one begins as the last."""
    shown, lines = _lines(block.text), _lines(printed)
    if block.mark.startswith("source: ") or not shown:
        return printed
    firsts = [at for at, line in enumerate(lines) if line.split()[:1] == shown[0].split()[:1]]
    lasts = [at for at, line in enumerate(lines) if line.split()[:1] == shown[-1].split()[:1]]
    return "\n".join(lines[firsts[0] if firsts else 0 : lasts[-1] + 1 if lasts else None]) + "\n"


def update(page: Path) -> bool:
    """Write a page's outputs anew; whether that changed it."""
    before = text = page.read_text(encoding="utf-8")
    for block, printed in reversed(run(page)):
        if not shows(block, printed):
            text = text[: block.span[0]] + renewed(block, printed) + text[block.span[1] :]
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
    """What a page registers is gone with it."""
    with mock.patch.dict(CODECS), mock.patch.dict(MECHANISMS), mock.patch.dict(RISKS):
        yield


@contextlib.contextmanager
def _nobody_logs() -> Iterator[None]:
    """Notices go to stderr, as they do in a script, whoever runs this."""
    root = logging.getLogger()
    with mock.patch.object(root, "handlers", []):
        yield


if __name__ == "__main__":
    torch.set_num_threads(1)
    for path in PAGES:
        if update(path):
            print(path.relative_to(ROOT), file=sys.stderr)

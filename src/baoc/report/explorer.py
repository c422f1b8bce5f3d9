"""The explorer page: one HTML file with all that it needs inside, to be opened from a disk, without a network."""

from __future__ import annotations

import html
import json
import os
from importlib import resources

from baoc.core.files import replaced
from baoc.report.content import Sources, content

SCRIPTS = ("draw.js", "model.js", "charts.js", "views.js")
"""In this order: each uses what those before it define."""


def page(sources: Sources) -> str:
    """The page as text.

    >>> from baoc.core.plan import Plan
    >>> text = page(Sources("demo", plans={"all alike": Plan.uniform("adamw-8", {"w.weight": (64, 64)})}))
    >>> text.startswith("<!doctype html>"), "https://" in text
    (True, False)
    """
    # "</script>" in a parameter's name would end the script; JSON may spell it otherwise
    data = json.dumps(content(sources), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "{{title}}": html.escape(sources.title),
        "{{style}}": _file("page.css"),
        "{{script}}": "\n".join(map(_file, SCRIPTS)),
        "{{data}}": data,
    }
    text = _file("page.html")
    for mark, part in parts.items():
        text = text.replace(mark, part)
    return text


def write(sources: Sources, path: str | os.PathLike[str]) -> None:
    """Write the page. One that is there already stays until this one is complete."""
    text = page(sources)
    with replaced(path) as file:
        file.write(text.encode())


def _file(name: str) -> str:
    return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")

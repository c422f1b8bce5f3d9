"""docs/equations.md names functions and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_links_of_the_page_on_equations_exist() -> None:
    page = (DOCS / "equations.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page)
    assert len(links) > 20
    for link in links:
        assert link.startswith("http") or (DOCS / link).exists(), link


def test_functions_of_the_page_on_equations_exist() -> None:
    page = (DOCS / "equations.md").read_text(encoding="utf-8")
    named = re.findall(r"\[`(\w[\w.]*)`\]\((\.\./src/[^)#]+)\)", page)
    assert len(named) > 20
    for name, link in named:
        path = DOCS / link
        text = "".join(p.read_text(encoding="utf-8") for p in ([path] if path.is_file() else path.glob("*.py")))
        last = name.rsplit(".", 1)[-1]
        assert re.search(rf"(def|class) {last}\b|^ *{last}\b ?[:=]", text, re.M), f"{name} is not in {link}"

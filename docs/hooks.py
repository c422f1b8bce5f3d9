"""Hooks of mkdocs: include parts of other files, rewrite links that leave the folder, turn docstrings into Markdown.

The home page includes the first part of `README.md`. A link to `../src/baoc/core/plan.py` becomes a link to a page with
that file. A link to a missing file stays as it is, and mkdocs warns about it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import griffe
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
WHOLE = {f"{name}.md": f"{name.upper()}.md" for name in ("contributing", "releasing", "security", "changelog")}
"""Pages that are files of the repository."""
_PART = re.compile(r"^<!-- from (\S+): (\S+) -->$", re.MULTILINE)
_LINK = re.compile(r"(?P<lead>\]\(|<img[^>]* src=\")(?P<target>[^\s()\"#:]+)(?P<end>[)#\"])")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".sh": "sh", ".toml": "toml", ".json": "json", ".c": "c", ".h": "c"}
_ROLE = re.compile(r":\w+:`(?P<short>~?)(?P<name>[^`]+)`")
_DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
_TOGETHER = re.compile(r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*\n(?:(?P=indent) +.*\n)*)", re.MULTILINE)


# ---- pages ----


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages for files outside of the folder: whole pages, and files that pages link to."""
    for page, path in WHOLE.items():
        files.append(File.generated(config, page, content=_relocated((ROOT / path).read_text(), path, page)))
    linked = {target for file in files.documentation_pages() for target in _outside(_text(file), _home(file.src_uri))}
    for path in sorted(linked - set(WHOLE.values())):
        language = _LANGUAGES.get(Path(path).suffix, "text")
        title = f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n\n# `{path}`\n\n"
        code = f"````{language}\n{(ROOT / path).read_text()}\n````\n"
        files.append(File.generated(config, _source_page(path), content=title + code))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Include parts of other files and rewrite links for their new place."""
    where = page.file.src_uri
    if where in WHOLE or where.startswith("source/"):
        return markdown
    return _relocated(_with_parts(markdown), _home(where), where)


def _text(file: File) -> str:
    return _with_parts(file.content_string)


def _home(page: str) -> str:
    """Return the path of a page's source in the repository."""
    return WHOLE.get(page, f"docs/{page}")


def _with_parts(markdown: str) -> str:
    """Replace `<!-- from FILE: NAME -->` by the part of FILE from `<!-- NAME -->` to `<!-- end of NAME -->`."""

    def part(match: re.Match[str]) -> str:
        path, name = match.groups()
        _, start, rest = (ROOT / path).read_text().partition(f"<!-- {name} -->\n")
        found, end, _ = rest.partition(f"<!-- end of {name} -->")
        if not (start and end):
            raise ValueError(f"{path} has no part {name!r}, between <!-- {name} --> and <!-- end of {name} -->.")
        return _relinked(found.strip("\n"), path, lambda target: posixpath.relpath(target, "docs"))

    return _PART.sub(part, markdown)


# ---- links ----


def _relocated(markdown: str, home: str, page: str) -> str:
    """Return a page's text with links relative to its place in the site."""

    def moved(target: str) -> str:
        if target in WHOLE.values():
            inside = next(name for name, path in WHOLE.items() if path == target)
        else:
            inside = target.removeprefix("docs/") if target.startswith("docs/") else _source_page(target)
        return posixpath.relpath(inside, posixpath.dirname(page) or ".")

    return _relinked(markdown, home, moved)


def _relinked(markdown: str, home: str, moved: Any) -> str:
    """Apply ``moved`` to all links to files of the repository, except in code and for missing files."""
    folder = posixpath.dirname(home)

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match["target"]))
        return match["lead"] + moved(target) + match["end"] if (ROOT / target).is_file() else match[0]

    pieces, at = [], 0
    for fence in _FENCE.finditer(markdown):
        pieces += [_LINK.sub(link, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*pieces, _LINK.sub(link, markdown[at:])])


def _outside(markdown: str, home: str) -> set[str]:
    """Return the files of the repository outside of ``docs`` that a text links to."""
    found: set[str] = set()
    _relinked(markdown, home, lambda target: found.add(target) or "")
    return {target for target in found if not target.startswith("docs/")}


def _source_page(path: str) -> str:
    return f"source/{path}.md"


# ---- docstrings ----


class Docstrings(griffe.Extension):
    """Turn roles into code and examples into code blocks."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Show the values of named constants as defaults."""
        for function in _functions(pkg):
            for parameter in function.parameters:
                if isinstance(parameter.default, (griffe.ExprName, griffe.ExprAttribute)):
                    parameter.default = _value(parameter.default, pkg)
        for field in _fields(pkg):
            if isinstance(field.value, (griffe.ExprName, griffe.ExprAttribute)):
                field.value = _value(field.value, pkg)


def _functions(inside: griffe.Object) -> Iterator[griffe.Function]:
    for member in inside.members.values():
        if isinstance(member, griffe.Function):
            yield member
        elif isinstance(member, (griffe.Module, griffe.Class)):
            yield from _functions(member)


def _fields(inside: griffe.Object) -> Iterator[griffe.Attribute]:
    """Yield the annotated attributes of classes: the arguments of a dataclass."""
    for member in inside.members.values():
        if isinstance(member, griffe.Attribute) and member.annotation and isinstance(inside, griffe.Class):
            yield member
        elif isinstance(member, (griffe.Module, griffe.Class)):
            yield from _fields(member)


def _value(name: griffe.ExprName | griffe.ExprAttribute, pkg: griffe.Module) -> griffe.Expr | str:
    """Return the value of a constant if its definition is a literal."""
    try:
        found = pkg.modules_collection[name.canonical_path]
        target = found.final_target if found.is_alias else found
    except (KeyError, griffe.GriffeError):
        return name
    value = getattr(target, "value", None)
    return value if isinstance(value, str) or (value and not isinstance(value, griffe.ExprName)) else name


def as_markdown(docstring: str) -> str:
    """Return a docstring in the Markdown that mkdocstrings expects, with links to what the reference lists.

    >>> as_markdown("See :class:`~a.b.Plan`, :meth:`step`, ``x``.")
    'See [`Plan`][baoc.Plan], `step`, `x`.'
    """
    plain = _ROLE.sub(_reference, docstring).replace("``", "`")
    plain = _TOGETHER.sub(_one_by_one, plain)
    lines: list[str] = []
    indent: str | None = None  # of the current example
    for line in [*plain.splitlines(), ""]:
        if indent is None and line.lstrip().startswith(">>> "):
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}```pycon")
        elif indent is not None and not line.strip():
            lines.append(f"{indent}```")
            indent = None
        lines.append(line)
    return "\n".join(lines).rstrip("\n")


def _reference(role: re.Match[str]) -> str:
    """Return a link to an object of the reference, or its name as code."""
    name = role["name"].rpartition(".")[2] if role["short"] else role["name"]
    path = _listed().get(role["name"].rpartition(".")[2])
    return f"[`{name}`][{path}]" if path else f"`{name}`"


@cache
def _listed() -> dict[str, str]:
    """Return the paths of the objects that the reference lists, by the last part of their names."""
    pages = (ROOT / "docs" / "api").glob("*.md")
    return {path.rpartition(".")[2]: path for page in pages for path in _DIRECTIVE.findall(page.read_text())}


def _one_by_one(entry: re.Match[str]) -> str:
    """Repeat a shared explanation for each argument: the reference has one line per argument."""
    return "".join(f"{entry['indent']}{name}: {entry['text']}" for name in entry["names"].split(", "))

"""The API reference is complete: every public object that the site shows explains its arguments, results and errors."""

from __future__ import annotations

import ast
import re
import textwrap
from functools import cache
from pathlib import Path

import griffe
import pytest

import baoc
from tests.docs.documents import ROOT

API = ROOT / "docs" / "api"
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
SHOWN = sorted(name for page in API.glob("*.md") for name in DIRECTIVE.findall(page.read_text(encoding="utf-8")))


@cache
def package() -> griffe.Module:
    found = griffe.load("baoc", search_paths=[str(ROOT / "src")], docstring_parser=griffe.Parser("google"))
    assert isinstance(found, griffe.Module)
    return found


def shown_objects() -> dict[str, griffe.Object]:
    """Return the functions and classes of the reference and the public methods of its classes, by their path."""
    found: dict[str, griffe.Object] = {}
    for name in SHOWN:
        item = package()[name.removeprefix("baoc.")]
        found |= _with_members(item.final_target if item.is_alias else item)
    return found


def _with_members(item: griffe.Object) -> dict[str, griffe.Object]:
    if item.is_function:
        return {item.path: item}
    if not (item.is_class or item.is_module):
        return {}
    # what overrides a documented method has no docstring of its own, and is not shown
    overrides = isinstance(item, griffe.Class) and bool(item.bases)
    members = (
        each
        for name, each in item.members.items()
        if not name.startswith("_") and not each.is_alias and (each.docstring or not overrides)
    )
    return {item.path: item, **{path: each for member in members for path, each in _with_members(member).items()}}


OBJECTS = shown_objects()
CALLED = {path: item for path, item in OBJECTS.items() if not item.is_module}


def sections(item: griffe.Object) -> dict[str, griffe.DocstringSection]:
    return {section.kind.value: section for section in item.docstring.parsed} if item.docstring else {}


def arguments(item: griffe.Object) -> list[str]:
    if isinstance(item, griffe.Class):
        item = item.members.get("__init__", item)  # type: ignore[assignment]
        names = [each.name for each in item.parameters]  # of a dataclass, griffe knows the fields
    else:
        names = [each.name for each in item.parameters]  # type: ignore[attr-defined]
    return [name.lstrip("*") for name in names if name not in ("self", "cls")]


def explained(item: griffe.Object) -> set[str]:
    """Return the names of the arguments that a docstring explains; one entry may name several."""
    found = sections(item)
    entries = [each.name for kind in ("parameters",) if kind in found for each in found[kind].value]
    return {name.lstrip("*") for entry in entries for name in entry.split(", ")}


def test_every_public_name_is_in_the_reference() -> None:
    assert {f"baoc.{name}" for name in baoc.__all__ if name != "__version__"} <= set(SHOWN)


@pytest.mark.parametrize("path", sorted(CALLED))
def test_a_docstring_explains_every_argument(path: str) -> None:
    item = CALLED[path]
    assert item.docstring, f"{path} has no docstring"
    missing = [name for name in arguments(item) if name not in explained(item)]
    assert not missing, f"{path} does not explain {', '.join(missing)}"
    unknown = explained(item) - set(arguments(item))
    assert not unknown or "attributes" in sections(item), f"{path} explains what is no argument: {unknown}"


@pytest.mark.parametrize("path", sorted(path for path, item in CALLED.items() if item.is_function))
def test_a_docstring_says_what_is_returned(path: str) -> None:
    item = CALLED[path]
    assert isinstance(item, griffe.Function)
    if str(item.returns) in ("None", "") or "property" in item.labels:
        return
    if item.docstring and re.match(r"Return|Whether|Iterate", item.docstring.value):
        return  # the summary says it
    assert {"returns", "yields"} & set(sections(item)), f"{path} does not say what it returns"


def raised(item: griffe.Object) -> set[str]:
    """Return the exceptions that the code of a function raises itself, by name."""
    source = textwrap.dedent("\n".join(item.lines))
    tree = ast.parse(source)
    init = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__post_init__")
    ]
    roots = init if item.is_class else [tree]
    calls = [node.exc for root in roots for node in ast.walk(root) if isinstance(node, ast.Raise) and node.exc]
    names = {call.func.id for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}
    return {name for name in names if name.endswith("Error") and name != "NotImplementedError"}


@pytest.mark.parametrize("path", sorted(path for path, item in CALLED.items() if raised(item)))
def test_a_docstring_names_the_exceptions_that_its_code_raises(path: str) -> None:
    found = sections(CALLED[path]).get("raises")
    named = {str(each.annotation) for each in found.value} if found else set()
    parents = {"PlanError", "ConfigurationError", "StatisticsError", "CheckpointError", "TableError"}
    missing = raised(CALLED[path]) - named
    # a subclass of ValueError stands for it, and a function may turn its own ValueError into one
    is_named = ("ValueError" in named and missing <= parents) or (missing == {"ValueError"} and named & parents)
    assert not missing or is_named, f"{path} does not name {missing}"


@pytest.mark.parametrize("name", SHOWN)
def test_what_the_reference_lists_has_an_example(name: str) -> None:
    item = package()[name.removeprefix("baoc.")]
    item = item.final_target if item.is_alias else item
    if not (item.is_function or item.is_class) or name.endswith("Error"):
        return
    # pytest runs doctests of src/, and the pages of docs/ are run by test_docs
    members = [each for path, each in OBJECTS.items() if path == item.path or path.startswith(f"{item.path}.")]
    has_one = any(each.docstring and ">>> " in each.docstring.value for each in members)
    assert has_one or "docs/" in (item.docstring.value if item.docstring else ""), f"{name} has no example"


def test_a_shared_explanation_becomes_an_entry_for_each_argument() -> None:
    from docs.hooks import as_markdown

    text = "Do it.\n\nArgs:\n    lr, betas: as in torch,\n        for all groups.\n    plan: of blocks.\n"
    entries = re.findall(r"^    (\w+): (.*)\n?(?:        (.*))?", as_markdown(text), flags=re.MULTILINE)
    assert [(name, first) for name, first, _ in entries] == [
        ("lr", "as in torch,"),
        ("betas", "as in torch,"),
        ("plan", "of blocks."),
    ]


def test_pages_of_the_reference_exist() -> None:
    assert Path(API / "index.md").is_file()

"""README.md and the pages of the site: their code runs, their commands and links exist, and the site builds."""

from __future__ import annotations

import doctest
import functools
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import baoc
from baoc.tools.cli import COMMANDS
from baoc.tools.cli.parser import Parser
from baoc.tools.models.resolve import load_file
from experiments.commands import COMMANDS as EXPERIMENTS
from tests.docs import documents, numbers
from tests.docs.documents import PAGES, ROOT, Block
from tests.tools.test_report_page import FLAGS

LINKS = re.compile(r"\]\(([^)\s#]+)[^)]*\)|<img[^>]* src=\"([^\"]+)\"")
BLOCKS = [block for page in PAGES for block in documents.blocks_of(page)]
of_the_site = pytest.mark.xdist_group("site")  # it is built once
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# ---- code ----


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(b.page == page and (b.is_run or "output of" in b.mark) for b in BLOCKS)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_code_runs_and_prints_what_the_page_says(page):
    pytest.importorskip("transformers")  # GPT-2's shapes
    for block, printed in documents.run(page):
        hint = "`python -m tests.docs.documents` rewrites it"
        assert documents.shows(block, printed), f"{block.place} differs from what is printed. {hint}:\n\n{printed}"


@by_page
def test_numbers_are_those_of_the_results(page):
    text = page.read_text(encoding="utf-8")
    assert numbers.filled(text) == text, "`python -m tests.docs.documents` rewrites it"


def test_what_is_not_run_says_why():
    for block in BLOCKS:
        if block.mark.startswith("not run") or (block.language == "python" and not block.is_run):
            assert re.fullmatch(r"not run: .{10,}", block.mark), block.place


def test_marks_are_known():
    for block in BLOCKS:
        known = r"|not run: .+|output|output of: baoc .+|source: \S+\.py \w+ \w+"
        assert re.fullmatch(known, block.mark), f"{block.place}: {block.mark!r}"
    outputs = [block for block in BLOCKS if block.mark.startswith("output")]
    assert all(block.language == "text" for block in outputs)


def shown(text: str, mark: str = "output") -> Block:
    return Block(ROOT / "README.md", 1, "text", text, mark, (0, 0))


def test_an_output_is_complete_or_shows_where_it_is_cut():
    printed = "a\nb\nc  \nd\n"
    for text in ("a\nb\nc\nd\n", "...\nb\nc\n...\n", "a\n...\nd\n", "...\nd\n"):
        assert documents.shows(shown(text), printed), text
    for text in ("b\nc\n", "a\nb\nc\n", "a\nc\nd\n", "...\nc\n", "a\n...\nb\n", "a\n...\ne\n...\n", ""):
        assert not documents.shows(shown(text), printed), text
    assert not documents.shows(shown("b\n", "source: a.py b"), "a\nb\n")


def test_an_output_is_renewed_from_its_first_word_to_its_last():
    block = shown("...\nblock x\nexpected: -1%\n")
    printed = "a notice\nblock  y\nmore\nexpected: -2%\nsaved\n"
    assert documents.renewed(block, printed) == "...\nblock  y\nmore\nexpected: -2%\n...\n"
    wrapped = printed.replace("-2%\n", "-2%\n          more of it\n")
    assert documents.renewed(block, wrapped) == "...\nblock  y\nmore\nexpected: -2%\n          more of it\n...\n"
    assert documents.renewed(block, "block y\nexpected: -2%\n") == "block y\nexpected: -2%\n"


# ---- commands ----


def commands() -> list[tuple[str, list[str]]]:
    """Return every shell command on the pages, with its place."""
    found = []
    for block in BLOCKS:
        if block.language == "sh" and not block.mark:
            for line in block.text.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    found.append((block.place, words))
    return found


@pytest.mark.parametrize(("place", "words"), commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_commands_are_ones_that_there_are(place, words, capsys):
    program, *arguments = words
    assert program in CHECKS, f"{place}: there is no check for {program!r}; add one"
    CHECKS[program](arguments)


@functools.cache
def parser_of(program: str):
    parser = Parser(prog=program)
    parsers = parser.add_subparsers()
    for command in COMMANDS if program == "baoc" else EXPERIMENTS:
        command.register(parsers)
    return parser


def check_baoc(arguments: list[str]) -> None:
    if arguments == ["--version"]:
        return
    if arguments[0] == "selfcheck":
        arguments = [*arguments, "--device", "cpu"]  # a missing device is refused
    assert hasattr(parser_of("baoc").parse_args(arguments), "run")


def check_python(arguments: list[str]) -> None:
    if arguments[:2] == ["-m", "experiments"]:
        assert hasattr(parser_of("experiments").parse_args(arguments[2:]), "run")
    elif arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None
    else:
        assert (ROOT / arguments[0]).is_file()


def check_torchrun(arguments: list[str]) -> None:
    if "-m" in arguments:
        check_python(arguments[arguments.index("-m") :])
        return
    assert any((ROOT / word).is_file() for word in arguments if word.endswith(".py"))


def check_make(arguments: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(arguments) <= set(targets)


def check_pip(arguments: list[str]) -> None:
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for word in arguments:
        asked = re.search(r"\[([\w,]+)\]", word)
        assert asked is None or set(asked[1].split(",")) <= set(extras)


CHECKS = {
    "baoc": check_baoc,
    "python": check_python,
    "torchrun": check_torchrun,
    "make": check_make,
    "pip": check_pip,
}


# ---- links and the site ----


@by_page
def test_links_lead_somewhere(page):
    text = documents.without_code(page.read_text(encoding="utf-8"))
    targets = {first or second for first, second in LINKS.findall(text)}
    assert not [target for target in targets if "://" not in target and not (page.parent / target).exists()]


def test_files_of_tests_that_are_named_exist():
    naming = [*(ROOT / ".github").rglob("*.yml"), ROOT / "Makefile", *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    named = {name for path in naming for name in re.findall(r"\btests/[\w/]+\.py", path.read_text(encoding="utf-8"))}
    assert named and not [name for name in named if not (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


@of_the_site
def test_the_site_fetches_nothing(site):
    """Neither scripts, styles, fonts nor pictures come from a network."""
    remote = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*>")
    for page in site.rglob("*.html"):
        assert not (found := remote.findall(page.read_text(encoding="utf-8"))), f"{page.name}: {found[:2]}"
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", text), style.name


@of_the_site
def test_search_works_from_a_disk(site, tmp_path):
    """Browsers start no workers and fetch no index from a file."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    page = (site / "start.html").as_uri() + "?q=newton"
    flags = [*FLAGS, f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--dump-dom"]
    shown = subprocess.run([chromium, *flags, page], capture_output=True, text=True, timeout=300).stdout
    assert re.search(r"\d+ matching documents", shown) and "how-it-works.html" in shown


@of_the_site
def test_the_home_page_begins_as_the_readme(site):
    home = (site / "index.html").read_text(encoding="utf-8")
    assert "of AdamW16&#39;s" in home or "of AdamW16's" in home
    assert 'href="results/zoo.html"' in home and 'href="results/experiments.html"' in home
    assert "<!-- from" not in home


@of_the_site
def test_links_to_sources_lead_to_pages_with_them(site):
    page = (site / "extending.html").read_text(encoding="utf-8")
    assert 'href="source/src/baoc/core/codecs/factored.py.html"' in page and 'href="contributing.html"' in page
    shown = re.sub(r"<[^>]+>", "", (site / "source/src/baoc/core/codecs/factored.py.html").read_text(encoding="utf-8"))
    assert "class MeanFormat" in shown


def test_docstrings_are_turned_into_markdown():
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    hooks = load_file(ROOT / "docs" / "hooks.py")
    assert doctest.testmod(hooks).failed == 0
    assert hooks.as_markdown("An example:\n\n>>> 1 + 1\n2\n") == "An example:\n\n```pycon\n>>> 1 + 1\n2\n```"
    together = hooks.as_markdown("Args:\n    a, b: this\n        and that\n    c: more\n")
    assert together == "Args:\n    a: this\n        and that\n    b: this\n        and that\n    c: more"


@of_the_site
def test_docstrings_are_shown_as_code_and_text(site):
    api = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    shown = re.sub(r'<details class="mkdocstrings-source">.*?</details>', "", api, flags=re.DOTALL)  # code as it is
    assert not re.search(r":(?:class|func|meth|attr|data):", shown)
    assert "<blockquote>" not in api, "an example that was read as a quotation"


@of_the_site
def test_every_public_name_is_in_the_reference(site):
    text = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    missing = [name for name in baoc.__all__ if name != "__version__" and f'id="baoc.{name}"' not in text]
    assert not missing

"""The output of commands on a terminal of 80 columns, with and without rich, and in a pipe."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import baoc
from baoc import Plan
from baoc.core.text import WIDTH, shortened, table
from baoc.tools.cli import COMMANDS, main, screen
from tests.tools.test_cli_plan import PAPERS

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(baoc.__file__).parents[1])}
LONG = "model.language_model.layers.{}.self_attention.query_key_value_projection"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def hide_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every import of rich fail, as if it were not installed."""
    loaded = [name for name in sys.modules if name.partition(".")[0] == "rich"]
    for name in {"rich", "rich.console", "rich.text", "rich.theme", *loaded}:
        monkeypatch.setitem(sys.modules, name, None)


def output_of(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, code: int = 0) -> dict[str, str]:
    """What a command writes to stdout and stderr: in a pipe, on a terminal, and on a terminal without rich."""
    found = {}
    for kind, stream_type in (("pipe", io.StringIO), ("terminal", Terminal), ("without rich", Terminal)):
        with monkeypatch.context() as patch:
            out, err = stream_type(), stream_type()
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            if kind == "without rich":
                hide_rich(patch)
            assert main(list(command)) == code, err.getvalue()
            found[kind] = (out if code == 0 else err).getvalue()
    return found


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def long_names() -> nn.Module:
    """Names as they are in large models."""
    model = nn.Module()
    for name in ("token_embedding_of_the_decoder", *(LONG.format(layer) for layer in range(3))):
        *path, last = name.split(".")
        inner = model
        for part in path:
            if part not in inner._modules:
                inner.add_module(part, nn.Module())
            inner = inner._modules[part]
        inner.add_module(last, nn.Linear(64, 96) if path else nn.Embedding(96, 64))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gradient statistics and plans of a model with long names."""
    folder, model = tmp_path_factory.mktemp("screen"), long_names()
    torch.manual_seed(0)
    weights = [param for name, param in model.named_parameters() if name.endswith("weight")]
    found = baoc.collect_statistics(
        model, lambda _, x: sum(((w @ w.T) * x).square().mean() for w in weights), [torch.ones(1)], steps=3
    )
    found.save(folder / "w.stats")
    baoc.make_plan(found, 0.4).save(folder / "a.json")
    baoc.make_plan(found, 0.6, planner=baoc.PaperPlanner(time=50.0, granularity="tensor")).save(folder / "b.json")
    return folder


SHOWN = [
    ("plan", "w.stats"),
    ("plan", "vit", "--memory", "8%"),
    ("plan", "w.stats", *PAPERS, "--granularity", "tensor"),
    ("explain", "a.json"),
    ("explain", "b.json"),
    ("explain", "a.json", "*layers.0*weight"),
    ("diff", "a.json", "b.json"),
    ("frontier", "w.stats", "--points", "5"),
    ("frontier", "w.stats", "--points", "5", *PAPERS),
    ("fit", "vit", "--states"),
    ("fit", "vit", "--gpu", "8GB", "--world-size", "8", "--fsdp"),
    ("report", "a.json", "-o", "r.html"),
]


@pytest.mark.parametrize("command", SHOWN, ids=" ".join)
def test_text_fits_a_terminal_and_is_the_same_with_and_without_colors(command, folder, monkeypatch):
    monkeypatch.chdir(folder)
    shown = output_of(command, monkeypatch)
    plain, colored = shown["pipe"], shown["terminal"]
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= WIDTH, plain
    assert ESCAPE.sub("", colored) == plain == shown["without rich"]
    assert ESCAPE.search(colored) or command[0] == "report", "nothing has a color"


READING = [command for command in SHOWN if command[0] != "plan"]


def test_reading_commands_import_no_heavy_package(folder):
    """All of them, in one new process: neither --help nor a command needs more than torch and numpy."""
    code = (
        "import contextlib, io, json, sys\n"
        "from baoc.tools.cli import main\n"
        "for command in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        assert main(command) == 0\n"
        "        main([command[0], '--help'])\n"
        "print(*{name.partition('.')[0] for name in sys.modules})\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, json.dumps(READING)],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(ran.stdout.split())
    assert "baoc" in loaded and loaded.isdisjoint({"rich", "transformers", "diffusers", "matplotlib", "lightning"})


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["--nothing"]])
def test_help_needs_no_torch(arguments):
    code = (
        "import sys\n"
        "from baoc.tools.cli import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit:\n"
        "    assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], env=ENVIRONMENT, capture_output=True, check=True)


def test_a_command_imports_no_other_command():
    code = "import sys; from baoc.tools.cli import main; main(['fit', 'vit', '--states']); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    loaded = ran.stdout.split()
    assert "baoc.tools.cli.fit" in loaded
    assert not {"baoc.tools.cli.plan", "baoc.tools.cli.reports", "baoc.tools.cli.measure"} & set(loaded)
    assert "torch._dynamo" not in loaded, "a second of imports, to make random numbers that nobody reads"


# ---- control characters ----

HOSTILE = "head\x1b]0;title\x07\x1b[2J\x9b31m\r\u202e"
"""Sets the title of the terminal, clears it, turns it red and reverses the text."""
OF_RICH = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\r\x1b\[1A\x1b\[2K")  # colors, and a spinner that comes and goes
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans and a config with control characters in every name."""
    folder = tmp_path_factory.mktemp("hostile")
    for file, configuration in (("a.json", "adamw-8"), ("b.json", "adamw-16")):
        block = baoc.Block(HOSTILE, baoc.parse(configuration), {HOSTILE: (64, 64)}, why=HOSTILE)
        Plan((block,)).save(folder / file)
    (folder / "config.json").write_text(json.dumps({"model_type": HOSTILE}))
    (folder / "model.py").write_text(f"def build():\n    raise RuntimeError({HOSTILE!r})\n")
    return folder


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("explain", "a.json"), 0),
        (("explain", "a.json", "--wide"), 0),
        (("explain", "a.json", "--json"), 0),
        (("explain", "a.json", HOSTILE), 0),
        (("explain", "a.json", f"no {HOSTILE}"), 2),
        (("diff", "a.json", "b.json"), 0),
        (("diff", "a.json", "b.json", "--wide"), 0),
        (("report", "a.json", "-o", f"{HOSTILE.replace('/', '')}.html"), 0),
        (("fit", "config.json"), 2),
        (("fit", "model.py:build"), 2),
        (("fit", HOSTILE), 2),
    ],
    ids=lambda value: ascii(" ".join(value)) if isinstance(value, tuple) else "",
)
def test_control_characters_do_not_reach_the_terminal(command, code, hostile, monkeypatch):
    monkeypatch.chdir(hostile)
    for kind, text in output_of(command, monkeypatch, code).items():
        own = OF_RICH.sub("", text) if kind == "terminal" else text
        assert "title" in own and not CONTROL.search(own), (kind, own)


@pytest.mark.parametrize(
    "command", [("explain",), ("explain", "--wide"), ("explain", "*"), ("diff",), ("diff", "--wide")], ids=" ".join
)
def test_a_line_break_in_a_name_adds_no_line(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = []
    for name in ("a name", "a\nname", "a\r\n\u2028name\x0b"):
        for file, configuration in (("a.json", "adamw-8"), ("b.json", "adamw-16")):
            Plan((baoc.Block(name, baoc.parse(configuration), {name: (64, 64)}, why="why"),)).save(file)
        files = ["a.json", "b.json"] if command[0] == "diff" else ["a.json"]
        shown = output_of((command[0], *files, *command[1:]), monkeypatch)["pipe"]
        lines.append(len(shown.splitlines()))
    assert len(set(lines)) == 1 and lines[0] > 1


def test_control_characters_in_wrong_options_are_escaped(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "vit", "--gpu", HOSTILE])
    assert not CONTROL.search(capsys.readouterr().err)


def test_no_color_is_respected(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["explain", "a.json"]) == 0
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", stream.getvalue())


@pytest.mark.parametrize("command", ["", *(command.name for command in COMMANDS)])
def test_help_fits_a_terminal(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*([command] if command else []), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert stop.value.code == 0 and len(lines) > 5
    assert [line for line in lines if len(line) > WIDTH] == []


def test_wide_has_names_as_they_are(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for command in (
        ("plan", "w.stats", *PAPERS, "--granularity", "tensor"),
        ("explain", "a.json", "*layers.0*weight"),
        ("diff", "a.json", "b.json"),
    ):
        assert main([*command, "--wide"]) == 0
        assert LONG.format(0) in capsys.readouterr().out, command


def test_an_error_is_one_line_whatever_it_is_shown_on(monkeypatch, capsys):
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert main(["explain", "none.json"]) == 2
        assert ESCAPE.sub("", stream.getvalue()) == "baoc: No such file or directory: 'none.json'.\n"


# ---- names ----


@pytest.mark.parametrize("width", [12, 20, 33])
def test_a_name_loses_its_middle(width):
    names = [f"{LONG.format(layer)}.weight" for layer in (1, 11, 111)]
    short = [shortened(name, width) for name in names]
    assert max(map(len, short)) <= width and len(set(short)) == 3, "layers stay apart"
    for name, cut in zip(names, short):
        begin, *_, end = cut.split("..")
        assert name.startswith(begin) and name.endswith(end) and begin and end


def test_only_a_table_that_is_too_wide_is_cut():
    rows = [[LONG.format(layer), "muon-8", "1.0 KiB"] for layer in range(2)]
    header = ["block", "configuration", "state"]
    assert table(header, rows, shorten="block") != table(header, rows) != ""
    assert max(map(len, table(header, rows, shorten="block").splitlines())) <= WIDTH
    assert table(header, [["head", "muon-8", "1.0 KiB"]], shorten="block").count("head") == 1


def test_a_plan_prints_within_a_terminal():
    plan = Plan(
        tuple(baoc.Block(LONG.format(i), baoc.parse("adamw[m=int8,v=factored]"), {str(i): (8, 8)}) for i in "01")
    )
    assert max(map(len, str(plan).splitlines())) <= WIDTH and LONG.format(0) in plan.table(wide=True)


# ---- progress ----


def test_progress_is_a_bar_on_a_terminal():
    stream = Terminal()
    with screen.Progress("warm-up", stream=stream) as progress:
        for step in (1, 2):
            progress(step, 2, f"loss {step}")
    last = ESCAPE.sub("", stream.getvalue()).replace("\r", "\n").rstrip().splitlines()[-1]
    assert re.match(r"warm-up \S{20} 2/2 loss 2 ", last) and len(last) <= WIDTH


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_progress_is_a_few_lines_in_a_pipe_or_without_rich(stream, monkeypatch):
    stream = stream()
    hide_rich(monkeypatch)
    with screen.Progress("warm-up", lines=2, stream=stream) as progress:
        for step in range(1, 11):
            progress(step, 10, "loss 0.5")
    assert stream.getvalue().splitlines() == ["warm-up: step 5/10, loss 0.5", "warm-up: step 10/10, loss 0.5"]


def test_what_the_users_code_prints_does_not_end_in_the_output(folder):
    """On a real terminal, where the bar moves on stderr and the plan goes to a file."""
    (folder / "w.py").write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Linear(64, 64)\n"
        "    def loss(model, batch):\n"
        "        print('in the loss')\n"
        "        return model(batch).square().mean()\n"
        "    return model, [torch.ones(2, 64)], loss\n"
    )
    paper = ["--planner", "paper", "--steps", "3", "--time", "inf"]  # in the paper's time, only SGD fits
    command = [sys.executable, "-m", "baoc", "plan", "w.py:make", *paper, "--memory", "50%", "--json"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=theirs) as running:
        os.close(theirs)
        seen = b""
        with contextlib.suppress(OSError):  # as Linux says that the other end is closed
            while read := os.read(ours, 1 << 12):
                seen += read
        plan = Plan.from_json(running.stdout.read().decode())
    os.close(ours)
    shown = ESCAPE.sub("", seen.decode())
    assert running.returncode == 0, shown
    assert plan.state_bytes > 0 and "in the loss" in shown and "warm-up" in shown and "3/3" in shown


def test_differences_below_the_tolerance_of_plans_have_no_color() -> None:
    tolerance = baoc.EffectPlanner().tolerance
    assert re.fullmatch(screen._NOISE, f"{tolerance - 0.01:.2f}%")
    assert not re.fullmatch(screen._NOISE, f"{tolerance:.2f}%")

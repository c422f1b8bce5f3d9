"""What a command shows on a terminal of 80 columns, in colours, and what is left of it in a pipe."""

from __future__ import annotations

import contextlib
import io
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
from baoc.cli import COMMANDS, main, screen
from baoc.core.text import WIDTH, shortened, table
from baoc.plan import profile
from tests.test_cli_plan import PAPERS

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
LONG = "model.language_model.layers.{}.self_attention.query_key_value_projection"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
    """A profile and plans of a model with long names."""
    folder, model = tmp_path_factory.mktemp("screen"), long_names()
    torch.manual_seed(0)
    weights = [param for name, param in model.named_parameters() if name.endswith("weight")]
    found = profile(model, lambda _, x: sum(((w @ w.T) * x).square().mean() for w in weights), [torch.ones(1)], steps=3)
    found.save(folder / "w.profile")
    baoc.make_plan(found, 0.4).save(folder / "a.json")
    baoc.make_plan(found, 0.6, space="paper", time=50.0, granularity="tensor").save(folder / "b.json")
    return folder


SHOWN = [
    ("plan", "w.profile"),
    ("plan", "w.profile", *PAPERS, "--granularity", "tensor"),
    ("explain", "a.json"),
    ("explain", "b.json"),
    ("explain", "a.json", "*layers.0*weight"),
    ("diff", "a.json", "b.json"),
    ("frontier", "w.profile", "--points", "5"),
    ("fit", "vit", "--states"),
    ("fit", "vit", "--gpu", "8GB", "--world-size", "8", "--fsdp"),
    ("report", "a.json", "-o", "r.html"),
]


@pytest.mark.parametrize("command", SHOWN, ids=" ".join)
def test_nothing_is_wider_than_a_terminal_and_colours_change_no_word(command, folder, monkeypatch):
    monkeypatch.chdir(folder)
    shown = {}
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(list(command)) == 0
        shown[type(stream)] = stream.getvalue()
    plain, coloured = shown[io.StringIO], shown[Terminal]
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines())) <= WIDTH, plain
    assert ESCAPE.sub("", coloured) == plain
    assert ESCAPE.search(coloured) or command[0] == "report", "nothing has a colour"


def test_no_color_is_respected(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["explain", "a.json"]) == 0
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", stream.getvalue())


@pytest.mark.parametrize("command", ["", *(module.__name__.rpartition(".")[2] for module in COMMANDS)])
def test_help_fits_a_terminal(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*([command] if command else []), "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert stop.value.code == 0 and len(lines) > 5
    assert [line for line in lines if len(line) > WIDTH] == []


def test_wide_has_names_as_they_are(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for command in (
        ("plan", "w.profile", *PAPERS, "--granularity", "tensor"),
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


def test_progress_is_a_few_lines_elsewhere():
    stream = io.StringIO()
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
    command = [sys.executable, "-m", "baoc", "plan", "w.py:make", "--steps", "3", "--json"]
    environment = os.environ | {"PYTHONPATH": str(Path(baoc.__file__).parents[1])}
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=theirs) as running:
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

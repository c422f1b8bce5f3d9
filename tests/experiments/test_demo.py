"""The demo, and the line that shows progress everywhere."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import baoc
from experiments.demo import __main__ as demo
from experiments.demo import picture
from experiments.demo.display import Display
from experiments.demo.training import METHODS, Run
from experiments.moving_line import MovingLine

CODE = r"\x1b\[[0-9;?]*[a-zA-Z]"
_SHOW_CURSOR = "\x1b[?25h"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Utf8Terminal(Terminal):
    encoding = "utf-8"


def screen(written: str) -> list[str]:
    """The lines that a terminal would show: it knows up, clear, return and newline."""
    lines, row, column = [""], 0, 0
    for token in re.findall(rf"{CODE}|[^\x1b]", written):
        if token.startswith("\x1b") and token.endswith("A"):
            row -= int(token[2:-1])
        elif token == "\x1b[2K":
            lines[row] = ""
        elif token == "\r":
            column = 0
        elif token == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif not token.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + 1 :]
            column += 1
    assert row == len(lines) - 1  # the cursor is below everything
    return [line.rstrip() for line in lines]


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    return iter(range(1000))


def shown(stream: io.StringIO, ticks: Iterator[float]) -> Display:
    """Two methods of two seeds and ten steps, with a second between any two looks at the clock."""
    return Display(
        ("AdamW32", "BAOC"), steps=10, seeds=2, reference=4096, stream=stream, clock=lambda: float(next(ticks))
    )


# ---- end to end ----


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same demo on less text."""
    whole = demo.corpora.load()
    text = type(whole)(whole.train[:20_000], whole.test[:2_000], whole.vocabulary)
    monkeypatch.setattr(demo.corpora, "load", lambda: text)


def test_the_demo_says_what_came_out(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "demo.png"
    assert demo.main(["--steps", "4", "--seeds", "2", "--output", str(path)]) == 0
    out, err = capsys.readouterr()
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    for name in METHODS:
        assert re.search(r"\d [KM]iB +\d+% +\d\.\d{3} ± \d\.\d{3} +\d+\.\d s$", rows[name]), name
    shares = {name: int(re.search(r"(\d+)%", rows[name]).group(1)) for name in METHODS}
    assert shares["AdamW32"] > 150 and shares["BAOC memory=0.5"] <= 50 and shares["BAOC memory=0.25"] <= 25
    assert "configuration" in out and "of state, " in out
    assert f"The picture is in {path}." in out
    assert out.splitlines()[-1].endswith("baoc.BAOC(model, lr=..., memory=0.25)")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "\x1b" not in out + err and "\r" not in err
    assert "AdamW8, seed 2 of 2: step 4/4, loss" in err


def test_without_matplotlib_the_demo_goes_on(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "can_draw", lambda: False)
    assert demo.main(["--steps", "1", "--seeds", "1", "--output", str(tmp_path / "demo.png")]) == 0
    out, err = capsys.readouterr()
    assert len([line for line in err.splitlines() if "pip install -e '.[plot]'" in line]) == 1
    assert "The picture" not in out and "BAOC memory=0.25" in out
    assert "±" not in out.partition("The plan of")[0], "of one seed there is no spread"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--steps", "0"], "at least 1"),
        (["--seeds", "two"], "at least 1"),
        (["--output", "demo.txt"], ".png"),
        (["--output", "folder.png"], "is a folder"),
        (["--output", "file/demo.png"], "cannot make the folder 'file'"),
        (["--seed", "1", "--colour"], "unrecognized"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    arguments: list[str],
    word: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stop:
        demo.main(arguments)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and len(err.splitlines()) == 1 and word in err


def test_a_folder_that_takes_no_files_is_found_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(SystemExit):
        demo.main(["--output", str(tmp_path / "demo.png")])
    out, err = capsys.readouterr()
    assert out == "" and f"cannot write to the folder {str(tmp_path)!r}" in err


def test_an_interrupt_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_run", interrupted)
    assert demo.main(["--output", str(tmp_path / "demo.png")]) == 130
    assert capsys.readouterr().err == "stopped\n"


# ---- the display ----


def test_rows_are_redrawn_in_place(ticks: Iterator[float]) -> None:
    stream = Utf8Terminal()
    with shown(stream, ticks) as rows:
        on_step = rows.begin("AdamW32", 0)
        for step in range(1, 11):
            on_step(step, 3.25, 8192)
        rows.begin("BAOC", 0)(5, 4.5, 1024)
        rows.begin("AdamW32", 1)(5, 2.125, 8192)
    header, adamw, ours, together, last = screen(stream.getvalue())
    assert header.split() == ["optimizer", "state", "of", "AdamW16", "progress", "loss", "time"]
    assert re.fullmatch(r"AdamW32 +8\.0 KiB +200%  [━╺╸]{12}  2\.125  0:11, 0:04 left", adamw)
    assert re.fullmatch(r"BAOC +1\.0 KiB +25%  [━╺╸]{12}  4\.500  0:01, 0:03 left", ours)
    assert adamw.index("━") == ours.index("━")
    assert together == "all together: 0:12, 0:12 left" and last == ""


def test_a_finished_row_has_its_time(ticks: Iterator[float]) -> None:
    stream = Utf8Terminal()
    with shown(stream, ticks) as rows:
        for seed in (0, 1):
            rows.begin("BAOC", seed)(10, 1.0, 4096)
    assert screen(stream.getvalue())[2].endswith("━  1.000  0:02")


def test_rows_fit_a_narrow_terminal(ticks: Iterator[float], monkeypatch: pytest.MonkeyPatch) -> None:
    for width in (80, 40):
        monkeypatch.setenv("COLUMNS", str(width))
        stream = Utf8Terminal()
        with shown(stream, ticks) as rows:
            rows.begin("AdamW32", 0)(10, 3.25, 8192)
        lines = screen(stream.getvalue())
        assert max(map(len, lines)) <= width
        assert ("left" in lines[1]) == (width == 80) and lines[1].startswith("Ad")


def test_colours_can_be_refused(ticks: Iterator[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def colours() -> set[str]:
        stream = Terminal()
        with shown(stream, ticks) as rows:
            rows.begin("BAOC", 0)(10, 3.25, 8192)
        return set(re.findall(r"\x1b\[(?:\d+;)*3[0-9](?:;\d+)*m", stream.getvalue()))

    assert colours()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colours()


def test_the_cursor_comes_back_after_an_interrupt(ticks: Iterator[float]) -> None:
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt), shown(stream, ticks) as rows:
        rows.begin("BAOC", 0)(1, 3.25, 8192)
        raise KeyboardInterrupt
    assert re.findall(CODE, stream.getvalue())[-1] == _SHOW_CURSOR
    lines = screen(stream.getvalue())
    assert lines[0].startswith("optimizer") and "3.250" in lines[2] and lines[4:] == [""]


def test_plain_lines_where_there_is_no_terminal(ticks: Iterator[float]) -> None:
    stream = io.StringIO()
    with shown(stream, ticks) as rows:
        on_step = rows.begin("BAOC", 1)
        for step in range(1, 11):
            on_step(step, 3.25, 8192)
    assert stream.getvalue().splitlines() == [f"BAOC, seed 2 of 2: step {n}/10, loss 3.25" for n in (4, 7, 10)]


def test_a_dumb_terminal_gets_no_escape_codes(ticks: Iterator[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with shown(stream, ticks) as rows:
        for name in ("AdamW32", "BAOC"):
            rows.begin(name, 0)(10, 3.25, 8192)
    assert "\x1b" not in stream.getvalue()
    assert [line.partition(":")[0] for line in screen(stream.getvalue())] == [
        "AdamW32, seed 1 of 2",
        "BAOC, seed 1 of 2",
        "",
    ]


def test_a_moving_line_stays_on_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    line = MovingLine(stream, "a long lead: ")
    for step in (1, 2):
        line.step(step, 2, 0.5)
    line.note("done")
    assert screen(stream.getvalue()) == ["a long lead: [#####", "done", ""]


# ---- the picture ----


def test_the_picture_labels_every_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kwargs: (drawn.append(self), save(self, *args, **kwargs))
    )
    torch.manual_seed(0)
    results = {
        name: [
            Run((3 - torch.rand(50)).tolist(), 2.0 + place / 50 + seed / 99, 4000 >> place, 1.0, None)
            for seed in (0, 1)
        ]
        for place, name in enumerate(METHODS)
    }
    picture.draw(results, 2000, tmp_path / "demo.svg")
    left, right = drawn[0].axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == list(METHODS)
    assert len(left.collections) == len(METHODS)  # the bands
    assert [text.get_text() for text in right.texts] == [
        f"{name}, {share}%" for name, share in zip(METHODS, (200, 100, 50, 25, 12, 6))
    ]
    boxes = [text.get_window_extent() for text in right.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_smoothing_keeps_the_mean_and_lowers_the_noise() -> None:
    noisy = [1.0, 3.0] * 50
    smooth = picture.smoothed(noisy)
    assert len(smooth) == len(noisy) and max(smooth) - min(smooth) < 0.7
    assert sum(smooth) / len(smooth) == pytest.approx(2.0, abs=0.02)


def test_the_demo_shows_a_plan_it_made() -> None:
    assert isinstance(METHODS[demo._SHOWN_PLAN](torch.nn.Linear(64, 64)), baoc.BAOC)

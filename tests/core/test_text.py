"""What people read: safe to print, and errors that name the right argument."""

from __future__ import annotations

import pytest

from baoc.core.text import check_names, printable, table

KNOWN = ("lr", "memory", "planner", "verbose", "weight_decay")
MOVED = {"warmup": "planner=PaperPlanner(warmup=...)"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("weigth_decay", r"BAOC has no argument 'weigth_decay'\. Did you mean 'weight_decay'\?"),
        ("learning_rate", r"Did you mean 'lr'\?"),
        ("quiet", r"Did you mean 'verbose'\?"),
        ("fused", r"BAOC has no argument 'fused'\. Known: lr, memory, planner, verbose, weight_decay\."),
        ("warmup", r"BAOC has no argument 'warmup': it is now planner=PaperPlanner\(warmup=\.\.\.\)\."),
        ("warm_up", r"BAOC has no argument 'warm_up'\. Did you mean planner=PaperPlanner\(warmup=\.\.\.\)\?"),
    ],
)
def test_an_unknown_argument_names_the_closest_one(name, message):
    with pytest.raises(TypeError, match=message):
        check_names({"lr": 1e-3, name: 1}, "BAOC", KNOWN, MOVED)


def test_known_arguments_pass():
    check_names(dict.fromkeys(KNOWN), "BAOC", KNOWN)
    check_names({}, "BAOC", ())


@pytest.mark.parametrize(
    "text", ["\x1b[31mred", "two\nlines", "\x9b2J", "‮gnp", "\ud800", "tab\t", "\x7f", "zero\u200bwidth"], ids=repr
)
def test_text_from_outside_cannot_steer_a_terminal(text):
    safe = printable(text)
    assert safe.isprintable() and safe.encode()
    lines = table(["name", "bytes"], [[text, 1], ["plain", 2]], right=["bytes"]).splitlines()
    assert len(lines) == 4 and all(line.isprintable() for line in lines)
    assert len(lines[2]) == len(lines[3]), "escaped cells are aligned too"


def test_plain_text_stays():
    assert printable("model.layers.0.wörter 日本") == "model.layers.0.wörter 日本"

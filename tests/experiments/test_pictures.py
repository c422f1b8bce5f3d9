"""The pictures of the documents: they are drawn, from what is really planned and held."""

from __future__ import annotations

import doctest

import pytest

import baoc
from baoc.planners.effect_table import EffectTable
from experiments.pictures import __main__ as command
from experiments.pictures import effects, run, style
from experiments.pictures.style import colours

pytest.importorskip("matplotlib")


def test_a_run_is_logged_as_it_is_held_and_drawn(tmp_path, monkeypatch):
    logs = []
    add = run.Log.add
    monkeypatch.setattr(run.Log, "add", lambda log, *rest: (logs.append(log), add(log, *rest)))
    run.draw(tmp_path / "run.png", steps=15)
    log = logs[-1]
    totals = [sum(held.values()) for held in log.held]
    assert max(totals) <= run.BUDGET * log.reference and totals[-1] <= run.LATER * log.reference
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_draws_what_is_named(tmp_path, capsys):
    pytest.importorskip("transformers")
    assert command.main(["--output", str(tmp_path / "new"), "--only", "plans.png", "--only", "effects.png"]) == 0
    drawn = sorted((tmp_path / "new").iterdir())
    assert [path.name for path in drawn] == ["effects.png", "plans.png"]
    assert capsys.readouterr().out.split() == [str(tmp_path / "new" / name) for name in ("plans.png", "effects.png")]


def test_the_same_picture_is_the_same_file(tmp_path):
    """So that making them again shows what has changed."""
    for name in ("a.png", "b.png"):
        effects.draw(tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_docstring_examples():
    assert doctest.testmod(style).failed == 0


def test_every_configuration_that_a_plan_may_choose_has_a_colour_of_its_own():
    candidates = EffectTable.load().distinct([(1024, 1024)])  # others store only small tensors in another way
    found = colours(each for each in candidates if each != baoc.parse("adamw-32"))  # more than AdamW16 has its colour
    assert len(set(found.values())) == len(found)
    assert colours([baoc.parse("muon-8")]) != colours([baoc.parse("adamw-8")])

"""The short form of ``python -m benchmarks.torture``."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

import baoc
from benchmarks.torture import interrupt, mutate, options, race, trials


@pytest.mark.parametrize("kind", mutate.TARGETS)
def test_damaged_files_are_refused_or_harmless(kind, caplog):
    caplog.set_level(logging.CRITICAL, logger="baoc")
    found = mutate.run(60, seed=0, names=[kind])
    assert found[f"{kind}: findings"] == []
    assert found[kind]["refused"] and found[kind]["harmless"]


def test_killed_runs_end_as_if_they_were_not():
    """In a process of its own: it forks, which other tests' threads would not survive."""
    scenarios = ("low bits, released", "2 ranks")
    command = [sys.executable, "-m", "benchmarks.torture", "kill", "--times", "4", "--only", *scenarios]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills: 4" in done.stdout and "different: 0" in done.stdout


@pytest.mark.parametrize("action", interrupt.ACTIONS)
def test_an_interrupted_action_leaves_a_usable_optimizer(action):
    found = interrupt.run(len(interrupt.KINDS), seed=0, names=[action])
    assert found["findings"] == [] and found["lines"]


def test_an_interrupt_is_raised_at_the_line_that_was_drawn():
    baoc.parse("adamw-8").state_bytes((64, 64))  # fills caches
    with interrupt.Interrupt() as counted:
        baoc.parse("adamw-8").state_bytes((64, 64))
    with interrupt.Interrupt(at=counted.lines - 1) as raised:
        baoc.parse("adamw-8").state_bytes((64, 64))
    assert raised.lines == counted.lines - 1 and raised.place and not counted.place


def test_ranks_of_which_one_meets_a_fault_stay_equal():
    """In a process of its own, because it forks."""
    command = [sys.executable, "-m", "benchmarks.torture", "distributed", "--times", "5"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases: 5" in done.stdout and "findings: 0" in done.stdout


def test_parameters_that_share_elements_are_refused_and_others_do_not_race():
    found = race.run(2 * len(race.OVERLAPS))
    shared = {f"{name}: refused": 2 for name in race.OVERLAPS if name != "apart"}
    assert found["findings"] == [] and found["outcomes"] == {"apart: equal": 2, **shared}


def test_odd_arguments_are_refused_or_harmless(caplog):
    caplog.set_level(logging.CRITICAL, logger="baoc")
    found = options.run_arguments(60)
    assert found["findings"] == []
    assert any("accepted" in outcome for outcome in found["outcomes"])


def test_other_defaults_of_torch_change_nothing():
    assert options.run_defaults(2 * len(options.PLANNERS))["findings"] == []


def test_what_goes_wrong_is_found():
    """The loop can fail."""
    found = trials.tried(3, 0, ["kind"], lambda kind, draw: str(1 // 0))
    assert found["outcomes"] == {"kind: wrong": 3} and len(found["findings"]) == 1


def test_an_optimizer_that_loses_its_state_is_found(monkeypatch):
    """The checks can fail."""
    broken = interrupt.Action(lambda run: None, lambda run, _: run.optimizer.state.clear())
    monkeypatch.setitem(interrupt.ACTIONS, "broken", broken)
    monkeypatch.setattr(interrupt, "KINDS", {"effects": interrupt.KINDS["effects"]})
    assert interrupt.run(1, names=["broken"])["findings"]

"""The short form of ``python -m benchmarks.torture``."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from benchmarks.torture import mutate


@pytest.mark.parametrize("kind", mutate.TARGETS)
def test_damaged_files_are_refused_or_harmless(kind, caplog):
    caplog.set_level(logging.CRITICAL, logger="baoc")
    found = mutate.run(60, seed=0, names=[kind])
    assert found[f"{kind}: findings"] == []
    assert found[kind]["refused"] and found[kind]["harmless"]


def test_killed_runs_end_as_if_they_were_not():
    """In a process of its own: it forks, which other tests' threads would not survive."""
    scenarios = ("paper, settle", "2 ranks")
    command = [sys.executable, "-m", "benchmarks.torture", "kill", "--times", "4", "--only", *scenarios]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kills: 4" in done.stdout and "different: 0" in done.stdout

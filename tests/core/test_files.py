"""A file that is written is there as a whole, or the one before it still is."""

from __future__ import annotations

import os
import threading

import pytest

import baoc
from baoc.core.files import replaced

PLAN = baoc.Plan.uniform("adamw-8", {"weight": (64, 64)})


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_an_interrupted_save_keeps_the_old_file(function, tmp_path, monkeypatch):
    path = tmp_path / "file"
    PLAN.save(path)
    before = path.read_bytes()

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, function, interrupt)
    with pytest.raises(KeyboardInterrupt):
        baoc.Plan.uniform("sgd", {"other": (2,)}).save(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["file"], "nothing is left beside it"


def test_writers_of_one_file_do_not_meet(tmp_path):
    """Not even in one process; on another machine, a process may have the same number."""
    path = tmp_path / "file"
    with replaced(path) as first, replaced(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_bytes() == b"first", "the last one to finish"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_modes_and_links_stay(tmp_path):
    path, link = tmp_path / "plan.json", tmp_path / "latest.json"
    mask = os.umask(0o027)
    try:
        PLAN.save(path)
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o640, "a new file has the mode that the umask gives"
    path.chmod(0o604)
    link.symlink_to(path)
    PLAN.save(link)
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o604
    assert baoc.Plan.load(link) == PLAN


def test_a_pipe_is_written_to(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    with replaced(pipe) as file:
        file.write(b"gone")
    reader.join(timeout=60)
    assert read == [b"gone"] and pipe.is_fifo()

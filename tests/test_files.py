"""A file that is written is there as a whole, or the one before it still is."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import baoc
from baoc.core import files

PLAN = baoc.Plan.uniform("adamw-8", {"weight": (64, 64)})


def profile() -> baoc.Profile:
    return baoc.profile(nn.Linear(8, 4), lambda model, batch: model(batch).square().mean(), [torch.ones(2, 8)], steps=1)


@pytest.mark.parametrize("make", [lambda: PLAN, profile], ids=["plan", "profile"])
def test_an_interrupted_save_keeps_the_old_file(make, tmp_path, monkeypatch):
    content, path = make(), tmp_path / "file"
    content.save(path)
    before = path.read_bytes()
    for function in ("fsync", "replace"):
        with monkeypatch.context() as patched:

            def interrupt(*arguments: object) -> None:
                raise KeyboardInterrupt

            patched.setattr(os, function, interrupt)
            with pytest.raises(KeyboardInterrupt):
                content.save(path)
        assert path.read_bytes() == before
        assert [each.name for each in tmp_path.iterdir()] == ["file"], "nothing is left beside it"


def test_modes_and_links_stay(tmp_path):
    path, link = tmp_path / "plan.json", tmp_path / "latest.json"
    PLAN.save(path)
    path.chmod(0o640)
    link.symlink_to(path)
    PLAN.save(link)
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert baoc.Plan.load(link) == PLAN


def test_what_is_no_regular_file_is_written_to(tmp_path):
    with files.replaced("/dev/null") as file:
        file.write(b"gone")
    assert not os.path.isfile("/dev/null")

"""A plan is a function of profile, budget and settings: of no clock, no thread, no hash seed and no process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

import baoc

PROCESSES, PLANS = 3, 17
REQUESTS = (
    {"memory": 0.25},
    {"memory": 0.3, "space": "paper"},
)
SCRIPT = f"""
import hashlib, sys, torch
from baoc import Profile, make_plan

torch.set_num_threads(int(sys.argv[2]))
for _ in range({PLANS}):
    profile = Profile.load(sys.argv[1])
    plans = [make_plan(profile, **request).to_json() for request in {REQUESTS!r}]
    print(hashlib.sha256("".join(plans).encode()).hexdigest())
"""


def test_fifty_plans_in_processes_under_load_are_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(100, 64), *layers, nn.Linear(64, 100))
    words = torch.randint(100, (4, 16))
    seen = baoc.profile(
        model,
        lambda model, words: nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()),
        [words],
        steps=4,
    )
    seen.save(tmp_path / "a.profile")
    started = [  # more of them than cores, which is load enough to have changed plans when updates were timed
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "a.profile"), str(1 + index % 3)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": str(index)},
        )
        for index in range(PROCESSES)
    ]
    digests = [line for process in started for line in process.communicate()[0].split()]
    assert len(digests) == PROCESSES * PLANS
    assert len(set(digests)) == 1


def test_a_profile_carries_the_constants_of_its_device(tmp_path: Path) -> None:
    """A plan made from it elsewhere is the plan of where it was taken."""
    model = nn.Linear(64, 64)
    seen = baoc.profile(model, lambda model, x: model(x).square().mean(), [torch.randn(2, 64)], steps=2)
    seen.save(tmp_path / "a.profile")
    loaded = baoc.Profile.load(tmp_path / "a.profile")
    assert loaded.facts == seen.facts
    assert baoc.make_plan(loaded, 1.0).settings["operations_per_byte"] == seen.facts.operations_per_byte

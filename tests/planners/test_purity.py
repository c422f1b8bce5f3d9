"""Plans are pure functions: of facts, budget and settings, not of clocks, threads, hash seeds or processes."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from baoc import (
    BAOC,
    Budget,
    EffectPlanner,
    GradientStatistics,
    ModelFacts,
    PaperPlanner,
    collect_statistics,
    make_plan,
)

PROCESSES, PLANS = 3, 4
SCRIPT = f"""
import hashlib, sys, torch
from baoc import EffectPlanner, GradientStatistics, PaperPlanner, make_plan

torch.set_num_threads(int(sys.argv[2]))
for _ in range({PLANS}):
    statistics = GradientStatistics.load(sys.argv[1])
    requests = (EffectPlanner(), 0.1), (EffectPlanner(), 0.25), (EffectPlanner(), "auto"), (PaperPlanner(), 0.3)
    plans = [make_plan(statistics, memory, planner=planner).to_json() for planner, memory in requests]
    print(hashlib.sha256("".join(plans).encode()).hexdigest())
"""


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2)]
    return nn.Sequential(nn.Embedding(100, 64), *layers, nn.Linear(64, 100))


def statistics_of(model: nn.Module) -> GradientStatistics:
    words = torch.randint(100, (4, 16), generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())

    return collect_statistics(model, loss, [words], steps=4)


def test_plans_of_processes_under_load_are_one(tmp_path: Path) -> None:
    statistics_of(make_model()).save(tmp_path / "a.statistics")
    started = [  # more of them than cores: plans must not depend on timing
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "a.statistics"), str(1 + index % 3)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": str(index)},
        )
        for index in range(PROCESSES)
    ]
    digests = [line for process in started for line in process.communicate()[0].split()]
    assert len(digests) == PROCESSES * PLANS
    assert len(set(digests)) == 1


@pytest.mark.parametrize("memory", [0.0, 0.08, 0.2, 0.5, "auto"])
def test_plans_do_not_depend_on_weights_threads_or_what_was_planned_before(memory: Any) -> None:
    """Seeds change every weight, and none of the facts."""
    before = torch.get_num_threads()
    texts = set()
    try:
        for seed in range(4):
            torch.set_num_threads(1 + seed % 3)
            model = make_model(seed)
            make_plan(make_model(seed), 0.05 * (seed + 2))  # another plan in between
            texts.add(make_plan(model, memory).to_json())
            texts.add(BAOC(model, memory=memory, verbose=False).plan.to_json())
            texts.add(EffectPlanner().initial_plan(ModelFacts.of(model), Budget(memory)).to_json())
            problem = EffectPlanner().problem(ModelFacts.of(model))
            problem.plan(Budget(1.0))
            texts.add(problem.plan(Budget(memory)).to_json())
    finally:
        torch.set_num_threads(before)
    assert len(texts) == 1


def test_plans_made_by_threads_at_once_are_one() -> None:
    facts = ModelFacts.of(make_model())
    problem = EffectPlanner().problem(facts)
    with ThreadPoolExecutor(4) as pool:
        texts = set(pool.map(lambda _: problem.plan(Budget(0.2)).to_json(), range(8)))
    assert texts == {EffectPlanner().initial_plan(facts, Budget(0.2)).to_json()}


def test_more_memory_or_another_model_is_another_plan() -> None:
    """The tests above would pass if all plans were equal."""
    plans = [make_plan(make_model(), memory).to_json() for memory in (0.05, 0.2)]
    plans += [make_plan(nn.Sequential(make_model(), nn.Linear(100, 100)), 0.2).to_json()]
    assert len(set(plans)) == 3


def test_statistics_carry_the_constants_of_their_device(tmp_path: Path) -> None:
    """A plan that is made from them elsewhere is the plan of where they were collected."""
    seen = statistics_of(make_model())
    seen.save(tmp_path / "a.statistics")
    loaded = GradientStatistics.load(tmp_path / "a.statistics")
    for name in ("regime", "tokens", "device", "operations_per_byte", "roles", "shapes"):
        assert getattr(loaded.model, name) == getattr(seen.model, name)
    assert loaded.model.tokens == 64
    for planner in (EffectPlanner(), PaperPlanner()):
        plans = [make_plan(each, 0.4, planner=planner).to_json() for each in (seen, loaded)]
        assert plans[0] == plans[1]
    assert make_plan(loaded, 1.0).settings["operations_per_byte"] == seen.model.operations_per_byte

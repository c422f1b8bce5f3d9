"""Two ranks that see different data make one plan, keep the same weights to the bit, and notice when they cannot."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from baoc import BAOC, EffectPlanner, PaperPlanner

RANKS, STEPS, WARMUP = 2, 8, 3
WORDS = 16
PAPER = PaperPlanner(warmup=WARMUP)


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))
            for _ in range(2)
        )
        self.head = nn.Linear(width, 100)

    def forward(self, words):
        x = self.embed(words)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def make(model: nn.Module, **settings: Any) -> BAOC:
    return BAOC(model, **({"lr": 3e-3, "memory": 0.5, "verbose": False} | settings))


def run(
    model: nn.Module, optimizer: BAOC, rank: int, steps: range = range(STEPS), poison: tuple[int, ...] = ()
) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        words = torch.randint(100, (4 + 4 * rank, WORDS), generator=generator)  # of different sizes too
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), (3 * words % 100).flatten())
        (loss * (float("nan") if step in poison and rank else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def outcome(model: nn.Module, optimizer: BAOC) -> dict[str, Any]:
    weights = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
    return {"plan": optimizer.plan.to_json(), "weights": hashlib.sha256(weights).hexdigest()}


# ---- what ranks may go through together ----


def trains(steps: int = STEPS, **settings: Any) -> Callable[[int], dict[str, Any]]:
    def scenario(rank: int) -> dict[str, Any]:
        model = DistributedDataParallel(Net())
        optimizer = make(model.module, **settings)
        run(model, optimizer, rank, range(steps))
        return outcome(model, optimizer)

    return scenario


def changes_its_budget(rank: int) -> dict[str, Any]:
    model = DistributedDataParallel(Net())
    optimizer = make(model, planner=PAPER)
    run(model, optimizer, rank, range(WARMUP + 1))
    optimizer.replan(memory=0.3)
    run(model, optimizer, rank, range(WARMUP + 1, STEPS))
    return outcome(model, optimizer)


def has_a_slow_rank(rank: int) -> dict[str, Any]:
    model = DistributedDataParallel(Net())
    optimizer = make(model.module, planner=EffectPlanner(replan_every=2))
    for step in range(STEPS):
        time.sleep(0.02 * rank)
        run(model, optimizer, rank, range(step, step + 1))
    return outcome(model, optimizer)


def sees_nan_on_one_rank(rank: int) -> dict[str, Any]:
    model = DistributedDataParallel(Net())
    optimizer = make(model.module, planner=dataclasses.replace(PAPER, replan_every=2))
    run(model, optimizer, rank, poison=(1, 4))
    return outcome(model, optimizer)


def skips_nan_of_one_rank(planner: Any) -> Callable[[int], dict[str, Any]]:
    """Gradients are reduced before the step, so a bad one is bad on all ranks."""

    def scenario(rank: int) -> dict[str, Any]:
        model = DistributedDataParallel(Net())
        optimizer = make(model.module, planner=planner, on_nonfinite="skip")
        run(model, optimizer, rank, poison=(1, 4))
        counts = {key: optimizer.metrics()[key] for key in ("steps", "skipped_steps")}
        return {**outcome(model, optimizer), **counts}

    return scenario


def runs_out_of_data(rank: int) -> dict[str, Any]:
    """One rank has no more data while the other makes new plans: they must not wait for each other."""
    model = DistributedDataParallel(Net())
    optimizer = make(model.module, planner=EffectPlanner(replan_every=2))
    with model.join():
        run(model, optimizer, rank, range(STEPS if rank else STEPS // 2))
    return {"plan": outcome(model, optimizer)["plan"]}


def does_not_reduce_gradients(rank: int) -> dict[str, Any]:
    """Weights differ then, but it is still one plan, though one rank never has a sample."""
    model = Net()
    optimizer = make(model, planner=dataclasses.replace(PAPER, replan_every=2, stable_within=1e-9))
    run(model, optimizer, rank, poison=tuple(range(STEPS)))
    return {"plan": outcome(model, optimizer)["plan"]}


def resumes(rank: int) -> dict[str, Any]:
    model = DistributedDataParallel(Net())
    optimizer = make(model.module, planner=PAPER)
    run(model, optimizer, rank, range(2))
    saved = [None]
    if rank == 0:
        file = io.BytesIO()
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
        saved = [file.getvalue()]
    dist.broadcast_object_list(saved)
    content = torch.load(io.BytesIO(saved[0]), weights_only=True)
    run(model, optimizer, rank, range(2, STEPS))
    uninterrupted = outcome(model, optimizer)
    model = DistributedDataParallel(Net())
    optimizer = make(model.module, planner=PAPER)
    model.module.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    run(model, optimizer, rank, range(2, STEPS))
    return {**outcome(model, optimizer), "is the same run": outcome(model, optimizer) == uninterrupted}


def trains_two_models(rank: int) -> dict[str, Any]:
    alone = [dist.new_group([each]) for each in range(RANKS)][rank]
    optimizer = make(model := Net(64 + 16 * rank), process_group=alone)
    run(model, optimizer, rank, range(2))
    return {}


# ---- what they may not ----


def refused(build: Callable[[int], BAOC]) -> Callable[[int], dict[str, Any]]:
    def scenario(rank: int) -> dict[str, Any]:
        optimizer = build(rank)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        try:
            optimizer.step()
        except RuntimeError as error:
            return {"error": str(error)}
        return {"error": "none"}

    return scenario


def resumed_on_one_rank(rank: int) -> BAOC:
    optimizer, single = make(model := Net()), dist.new_group([0])
    if rank == 0:
        before = make(model, process_group=single)
        run(model, before, rank, range(1))
        optimizer.load_state_dict(before.state_dict())
    return optimizer


TOGETHER: dict[str, Callable[[int], dict[str, Any]]] = {
    "effects": trains(memory=0.13),
    "effects, replanned": trains(planner=EffectPlanner(replan_every=2)),
    "paper": trains(planner=PAPER),
    "paper, replanned": trains(planner=dataclasses.replace(PAPER, replan_every=2)),
    "stable": trains(steps=20, planner=PaperPlanner(stable_within=100.0, warmup=100)),
    "another budget": changes_its_budget,
    "a slow rank": has_a_slow_rank,
    "nan": sees_nan_on_one_rank,
    "skipped": skips_nan_of_one_rank(None),
    "skipped by the paper": skips_nan_of_one_rank(PAPER),
    "uneven data": runs_out_of_data,
    "not reduced": does_not_reduce_gradients,
    "resumed": resumes,
    "two models": trains_two_models,
}
APART = {
    "a wider model": (
        refused(lambda rank: make(Net(64 + 16 * rank))),
        r"ranks differ in their parameters: rank 0 has embed.weight of \(100, 64\), and rank 1 has .*\(100, 80\)",
    ),
    "a deeper model": (
        refused(lambda rank: make(nn.Sequential(*(nn.Linear(8, 8) for _ in range(2 + rank))), memory=1.0)),
        r"rank 0 has no such entry, and rank 1 has 2.weight of \(8, 8\)",
    ),
    "another budget": (
        refused(lambda rank: make(Net(), memory=0.5 + 0.1 * rank)),
        r"differ in their settings: rank 0 has memory=0.5, and rank 1 has memory=0.6",
    ),
    "another lr": (refused(lambda rank: make(Net(), lr=0.1 * (rank + 1))), "rank 0 has lr=0.1 .*rank 1 has lr=0.2"),
    "one rank resumed": (refused(resumed_on_one_rank), "rank 0 has 1 steps behind it, and rank 1 has 0 steps"),
}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    scenarios = TOGETHER | {f"apart: {name}": scenario for name, (scenario, _) in APART.items()}
    outcomes = {name: scenario(rank) for name, scenario in scenarios.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """What each rank found, all scenarios in one pair of processes."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, (str(folder),), nprocs=RANKS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


pytestmark = pytest.mark.xdist_group("ranks")  # one worker has the fixture


@pytest.mark.parametrize("scenario", TOGETHER)
def test_ranks_agree(outcomes, scenario):
    first, *others = (each[scenario] for each in outcomes)
    for other in others:
        assert other == first


def test_the_tokens_of_the_first_rank_are_counted_on_all(outcomes):
    for each in outcomes:
        assert json.loads(each["effects"]["plan"])["settings"]["tokens"] == 4 * WORDS


def test_a_resumed_run_is_the_same_run_on_every_rank(outcomes):
    assert all(each["resumed"]["is the same run"] for each in outcomes)


def test_stability_is_decided_together(outcomes):
    settings = json.loads(outcomes[0]["stable"]["plan"])["settings"]
    assert settings["warmup_steps"] == 20


@pytest.mark.parametrize("scenario", ["skipped", "skipped by the paper"])
def test_a_step_is_skipped_on_all_ranks(outcomes, scenario):
    for each in outcomes:
        assert (each[scenario]["steps"], each[scenario]["skipped_steps"]) == (STEPS - 2, 2)


@pytest.mark.parametrize("case", APART)
def test_ranks_that_differ_are_told_so_everywhere(outcomes, case):
    for each in outcomes:
        assert re.search(APART[case][1], each[f"apart: {case}"]["error"]), each[f"apart: {case}"]

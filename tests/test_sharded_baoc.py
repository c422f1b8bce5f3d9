"""BAOC on sharded models: one process' samples, facts, plans and weights, on any number of ranks."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from baoc import BAOC, EffectPlanner, PaperPlanner, prepare_for_load, state_bytes
from baoc.core.sharding import local
from tests.ranks import together
from tests.training import assert_same

BATCH, LENGTH, WORDS, WIDTH = 12, 16, 101, 48
WARMUP = 3
PAPER = PaperPlanner(warmup=WARMUP)
SETTINGS: dict[str, dict[str, Any]] = {
    "effects": {"memory": 0.3},
    "effects, replanned": {"memory": 0.5, "planner": EffectPlanner(replan_every=2)},
    "paper": {"memory": 0.5, "planner": PAPER},
    "paper, replanned": {"memory": 0.5, "planner": PaperPlanner(warmup=WARMUP, replan_every=2)},
}
RANKS = (1, 2, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH + 1), nn.GELU(), nn.Linear(2 * WIDTH + 1, WIDTH)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.gain = nn.Parameter(torch.ones(1))  # fewer rows than ranks

    def forward(self, words):
        x = self.embed(words)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x) * self.gain


def built(ranks: int, replicas: int = 1, **settings: Any) -> tuple[nn.Module, BAOC]:
    """One rank is a plain model; with several replicas it is HSDP."""
    model = Net()
    if ranks > 1:
        names = ("replicate", "shard")
        mesh = (
            init_device_mesh("cpu", (ranks,))
            if replicas == 1
            else init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=names)
        )
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, BAOC(model, lr=3e-3, verbose=False, **settings)


def train(model: nn.Module, optimizer: BAOC, steps: range, rank: int, ranks: int) -> None:
    """Every rank sees its part of one batch."""
    for step in steps:
        words = torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        nn.functional.cross_entropy(model(words).flatten(0, 1), (3 * words % WORDS).flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    return value.full_tensor().clone() if hasattr(value, "full_tensor") else value


def weights(model: nn.Module) -> dict[str, Any]:
    return {name: whole(param.detach()).clone() for name, param in model.named_parameters()}


def held_bytes(optimizer: BAOC) -> int:
    """Of all but samples, on this rank."""
    states = optimizer.state.values()
    tensors = [local(value) for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def trained(rank: int, ranks: int) -> dict[str, Any]:
    found = {}
    for name, settings in SETTINGS.items():
        model, optimizer = built(ranks, **settings)
        before = optimizer.plan
        train(model, optimizer, range(6), rank, ranks)
        statistics = optimizer.statistics if isinstance(settings.get("planner"), PaperPlanner) else None
        found[name] = {
            "first plan": before.to_json(),
            "plan": optimizer.plan,
            "samples": statistics and {key: each.second for key, each in statistics.records.items()},
            "facts": optimizer._run.facts,
            "weights": weights(model),
            "held": held_bytes(optimizer),
        }
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[int, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("baoc")
    return {1: [trained(0, 1)], **{ranks: together(trained, ranks, folder / str(ranks), ranks) for ranks in RANKS[1:]}}


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("ranks", RANKS[1:])
@pytest.mark.parametrize("name", SETTINGS)
def test_ranks_plan_and_train_as_one_process_does(name, ranks, outcomes):
    [alone], ours = [each[name] for each in outcomes[1]], [each[name] for each in outcomes[ranks]]
    for each in ours:
        assert each["first plan"] == ours[0]["first plan"] and each["plan"] == ours[0]["plan"]
        assert_same(each["weights"], ours[0]["weights"])
        assert each["facts"] == alone["facts"]
        chosen = {name: block.configuration for name, block in each["plan"].by_parameter}
        assert chosen == {name: block.configuration for name, block in alone["plan"].by_parameter}
    for key, weight in alone["weights"].items():
        torch.testing.assert_close(ours[0]["weights"][key], weight, rtol=2e-3, atol=2e-3)
    assert (ours[0]["samples"] is None) == (alone["samples"] is None)
    for key, sample in (alone["samples"] or {}).items():
        torch.testing.assert_close(*map(torch.from_numpy, (ours[0]["samples"][key], sample)), rtol=2e-2, atol=1e-6)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("ranks", RANKS[1:])
def test_a_rank_holds_what_the_plan_says(ranks, outcomes):
    for found in outcomes[ranks][0].values():  # the first rank has most
        assert found["plan"].state_bytes_per_rank == found["held"]
        assert "on a rank" in str(found["plan"])


def trained_in_replicas(rank: int) -> dict[str, Any]:
    found = {}
    for name, settings in SETTINGS.items():
        model, optimizer = built(4, replicas=2, **settings)
        train(model, optimizer, range(WARMUP + 2), rank, 4)
        found[name] = {"plan": optimizer.plan, "weights": weights(model), "held": held_bytes(optimizer)}
    return found


@pytest.mark.xdist_group("ranks")
def test_replicas_of_shards_agree(tmp_path):
    first, *others = together(trained_in_replicas, 4, tmp_path)
    for name, found in first.items():
        assert found["plan"].state_bytes_per_rank == found["held"]
        for other in others:
            assert other[name]["plan"] == found["plan"]
            assert_same(other[name]["weights"], found["weights"], name)


def budgeted(rank: int) -> dict[str, Any]:
    found = {}
    for memory in ("20KiB", "20KiB/rank"):
        model, optimizer = built(2, memory=memory)
        train(model, optimizer, range(WARMUP + 1), rank, 2)
        found[memory] = optimizer.plan.state_bytes, state_bytes(optimizer)
    return found


@pytest.mark.xdist_group("ranks")
def test_a_budget_is_of_all_ranks_or_of_one(tmp_path):
    first, second = together(budgeted, 2, tmp_path)
    assert first["20KiB"][0] <= 20 * 1024 < first["20KiB/rank"][0]
    assert max(each["20KiB/rank"][1] for each in (first, second)) <= 20 * 1024


def content_of(model: nn.Module, optimizer: BAOC, options: StateDictOptions) -> dict[str, Any]:
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": get_model_state_dict(model), "optimizer": optimizer_state}


PLANNERS: dict[str, Any] = {"effects": EffectPlanner(), "paper": PAPER}
CHECKPOINTS = {  # in the warm-up and after it: how many steps
    2: StateDictOptions(flatten_optimizer_state_dict=True),
    4: StateDictOptions(flatten_optimizer_state_dict=False),
}


def saved(rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    """How things stood two steps after each checkpoint."""
    found = {}
    for name, steps in itertools.product(PLANNERS, CHECKPOINTS):
        model, optimizer = built(ranks, memory=0.5, planner=PLANNERS[name])
        train(model, optimizer, range(steps), rank, ranks)
        content = content_of(model, optimizer, CHECKPOINTS[steps])
        dcp.save(content, checkpoint_id=folder / f"{ranks}-{name}-{steps}", no_dist=ranks == 1)
        train(model, optimizer, range(steps, steps + 2), rank, ranks)
        found[name, steps] = weights(model), optimizer.plan
    return found


RESUMED = {1: (3,), 2: (1, 2), 3: (2,)}  # whose checkpoints each number of ranks goes on from


def resumed(rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    found = {}
    for others in RESUMED[ranks]:
        for name, steps in itertools.product(PLANNERS, CHECKPOINTS):
            path, options = folder / f"{others}-{name}-{steps}", CHECKPOINTS[steps]
            model, optimizer = built(ranks, memory=0.5, planner=PLANNERS[name])
            prepare_for_load(optimizer, path)
            content = content_of(model, optimizer, options)
            dcp.load(content, checkpoint_id=path, no_dist=ranks == 1)
            set_model_state_dict(model, content["model"])
            set_optimizer_state_dict(model, optimizer, content["optimizer"], options=options)
            train(model, optimizer, range(steps, steps + 2), rank, ranks)
            found[others, name, steps] = weights(model), optimizer.plan
    return found


@pytest.mark.xdist_group("ranks")
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    def on(ranks: int, target: Any) -> Any:
        if ranks == 1:
            return target(0, 1, tmp_path)
        return together(target, ranks, tmp_path / f"{target.__name__}{ranks}", ranks, tmp_path)[0]

    before = {ranks: on(ranks, saved) for ranks in RANKS}
    for ranks in RANKS:
        for (others, name, steps), (found, plan) in on(ranks, resumed).items():
            expected, expected_plan = before[others][name, steps]
            what = f"{name}, {others} to {ranks} ranks after {steps} steps"
            if others == ranks:
                assert plan == expected_plan, what
                assert_same(found, expected, what)
            for key, weight in expected.items():
                torch.testing.assert_close(found[key], weight, rtol=2e-3, atol=2e-3)

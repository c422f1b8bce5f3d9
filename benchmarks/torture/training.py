"""A small training script that follows the recipe of docs/checkpoints.md, in several scenarios."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from baoc import BAOC, EffectPlanner, PaperPlanner, release_gradients
from baoc.core.files import replaced
from baoc.planners.base import Planner

STEPS, SAVE_EVERY = 26, 2
REPLANNED_AT, SMALLER = 15, 0.4
WIDTH, WORDS = 32, 60


@dataclass(frozen=True)
class Scenario:
    """A planner, a budget, and how many ranks train which kind of weights."""

    planner: Planner
    memory: float = 0.5
    dtype: torch.dtype = torch.float32
    ranks: int = 1
    plan: str = ""
    """Set at the start, instead of the planner's."""
    releases: bool = False


LOW_BITS = "adamw[m=int8,v=factored,w=8]"
SCENARIOS = {
    "effects": Scenario(EffectPlanner()),
    "effects, replan": Scenario(EffectPlanner(replan_every=4)),
    "paper": Scenario(PaperPlanner(warmup=100, stable_within=100.0), memory=0.6),
    "paper, bf16": Scenario(PaperPlanner(warmup=5, replan_every=6), memory=0.6, dtype=torch.bfloat16),
    "low bits": Scenario(EffectPlanner(), memory=0.6, dtype=torch.bfloat16, plan=LOW_BITS),
    "low bits, released": Scenario(EffectPlanner(), memory=0.6, dtype=torch.float16, plan=LOW_BITS, releases=True),
    "released": Scenario(EffectPlanner(replan_every=4), releases=True),
    "2 ranks": Scenario(PaperPlanner(warmup=5, replan_every=4), memory=0.6, ranks=2),
}


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model with few matrices, which are large enough for every codec."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))]
    return nn.Sequential(nn.Embedding(4 * WORDS, WIDTH), *layers, nn.Linear(WIDTH, 4 * WORDS)).to(dtype)


def loss_of(model: nn.Module, step: int, rank: int = 0) -> torch.Tensor:
    """Return the loss of a step, which follows from its number alone, so the data need no state of their own."""
    words = torch.randint(4 * WORDS, (WORDS,), generator=torch.Generator().manual_seed(1000 * rank + step))
    return nn.functional.cross_entropy(model(words).float(), 7 * words % (4 * WORDS))


def backward(model: nn.Module, step: int, rank: int = 0) -> None:
    """Compute the gradients of a step."""
    loss_of(model, step, rank).backward()  # type: ignore[no-untyped-call]


def train(folder: Path, scenario: Scenario, rank: int = 0) -> None:
    """Train from the last checkpoint in a folder, or from the start, and write down the result."""
    torch.set_num_threads(1)
    core = make_model(scenario.dtype)
    model = core
    if scenario.ranks > 1:
        meeting = f"file://{folder}/meeting-{os.getppid()}-{os.environ['LIFE']}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=scenario.ranks)
        model = DistributedDataParallel(core)
    optimizer = BAOC(core, lr=3e-3, memory=scenario.memory, planner=scenario.planner)
    if scenario.releases:
        release_gradients(optimizer)
    path = folder / "run.pt"
    step = 0
    if scenario.plan and not path.exists():
        optimizer.set_plan(scenario.plan)
    if path.exists():
        saved = torch.load(path, weights_only=True)
        core.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < STEPS:
        if step == REPLANNED_AT:
            optimizer.replan(memory=SMALLER)
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % SAVE_EVERY == 0 and rank == 0:
            with replaced(path) as file:
                torch.save({"model": core.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)
    (folder / f"end-{rank}.json").write_text(json.dumps({"weights": _digest(core), "plan": optimizer.plan.to_json()}))
    if scenario.ranks > 1:
        dist.barrier()  # and no more: taking gloo down in a forked process has been seen to hang


def _digest(model: nn.Module) -> str:
    parts = [param.detach().contiguous().view(torch.uint8).numpy().tobytes() for param in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()

"""Two ranks, of which one meets a fault: no data, a bad gradient, no memory, another batch.

The replicas end with equal weights, state and plan, or both raise the same error at the same step. Neither waits for
the other forever. Ranks are forked from a process that has imported everything.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from baoc import BAOC, PlanError
from baoc.optim import conversion
from benchmarks.torture.options import PLANNERS, digest
from benchmarks.torture.training import make_model
from benchmarks.torture.trials import tried

RANKS = 2
_PATIENCE = 90.0  # seconds, in which a scenario must end
_STEPS = 8
_WORDS = 240


@dataclass(frozen=True)
class Scenario:
    """What the ranks do, and what happens to one of them."""

    fault: str
    planner: str
    memory: float
    policy: str
    victim: int
    at: int
    """The step, the conversion, or the number of batches."""
    replanned_at: int | None

    @classmethod
    def drawn(cls, fault: str, draw: random.Random) -> Scenario:
        # one rank cannot know what the other skips: with "step" a bad gradient must be bad before it is reduced
        policies = ("skip", "raise") if fault == "bad gradient" else ("step", "skip", "raise")
        replans = fault != "no data" and draw.random() < 0.5  # all ranks must call replan
        return cls(
            fault=fault,
            planner=draw.choice(list(PLANNERS)),
            memory=draw.choice((0.4, 0.5, 0.7)),
            policy=draw.choice(policies),
            victim=draw.randrange(RANKS),
            at=draw.randrange(_STEPS),
            replanned_at=draw.randrange(3, _STEPS) if replans else None,
        )


FAULTS = ("no data", "bad gradient", "bad loss", "no memory", "another batch")


def train(scenario: Scenario, rank: int, folder: Path) -> dict[str, Any]:
    """Train one replica, and return what it must have in common with the other."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=_PATIENCE / 2),
    )
    is_victim = rank == scenario.victim
    core = make_model()
    model = DistributedDataParallel(core)
    planner = PLANNERS[scenario.planner]()
    optimizer = BAOC(core, lr=3e-3, memory=scenario.memory, planner=planner, on_nonfinite=scenario.policy)
    errors: list[str] = []

    def step(number: int) -> None:
        backward(model, scenario, rank, number)
        try:
            optimizer.step()
            if number == scenario.replanned_at:
                optimizer.replan(0.35)
        except (PlanError, MemoryError, FloatingPointError) as error:
            errors.append(f"{number}: {type(error).__name__}: {_without_names(error)}")
        optimizer.zero_grad()

    if is_victim and scenario.fault == "no memory":
        conversion.allocated = _failing(conversion.allocated, scenario.at)
    if scenario.fault == "no data":
        with model.join():
            for number in range(scenario.at if is_victim else _STEPS):
                step(number)
        # a rank that has left does not update state any more, as with torch's own optimizers
        weights = b"".join(param.detach().numpy().tobytes() for param in core.parameters())
        return {"errors": errors, "weights": weights.hex()[:64], "finite": _is_finite(core)}
    for number in range(_STEPS):
        step(number)
    return {"errors": errors, "digest": digest(core, optimizer), "metrics": optimizer.metrics()["skipped_steps"]}


def backward(model: nn.Module, scenario: Scenario, rank: int, step: int) -> None:
    """Compute the gradients of a step, and damage those of the victim."""
    is_hit = rank == scenario.victim and step == scenario.at
    words = 60 * (2 if is_hit and scenario.fault == "another batch" else 1)
    batch = torch.randint(_WORDS, (words,), generator=torch.Generator().manual_seed(1000 * rank + step))
    loss = nn.functional.cross_entropy(model(batch), 7 * batch % _WORDS)
    (loss * (float("nan") if is_hit and scenario.fault == "bad loss" else 1.0)).backward()
    if is_hit and scenario.fault == "bad gradient":
        gradient = list(model.parameters())[step % 3].grad
        assert gradient is not None
        gradient.view(-1)[step] = float("inf")


def _failing(real: Callable[..., Any], at: int) -> Callable[..., Any]:
    calls = 0

    def allocated(*args: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise MemoryError("no memory is left")
        return real(*args, **settings)

    return allocated


def _without_names(error: Exception) -> str:
    """A rank names the parameters of its own bad gradients; the other rank cannot."""
    return str(error) if isinstance(error, PlanError) else "..."


def _is_finite(model: nn.Module) -> bool:
    return all(bool(param.isfinite().all()) for param in model.parameters())


def attempt(fault: str, draw: random.Random) -> str:
    """Run a scenario in forked processes and compare the ranks."""
    scenario = Scenario.drawn(fault, draw)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        children = {_forked(scenario, rank, folder) for rank in range(RANKS)}
        deadline = time.monotonic() + _PATIENCE
        while children and time.monotonic() < deadline:
            children -= {child for child in children if os.waitpid(child, os.WNOHANG)[0]}
            time.sleep(0.02)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert not children, f"{scenario}: {len(children)} ranks did not end within {_PATIENCE:.0f} s"
        failures = [(folder / f"error-{rank}") for rank in range(RANKS)]
        for file in failures:
            assert not file.exists(), f"{scenario}: {file.read_text()[-300:]}"
        first, second = (json.loads((folder / f"end-{rank}.json").read_text()) for rank in range(RANKS))
    if fault == "no data":
        assert first["weights"] == second["weights"], f"{scenario}: weights differ after join()"
        return "weights equal"
    assert first == second, f"{scenario}: ranks differ: {first} and {second}"
    return "same error" if first["errors"] else "replicas equal"


def _forked(scenario: Scenario, rank: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        (folder / f"end-{rank}.json").write_text(json.dumps(train(scenario, rank, folder)))
        dist.barrier()  # and no more: taking gloo down in a forked process has been seen to hang
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(0)


def run(times: int, seed: int = 0, names: list[str] | None = None) -> dict[str, Any]:
    """Try ``times`` scenarios."""
    os.environ["BAOC_QUIET"] = "1"
    torch.set_num_threads(1)
    model = make_model()
    BAOC(model, memory=0.5)  # late imports would be made in every rank
    return tried(times, seed, names or list(FAULTS), attempt)

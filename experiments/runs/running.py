"""A run that is under way: model, optimizer, schedule and what was seen, and its checkpoints."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import baoc
from experiments import methods, process
from experiments.methods import Method
from experiments.runs import ranks
from experiments.runs.cell import Cell
from experiments.tiny_gpt import cosine_with_warmup
from experiments.workloads import Batch, Workload

WEIGHT_DECAY = 0.1
CLIP = 1.0
_LR_WARMUP = 30
_PLAN_WARMUP = 50


@dataclass
class Record:
    """What was seen so far. Plain values: it travels in checkpoints."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    step_seconds: float = 0.0
    largest_state: int = 0
    peak: int | None = None
    resumed: int = 0

    @property
    def step(self) -> int:
        return len(self.losses)


class Running:
    """One run, from its first step to its last."""

    def __init__(self, cell: Cell, workload: Workload, method: Method, device: torch.device) -> None:
        self.cell, self.workload, self.device = cell, workload, device
        forget_peak(device)
        torch.manual_seed(cell.seed)  # dropout
        self.model: nn.Module = workload.build(seed=cell.seed, device=str(device))
        self.warmup = _share_of(cell.steps, _PLAN_WARMUP)
        settings = methods.Settings(
            weight_decay=WEIGHT_DECAY,
            steps=cell.steps,
            warmup=self.warmup,
            seed=cell.seed,
        )
        self.optimizer = method.build(self.model, cell.lr_factor * workload.lr, settings)
        self.called = ranks.averaging(self.model, device)
        self.schedule = cosine_with_warmup(self.optimizer, cell.steps, _share_of(cell.steps, _LR_WARMUP))
        self.record = Record()

    def advance(self, next_batch: Callable[[], Batch]) -> float:
        """One step; its loss. A loss that is not finite changes nothing but the record."""
        started = self._now()
        loss = self.workload.loss(self.called, ranks.part_of(next_batch()))
        value = ranks.mean(loss)
        if math.isfinite(value):
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            stepping = self._now()
            self.optimizer.step()
            self.record.step_seconds += self._now() - stepping
            self.schedule.step()
        self.record.seconds += self._now() - started
        self.record.losses.append(value)
        self._look()
        return value

    def _look(self) -> None:
        self.record.largest_state = max(self.record.largest_state, baoc.state_bytes(self.optimizer))
        peak = peak_bytes(self.device)
        self.record.peak = peak if self.record.peak is None else max(self.record.peak, peak or 0)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    # ---- checkpoints ----

    def save(self, folder: Path) -> None:
        """Replace the checkpoint; whoever is killed here leaves the last one behind."""
        content = {
            "key": self.cell.key,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "record": vars(self.record),
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / "checkpoint.tmp"
        torch.save(content, unfinished)
        os.replace(unfinished, checkpoint_in(folder))

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint. If this raises, the run is spoilt: begin another."""
        # Ours alone, and GaLore keeps objects in its state.
        content: dict[str, Any] = torch.load(checkpoint_in(folder), map_location=self.device, weights_only=False)
        if content["key"] != self.cell.key:
            raise ValueError(f"it is of the run {content['key']!r}")
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.schedule.load_state_dict(content["schedule"])
        self.record = Record(**content["record"])
        self.record.resumed += 1
        torch.set_rng_state(content["random"].cpu())
        if content["random_cuda"] is not None:
            torch.cuda.set_rng_state(content["random_cuda"].cpu(), self.device)


def checkpoint_in(folder: Path) -> Path:
    return folder / "checkpoint.pt"


def _share_of(steps: int, most: int) -> int:
    """A tenth of the run, but no more than is usual.

    >>> _share_of(300, 50), _share_of(3000, 50), _share_of(5, 50)
    (30, 50, 1)
    """
    return max(1, min(most, steps // 10))


# ---- peak memory: of the GPU where there is one, else of the whole process ----


def forget_peak(device: torch.device) -> None:
    """Forget the peaks of earlier runs."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # some containers forbid it; the peak is then that of all runs so far
        process.return_freed()  # else what is left of earlier runs counts in this one's peak
        process.forget_peak()


def peak_bytes(device: torch.device) -> int | None:
    """Bytes, if this machine can tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return process.peak_bytes()
    except OSError:
        return None


def peak_kind(device: torch.device) -> str | None:
    """What :func:`peak_bytes` counts."""
    if device.type == "cuda":
        return "torch.cuda.max_memory_allocated"
    return None if peak_bytes(device) is None else "VmHWM of the process"

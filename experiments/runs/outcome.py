"""What is written down of a run that has ended: times, bytes, the plan, and the scores."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch

import baoc
from experiments.runs.cell import Row
from experiments.runs.running import Running, peak_kind
from experiments.workloads import DatasetWorkload
from experiments.workloads.base import HeldOut

TRAIN_BATCHES = 64
"""How many training batches the train metric is taken on, unless fewer are asked for."""
_TAIL = 0.05  # of a run: its last losses are averaged
_SPLITS: tuple[HeldOut, ...] = ("validation", "test")


def outcome(running: Running, eval_batches: int | None) -> Row:
    return {**_measured(running), **_scores(running, eval_batches)}


def _measured(running: Running) -> Row:
    record, optimizer = running.record, running.optimizer
    shapes = {name: tuple(param.shape) for name, param in running.model.named_parameters() if param.requires_grad}
    return {
        "diverged_at": record.step if _has_diverged(running) else None,
        "train_loss": _train_loss(running),
        "curve": curve(record.losses),
        "seconds": record.seconds,
        "step_seconds": record.step_seconds / record.step,
        "state_bytes": baoc.state_bytes(optimizer),
        "largest_state_bytes": record.largest_state,
        "reference_bytes": baoc.Plan.uniform("adamw-16", shapes).state_bytes,
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "peak_bytes": record.peak,
        "peak_kind": peak_kind(running.device),
        "plan": _plan(optimizer.plan) if isinstance(optimizer, baoc.BlockOptimizer) else None,
        "resumed": record.resumed,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(running.device) if running.device.type == "cuda" else "cpu",
    }


def _plan(plan: baoc.Plan) -> dict[str, Any]:
    numel: dict[str, int] = {}
    for block in plan.blocks:
        numel[str(block.configuration)] = numel.get(str(block.configuration), 0) + block.numel
    total = sum(numel.values())
    return {
        "digest": digest(plan),
        "blocks": {block.name: str(block.configuration) for block in plan.blocks},
        "shares": {configuration: count / total for configuration, count in numel.items()},
        "expected_loss": plan.settings.get("expected_loss"),
    }


def digest(plan: baoc.Plan) -> str:
    """Return the same text for plans that give every parameter the same configuration and learning rate."""
    chosen = sorted(
        (name, str(block.configuration), block.lr_scale) for block in plan.blocks for name in block.parameters
    )
    return hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]


def _scores(running: Running, eval_batches: int | None) -> Row:
    """Loss and metric of each split. A diverged model is not evaluated."""
    if _has_diverged(running):
        missing = [f"{split}_{what}" for split in _SPLITS for what in ("loss", "metric")]
        return dict.fromkeys([*missing, "train_metric"])
    model, workload, metric = running.model, running.workload, running.workload.metric.name
    row: Row = {}
    for split in _SPLITS:
        scores = workload.evaluate(model, split, eval_batches)
        row |= {f"{split}_loss": _finite(scores["loss"]), f"{split}_metric": _finite(scores[metric])}
    if isinstance(workload, DatasetWorkload):  # its evaluation can do any split
        scores = workload.evaluate(model, cast(Any, "train"), min(eval_batches or TRAIN_BATCHES, TRAIN_BATCHES))
        return row | {"train_metric": _finite(scores[metric])}
    loss = _train_loss(running) or 0.0
    known = {"loss": loss, "perplexity": math.exp(min(loss, 700))}
    return row | {"train_metric": known.get(metric)}


def _has_diverged(running: Running) -> bool:
    return not math.isfinite(running.record.losses[-1])


def _train_loss(running: Running) -> float | None:
    """The mean of the last losses."""
    last = running.record.losses[-max(1, int(_TAIL * running.cell.steps)) :]
    return _finite(sum(last) / len(last))


def curve(losses: Sequence[float], parts: int = 20) -> list[float | None]:
    """Return the mean training loss of each part of a run.

    >>> curve([4.0, 2.0, 2.0, 1.0], parts=2)
    [3.0, 1.5]
    """
    bounds = [len(losses) * part // parts for part in range(parts + 1)]
    each = [losses[start:end] for start, end in pairwise(bounds) if end > start]
    return [_finite(round(sum(part) / len(part), 5)) for part in each]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

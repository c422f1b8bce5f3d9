"""What is known of a block before anything is swapped: the paper's metrics, and others that people go by."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from baoc.core.spec import DEFAULT_BETAS, Hyper
from baoc.planners.paper.metrics import Metrics
from baoc.planners.paper.statistics import StatisticsCollector
from experiments import methods
from experiments.ablation.catalog import Setting
from experiments.runs import RunOptions
from experiments.runs.running import WEIGHT_DECAY, Running
from experiments.runs.summary import REFERENCE
from experiments.runs.training import workload_of

WARMUP = 0.1
"""Share of a run after which the paper's BAOC plans."""

Values = dict[str, float]
"""By the metric's name."""


def of_blocks(setting: Setting, seed: int, options: RunOptions) -> dict[str, Values]:
    """The metrics of a setting's blocks after a warm-up with AdamW32."""
    workload = workload_of(setting.workload, options.workload)
    running = Running(setting.cell(REFERENCE, seed), workload, methods.get(REFERENCE), torch.device("cpu"))
    collector = StatisticsCollector(running.model, seed=seed).attach(running.optimizer)
    batches = workload.train_batches(seed=seed)
    for _ in range(max(2, round(WARMUP * setting.steps))):
        running.advance(lambda: next(batches))
    statistics, params = collector.statistics(), dict(running.model.named_parameters())
    hyper = Hyper(lr=setting.lr_factor * workload.lr, weight_decay=WEIGHT_DECAY)
    found = {}
    for name in setting.blocks:
        second = running.optimizer.state[params[name]]["exp_avg_sq"]
        found[name] = _papers(Metrics(statistics, [name], hyper)) | _others(name, second, collector.steps)
    return found


def kept(setting: Setting, seeds: Sequence[int], options: RunOptions, folder: Path) -> dict[str, Values]:
    """The means over seeds; what is in the folder is not measured again."""
    path = folder / "metrics.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for seed in seeds:
        key = setting.cell(REFERENCE, seed).key
        if {*setting.blocks} - {*known.get(key, {})}:
            known[key] = of_blocks(setting, seed, options)
            path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    by_seed = [known[setting.cell(REFERENCE, seed).key] for seed in seeds]
    return {
        block: {name: math.fsum(each[block][name] for each in by_seed) / len(seeds) for name in by_seed[0][block]}
        for block in setting.blocks
    }


def slim_snr(second: Tensor, dim: int) -> float:
    """SlimAdam's: squared mean over variance of the second moment along a dim, averaged over the other.

    >>> slim_snr(torch.tensor([[1.0, 3.0], [2.0, 4.0]]), dim=1)
    3.25
    """
    mean, variance = second.mean(dim), second.var(dim)
    return float((mean.square() / variance.clamp_min(torch.finfo(second.dtype).tiny)).mean())


def _papers(metrics: Metrics) -> Values:
    return {
        "anisotropy": metrics.anisotropy,
        "direction stability": metrics.direction_stability,
        "SNR": metrics.snr,
        "distortion": metrics.distortion,
        "structure residual": metrics.structure_residual or 0.0,
        "precision at 8 bits": metrics.precision(8),
    }


def _others(name: str, second: Tensor, steps: int) -> Values:
    layer = re.search(r"\.(\d+)\.", name)
    scaled = second.flatten(1).double() / second.max().clamp_min(torch.finfo(second.dtype).tiny)
    return {
        "SlimAdam's SNR along rows": slim_snr(scaled, 1),
        "SlimAdam's SNR along columns": slim_snr(scaled, 0),
        "gradient norm": math.sqrt(float(second.double().sum()) / (1 - DEFAULT_BETAS[1] ** steps)),
        "block size": float(second.numel()),
        "depth": float(layer[1]) if layer else 0.0,
    }

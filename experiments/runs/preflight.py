"""What an experiment needs and does not find, said before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from experiments.runs import ranks
from experiments.runs.cell import RunOptions
from experiments.runs.training import workload_of
from experiments.workloads import sources, weights
from experiments.workloads.family import FamilyWorkload


def missing(names: Iterable[str], options: RunOptions) -> list[str]:
    """Return one line for each GPU, folder of weights and dataset that cannot be had."""
    lines = [_device(options.device)]
    for name in names:
        workload = workload_of(name, options.workload)
        if isinstance(workload, FamilyWorkload):
            if workload.options.pretrained:
                lines.append(weights.absence(workload.options.pretrained))
            lines.append(sources.absence(name.partition("/")[2], options.workload))
        if workload.batch_size < ranks.world():
            lines.append(
                f"{name}: {workload.batch_size} examples in a batch are too few for {ranks.world()} processes."
            )
    return list(dict.fromkeys(line for line in lines if line))


def _device(device: str) -> str | None:
    if not device.startswith("cuda") or torch.cuda.is_available():
        return None
    return (
        "there is no GPU that torch can use. `--device cpu` trains without one, which takes weeks at this scale; "
        "`--scale small` takes minutes."
    )

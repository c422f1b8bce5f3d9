"""The paper's workloads, and small siblings of the same families that train in a minute or two on a CPU.

A workload is named ``size/dataset``. The sizes ``vit``, ``gpt2``, ``t5-base``, ``llama3.2-1b``, ``llama3.2-3b`` and
``unet`` are the paper's; ``vit-small``, ``gpt-small``, ``t5-small``, ``llama-small`` and ``unet-small`` are the
siblings. The datasets ``embedded`` (text) and ``digits`` (images) need no download. The paper does not say how long, in
what batches or at what learning rates it trains; those numbers are ours.

    python -m experiments workloads                  # what there is
    python -m experiments train gpt-small/embedded   # train one with AdamW

>>> workload = get("gpt-small/embedded", Options(batch_size=2))
>>> workload.metric
Metric(name='perplexity', higher_is_better=False)
"""

from experiments.workloads.base import (
    ACCURACY,
    LOSS,
    PERPLEXITY,
    Batch,
    Metric,
    Options,
    Workload,
    WorkloadError,
)
from experiments.workloads.dataset import DatasetWorkload
from experiments.workloads.registry import describe, entries, get, load, names

__all__ = [
    "ACCURACY",
    "LOSS",
    "PERPLEXITY",
    "Batch",
    "DatasetWorkload",
    "Metric",
    "Options",
    "Workload",
    "WorkloadError",
    "describe",
    "entries",
    "get",
    "load",
    "names",
]

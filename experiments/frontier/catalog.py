"""Which runs the frontier has: workloads, budgets, and everything that BAOC is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from experiments.runs import Cell

BUDGETS = (0.0, 0.01, 0.05, 0.13, 0.25, 0.5, 1.0)
"""Of AdamW16's state; 0: the cheapest plan there is."""
AUTOMATIC = "baoc@auto"
OURS = (*(f"baoc@{share:g}" for share in BUDGETS), AUTOMATIC)
PAPERS = tuple(f"baoc-paper@{share:g}" for share in (0.3, 0.4, 0.5, 1.0))
BY_TYPE = tuple(f"by-type@{share:g}" for share in (0.25, 0.5, 1.0))
UNIFORM = (
    *("muon-8 else adamw[m=int8,v=factored]", "spectral else adamw[m=int8,v=factored]"),
    *("spectral else colnorm else adamw-32", "muon-4 else adamw[m=int4,v=factored]"),
    *("adamw[m=int8,v=factored]", "adamw[m=int4,v=factored]", "adamw-8", "normuon-8 else adamw[m=int8,v=factored]"),
    *("lion-8", "sinkhorn else adamw-32", "colnorm else adamw-32"),
)
"""The most telling first. They run at AdamW32's learning rate, as BAOC does."""
PEERS = ("adamw8", "adafactor", "muon", "adam-mini", "cosmos", "galore-adamw8")
"""They run at their own."""
ORDER = (*OURS, *UNIFORM, *PEERS, *BY_TYPE, *PAPERS)
"""Of what is told, after AdamW32."""
TUNING_SEEDS = (0, 1)
"""AdamW32's learning rate is everybody's: one seed may choose it badly. Others seek theirs with the first."""


@dataclass(frozen=True)
class Setting:
    """A workload, and what BAOC is to reach on it."""

    workload: str
    steps: int
    batch_size: int | None = None
    targets: Mapping[float, float] = field(default_factory=dict, hash=False)
    """By budget: the difference to AdamW32's test loss in percent that it must not exceed."""

    def cell(self, method: str, seed: int, lr_factor: float) -> Cell:
        return Cell(self.workload, method, seed, lr_factor, self.steps)


_LANGUAGE = {0.25: -10.0, 0.13: -5.0, 0.05: 0.0, 0.01: 1.0}
_T5 = {0.25: -6.0, 0.13: -3.0, 0.05: 0.0, 0.01: 1.0}
_IMAGES = {1.0: 0.3, 0.5: 0.3, 0.25: 0.3, 0.05: 2.0}
_FINE_TUNING = {0.5: 0.1, 0.25: 0.3, 0.05: 2.0}

SETTINGS = (
    Setting("gpt-small/alpaca", 250, targets=_LANGUAGE),
    Setting("gpt-small/alpaca-gsm8k", 120, targets=_FINE_TUNING),
    Setting("vit-small/cifar10", 300, targets=_IMAGES),
    Setting("llama-small/gsm8k", 250, targets=_LANGUAGE),
    Setting("vit-small/cifar10-classes", 200, targets=_FINE_TUNING),
    Setting("t5-small/gsm8k", 150, targets=_T5),
    Setting("unet-small/cifar10", 80, batch_size=4, targets=_IMAGES),
)

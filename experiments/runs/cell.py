"""One training run: what identifies it, how it is run, and what is written down of it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments import workloads
from experiments.runs import ranks

Row = dict[str, Any]
"""What is known of a finished run: plain JSON values, the cell's own fields among them."""


class RunError(ValueError):
    """An experiment that cannot be run as it was asked for."""


@dataclass(frozen=True)
class Cell:
    """One run, whichever experiment asks for it.

    >>> cell = Cell("gpt-small/embedded", "baoc@0.5", seed=1, lr_factor=2.0, steps=300)
    >>> cell.key
    'gpt-small/embedded baoc@0.5 seed=1 lr=x2 steps=300'
    >>> cell.folder_name
    'gpt-small-embedded-baoc-0.5-seed-1-lr-x2-steps-300-71a013'
    """

    workload: str
    method: str
    seed: int
    lr_factor: float  # on the workload's lr for AdamW
    steps: int
    variant: str = ""
    """A setting of BAOC that is not the default, by its name in :mod:`experiments.runs.variants`."""

    @property
    def key(self) -> str:
        """The same text for the same run, today and tomorrow."""
        which = [self.workload, self.method, self.variant]
        how = [f"seed={self.seed}", f"lr=x{self.lr_factor:g}", f"steps={self.steps}"]
        return " ".join(filter(None, [*which, *how]))

    @property
    def folder_name(self) -> str:
        readable = re.sub(r"[^\w.]+", "-", self.key).strip("-.")[-120:]
        return f"{readable}-{hashlib.sha256(self.key.encode()).hexdigest()[:6]}"

    @property
    def fields(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RunOptions:
    """How cells are run, alike for all of them."""

    workload: workloads.Options = field(default_factory=workloads.Options)
    device: str = "cpu"
    eval_batches: int | None = None
    checkpoint_every: int = 100
    """Steps between checkpoints."""

    def __post_init__(self) -> None:
        for name in ("eval_batches", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RunError(f"{name} is {value}; it must be at least 1.")

    @property
    def settings(self) -> dict[str, Any]:
        """What runs must share to be compared. Where the data lies, or how often is saved, is no part of it."""
        chosen = self.workload
        return {
            "device": self.device.partition(":")[0],
            "bf16": chosen.bf16,
            "batch_size": chosen.batch_size,
            "length": chosen.length,
            "pretrained": chosen.pretrained and Path(chosen.pretrained).name,  # the folder's place is no part of it
            "eval_batches": self.eval_batches,
            **({"processes": ranks.world()} if ranks.world() > 1 else {}),
        }

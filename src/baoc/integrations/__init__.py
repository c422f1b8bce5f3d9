"""Support for training frameworks beyond the ``torch.optim.Optimizer`` contract.

Importing this package imports no framework. Each function imports its framework when you call it.
"""

from typing import Any

from baoc.integrations.common import (
    for_zero,
    spare_vectors,
    torchtitan_container,
    unwrap,
    unwrap_accelerate,
)
from baoc.integrations.trainers import ForTrainer, lightning_callback, log_metrics

__all__ = [
    "ForTrainer",
    "for_zero",
    "lightning_callback",
    "log_metrics",
    "spare_vectors",
    "torchtitan_container",
    "unwrap",
    "unwrap_accelerate",
]


def __getattr__(name: str) -> Any:
    # Axolotl imports its plugins by name. They subclass Axolotl's classes, so they exist only on request.
    if name in ("BAOCPlugin", "BAOCArgs"):
        from baoc.integrations import trainers

        return getattr(trainers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

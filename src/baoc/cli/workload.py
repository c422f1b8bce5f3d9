"""A workload of the user's: ``file.py:function`` that makes a model, its batches and its loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from baoc.models.packages import ModelError
from baoc.models.resolve import call_function, explained, importable
from baoc.plan import profile
from baoc.profiling.profile import Profile
from baoc.profiling.profiler import LossFunction


@dataclass(frozen=True)
class Workload:
    """What a warm-up needs."""

    model: nn.Module
    batches: Iterable[Any]
    loss: LossFunction
    path: Path

    def guarded_loss(self, model: Any, batch: Any) -> Tensor:
        """The loss; what fails in it is reported with its line."""
        with importable(self.path.parent), explained(f"the loss of {self.path} failed", self.path):
            return self.loss(model, batch)

    def profile(self, **options: Any) -> Profile:
        """:func:`baoc.profile`."""
        return profile(self.model, self.guarded_loss, self.batches, **options)


def is_workload(source: str) -> bool:
    """Whether this names a Python file.

    >>> is_workload("train.py:make"), is_workload("train.py"), is_workload("model.profile")
    (True, True, False)
    """
    return source.endswith(".py") or source.rpartition(":")[0].endswith(".py")


def load_workload(source: str) -> Workload:
    """Call the function, on the device that it chooses."""
    file, _, name = source.rpartition(":") if not source.endswith(".py") else (source, "", "")
    path = Path(file)
    result = call_function(path, name)
    if isinstance(result, (tuple, list)):
        parts = tuple(result)
    else:
        parts = tuple(getattr(result, part) for part in ("model", "batches", "loss") if hasattr(result, part))
    if len(parts) == 3 and isinstance(parts[0], nn.Module) and isinstance(parts[1], Iterable) and callable(parts[2]):
        return Workload(*parts, path=path)
    raise ModelError(
        f"{source} returned {_kind(result)}. It must return (model, batches, loss_fn), or an object with .model, "
        ".batches and .loss, where loss_fn(model, batch) is the loss."
    )


def _kind(result: object) -> str:
    if isinstance(result, (tuple, list)):
        return f"({', '.join(type(part).__name__ for part in result)})"
    return "None" if result is None else f"a {type(result).__name__}"

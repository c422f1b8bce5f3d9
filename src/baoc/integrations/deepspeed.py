"""DeepSpeed ZeRO: optimizers see flat partitions of all parameters, without names, rows or shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from baoc.core.configuration import Configuration, ConfigurationError, parse
from baoc.core.spec import Reach
from baoc.optim.optimizer import BlockOptimizer

_LIKE_A_MATRIX = (1 << 10, 1 << 10)


def for_zero(
    params: nn.Module | Iterable[Any], configuration: Configuration | str = "adamw-16", **settings: Any
) -> BlockOptimizer:
    """A client optimizer for ``deepspeed.initialize(optimizer=...)``, one configuration for all parameters.

    ZeRO cuts what it has glued together: a partition may begin in the middle of a matrix, and nothing says where. So a
    configuration must go by elements: one that looks at a whole matrix, at its rows and columns or at groups within
    rows is refused, by name, when the optimizer is built. Set ``"zero_allow_untested_optimizer": True`` in DeepSpeed's
    configuration.

    >>> for_zero(nn.Linear(64, 64), "adamw-16").plan.blocks[0].configuration.alias
    'adamw-16'
    >>> for_zero(nn.Linear(64, 64), "muon-8")
    Traceback (most recent call last):
    baoc.core.configuration.ConfigurationError: muon-8 needs whole matrices, which ZeRO's flat partitions do not have.
    Choose one that goes by elements, such as adamw-32, adamw-16, lion-16 or sgdwm-16; or shard the model with FSDP2,
    which keeps rows.
    """
    configuration = parse(configuration)
    needed = _needed(configuration)
    if needed is not None:
        raise ConfigurationError(
            f"{configuration.alias} needs {needed}, which ZeRO's flat partitions do not have.\nChoose one that goes by "
            "elements, such as adamw-32, adamw-16, lion-16 or sgdwm-16; or shard the model with FSDP2,\nwhich keeps "
            "rows."
        )
    if isinstance(params, nn.Module):  # names of parameters would not be those of partitions
        params = [param for param in params.parameters() if param.requires_grad]
    return BlockOptimizer(params, plan=configuration, **settings)


def _needed(configuration: Configuration) -> str | None:
    """What of a matrix a configuration looks at, or ``None``."""
    layout = configuration.layout(_LIKE_A_MATRIX)
    if layout.reach is Reach.MATRIX:
        return "whole matrices"
    if layout.reach is Reach.SUMS:
        return "sums over rows and columns"
    if any(stored.groups for stored in layout.formats):
        return "rows to share scales in (a vector's state would be bf16 instead)"
    return None

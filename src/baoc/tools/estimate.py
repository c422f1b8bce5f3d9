"""Estimate the optimizer state of a model under every configuration, from shapes alone.

>>> rows = estimate({"embed.weight": (50257, 768), "norm.weight": (768,)}, [parse("adamw-16"), parse("adafactor-32")])
>>> [(row.configuration.alias, row.state_bytes) for row in rows]
[('adamw-16', 154395648), ('adafactor-32', 207180)]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import is_lazy

from baoc.core.configuration import BUDGET_REFERENCE, CATALOG, Configuration, parse
from baoc.core.plan import Plan
from baoc.core.roles import Role, canonical_name
from baoc.core.spec import Shape, real_shape


class EstimateError(ValueError):
    """The model, or the selection of its tensors, has no state to estimate."""


@dataclass(frozen=True)
class Estimate:
    """The state of one configuration for all parameters.

    Attributes:
        configuration: The configuration.
        parameters: Number of parameters.
        state_bytes: Bytes of state on one process.
        state_bytes_per_rank: Bytes of state on the rank that holds the most.
        reference_bytes: Bytes of state of AdamW16 on one process.
    """

    configuration: Configuration
    parameters: int
    state_bytes: int
    state_bytes_per_rank: int
    reference_bytes: int

    @property
    def share_of_reference(self) -> float:
        """Bytes of state relative to AdamW16."""
        return self.state_bytes / self.reference_bytes

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of state per parameter."""
        return self.state_bytes / self.parameters


def estimate(
    shapes: Mapping[str, Shape],
    configurations: Iterable[Configuration | str] = CATALOG,
    *,
    roles: Mapping[str, Role] | None = None,
    world_size: int = 1,
) -> list[Estimate]:
    """Estimate the state of each configuration.

    A parameter that an update rule does not support counts with the fallback of that rule.

    Args:
        shapes: Shapes by parameter name.
        configurations: The configurations.
        roles: Roles by parameter name. The default is to derive them from names.
        world_size: Number of ranks. Parameters are sharded on dim 0, as FSDP2 does.

    Returns:
        One estimate for each configuration, in order.

    Raises:
        EstimateError: If ``world_size`` is not positive or there are no parameters.

    Example:
        >>> [row] = estimate({"weight": (1000, 512)}, ["adamw-16"], world_size=8)
        >>> row.state_bytes, row.state_bytes_per_rank
        (2048000, 256000)
        >>> row.share_of_reference, row.bytes_per_parameter
        (1.0, 4.0)
    """
    if world_size < 1:
        raise EstimateError(f"world_size must be at least 1, got {world_size}.")
    parameters = sum(math.prod(shape) for shape in shapes.values())
    if not parameters:
        raise EstimateError("there are no parameters to estimate: every tensor is excluded or empty.")
    reference_bytes = Plan.uniform(BUDGET_REFERENCE, shapes).state_bytes
    estimates = []
    for configuration in map(parse, configurations):
        plan = Plan.uniform(configuration, shapes, roles)
        on_a_rank = plan.sharded(world_size).state_bytes_per_rank
        estimates.append(Estimate(configuration, parameters, plan.state_bytes, on_a_rank, reference_bytes))
    return estimates


def trainable_shapes(model: nn.Module) -> dict[str, Shape]:
    """Return the shapes of the trainable parameters. Tied weights appear once, with their first name.

    Args:
        model: The model.

    Returns:
        Shapes by parameter name.

    Raises:
        EstimateError: If a module is lazy, or if there are no trainable parameters.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2).requires_grad_(False))
        >>> trainable_shapes(model)
        {'0.weight': (2, 3), '0.bias': (2,)}
    """
    shapes: dict[str, Shape] = {}
    for name, param in model.named_parameters():
        if is_lazy(param):
            raise EstimateError(f"{name!r} has no shape yet: it belongs to a lazy module. Run the model once first.")
        if param.requires_grad:
            shapes[canonical_name(name)] = real_shape(param)
    if not shapes:
        raise EstimateError(f"{type(model).__name__} has no trainable parameters: all have requires_grad=False.")
    return shapes


def split_excluded(shapes: Mapping[str, Shape], patterns: Sequence[str]) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Split tensors into those that remain and those that patterns exclude.

    Args:
        shapes: Shapes by parameter name.
        patterns: Patterns of names, such as ``*.bias``.

    Returns:
        The remaining and the excluded shapes.

    Raises:
        EstimateError: If a pattern matches no tensor.

    Example:
        >>> split_excluded({"norm.weight": (8,), "head.weight": (10, 8)}, ["norm.*"])
        ({'head.weight': (10, 8)}, {'norm.weight': (8,)})
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in shapes):
            close = get_close_matches(pattern, shapes, n=3, cutoff=0.0)
            raise EstimateError(f"no trainable tensor matches {pattern!r}. The closest names: {', '.join(close)}.")
    excluded = {name for name in shapes if any(fnmatchcase(name, pattern) for pattern in patterns)}
    return (
        {name: shape for name, shape in shapes.items() if name not in excluded},
        {name: shape for name, shape in shapes.items() if name in excluded},
    )

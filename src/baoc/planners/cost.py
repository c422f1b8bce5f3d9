"""Costs of configurations: bytes from layouts, and times estimated from the bytes and operations of an update.

Nothing is measured, so the same model has the same costs in every process and on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baoc.core import splits
from baoc.core.configuration import BUDGET_REFERENCE, Configuration
from baoc.core.roles import as_matrices
from baoc.core.spec import Reach, Shape
from baoc.core.splits import Split
from baoc.planners.model_facts import OPERATIONS_PER_BYTE

Blocks = Sequence[Mapping[str, Shape]]
"""Parameters of each block: shape by name."""

GPU_BYTES_UNFUSED = {"adafactor": 68}
"""Bytes per fp32 parameter that torch moves on a GPU for rules without a fused update, where every operation reads and
writes whole matrices. A test counts them."""
_FLOPS_PER_WEIGHT = 6  # of a training step, for each token: two in the forward pass, four in the backward


def memory(
    blocks: Blocks, configurations: Sequence[Configuration], rows: Mapping[str, int] = MappingProxyType({})
) -> NDArray[np.int64]:
    """Return the bytes of state of every block under every configuration.

    Args:
        blocks: parameters of each block.
        configurations: to compare.
        rows: for sharded parameters, how many rows one rank holds; then the bytes are those of that rank.

    Returns:
        Bytes, (blocks, configurations).

    Example:
        >>> from baoc.core.configuration import parse
        >>> memory([{"weight": (768, 768)}], [parse("adamw-16"), parse("adamw-8"), parse("sgd")])
        array([[2359296, 1184256,       0]])
    """
    found = [
        [sum(c.state_bytes(shape, rows=rows.get(name)) for name, shape in block.items()) for c in configurations]
        for block in blocks
    ]
    return np.array(found, dtype=np.int64).reshape(len(blocks), len(configurations))


def bytes_moved(shape: Shape, configuration: Configuration, param_bytes: int = 4, grad_bytes: int = 4) -> int:
    """Return the bytes that an update must move through memory at least.

    Parameters and state are read and written once, gradients are read once. Two kinds of rules need more. Rules that
    need a sum over the tensor before the first element moves read gradients again (Adafactor's step length: parameters
    and state too). Rules that balance gradients read them once per turn.

    Args:
        shape: of the tensor.
        configuration: its configuration.
        param_bytes: bytes of one element of the parameter.
        grad_bytes: bytes of one element of the gradient.

    Example:
        >>> from baoc.core.configuration import parse
        >>> [bytes_moved((1024, 1024), parse(name)) >> 20 for name in ("adamw-32", "adamw-16", "sgd")]
        [28, 20, 12]
        >>> bytes_moved((1024, 1024), parse("adamw-16"), param_bytes=2, grad_bytes=2) >> 20
        14
    """
    layout = configuration.layout(shape)
    turns = layout.mechanism.norms.count("col") or len(layout.mechanism.norms)
    again = turns or layout.mechanism.reach is Reach.SUMS
    absorbs = any(stored.reach is Reach.SUMS for stored in layout.formats)
    param_accesses, gradient_reads = 2 + (again and not turns), 1 + again + absorbs
    per_element = param_bytes * param_accesses + grad_bytes * gradient_reads
    return math.prod(shape) * per_element + (2 + again) * layout.nbytes


def operations(shape: Shape, configuration: Configuration, device: str = "cpu", split: Split | None = None) -> int:
    """Return the operations of an update's matrix products. Elementwise work is hidden behind the bytes it moves.

    Args:
        shape: of the tensor.
        configuration: its configuration.
        device: the type of the device.
        split: how it is split into matrices, if it is.

    Example:
        >>> from baoc.core.configuration import parse
        >>> fused, split = operations((768, 2304), parse("muon-8")), Split((768, 768, 768), dim=1)
        >>> operations((768, 2304), parse("muon-8"), split=split) == 3 * operations((768, 768), parse("muon-8")) > fused
        True
    """
    mechanism = configuration.layout(shape).mechanism
    if mechanism.reach is not Reach.MATRIX:
        return 0
    matrices, rows, cols = as_matrices(shape)
    return matrices * splits.operations(mechanism, split, rows, cols, device)


def update_ratios(blocks: Blocks, configurations: Sequence[Configuration]) -> NDArray[np.float64]:
    """The paper's r_(i,c) (Sec. 3.1): each block's update time relative to AdamW16's, as torch runs them on a GPU.

    Bytes take the time there: one pass over memory where a fused kernel exists, :data:`GPU_BYTES_UNFUSED` where
    none is.

    >>> from baoc.core.configuration import parse
    >>> update_ratios([{"weight": (768, 768)}], [parse("adamw-8"), parse("adafactor")]).round(2).tolist()
    [[0.8, 3.4]]
    """
    moved = _each(blocks, (*configurations, BUDGET_REFERENCE), _moved_by_torch)
    unit = moved[:, -1:]
    # an empty block costs what AdamW16 costs it: it must not make room for slower ones
    return np.divide(moved[:, :-1], unit, out=np.ones_like(moved[:, :-1]), where=unit > 0)


def _moved_by_torch(shape: Shape, configuration: Configuration) -> int:
    unfused = GPU_BYTES_UNFUSED.get(configuration.mechanism_name)
    return bytes_moved(shape, configuration) if unfused is None else unfused * math.prod(shape)


class StepTimes(NamedTuple):
    """Times of a training step, in units of one with AdamW16: ``base`` plus one entry of ``updates`` per tensor."""

    base: float
    """Of the forward and the backward pass."""
    updates: NDArray[np.float64]  # (tensors, configurations)


def step_times(
    shapes: Sequence[Shape],
    counts: Sequence[int],
    configurations: Sequence[Configuration],
    tokens: int,
    operations_per_byte: float = OPERATIONS_PER_BYTE["cpu"],
    device: str = "cpu",
    split: Sequence[Split | None] | None = None,
) -> StepTimes:
    """Estimate how long a training step takes, relative to one with AdamW16.

    A step of ``tokens`` tokens computes six operations for each of them and every weight.

    Args:
        shapes: of the tensors; equal ones may be given once.
        counts: how many tensors have each shape.
        configurations: to estimate.
        tokens: that pass through a weight in one step.
        operations_per_byte: what the device computes while it moves one byte.
        device: its type.
        split: how the tensors of each shape are split into matrices.

    Returns:
        The time of the passes, and of the update of one tensor of each shape under each configuration.

    Example:
        >>> from baoc.core.configuration import parse
        >>> times = step_times([(768, 768)], [1], [parse("adamw-16"), parse("muon-8")], tokens=4096)
        >>> (times.base + times.updates).round(2).tolist()
        [[1.0, 1.7]]
    """
    chosen = (*configurations, BUDGET_REFERENCE)
    blocks = [{"": shape} for shape in shapes]
    cuts = split or [None] * len(shapes)
    products = [[operations(shape, each, device, cut) for each in chosen] for shape, cut in zip(shapes, cuts)]
    update = operations_per_byte * _each(blocks, chosen, bytes_moved)
    update += np.array(products, dtype=np.float64).reshape(update.shape)
    weights = sum(count * math.prod(shape) for shape, count in zip(shapes, counts))
    computed = float(_FLOPS_PER_WEIGHT * tokens * weights)
    whole = max(1.0, computed + float(update[:, -1] @ np.asarray(counts, dtype=np.float64)))
    return StepTimes(computed / whole, update[:, :-1] / whole)


def _each(
    blocks: Blocks, configurations: Sequence[Configuration], cost: Callable[[Shape, Configuration], int]
) -> NDArray[np.float64]:
    rows = [[sum(cost(shape, c) for shape in block.values()) for c in configurations] for block in blocks]
    return np.array(rows, dtype=np.float64).reshape(len(blocks), len(configurations))

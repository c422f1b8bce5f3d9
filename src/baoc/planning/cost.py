"""What a configuration costs a block: bytes from layouts, time from the bytes and operations of an update.

Nothing is timed: the same model has the same costs in every process, on every rank and under any load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from baoc.core.configuration import REFERENCE, Configuration
from baoc.core.roles import as_matrices
from baoc.core.spec import Reach, Shape
from baoc.profiling.facts import OPERATIONS_PER_BYTE

Blocks = Sequence[Mapping[str, Shape]]
"""Each block's parameters: name -> shape."""

UNFUSED = {"adafactor": 68}
"""Bytes per fp32 parameter that torch moves on a GPU where it has no fused update: its operations run one by one, and
each reads and writes whole matrices. A test counts them again."""
_FLOPS_PER_WEIGHT = 6  # of a training step, for each token: two in the forward pass, four in the backward


def memory(
    blocks: Blocks, configurations: Sequence[Configuration], rows: Mapping[str, int] = MappingProxyType({})
) -> NDArray[np.int64]:
    """Bytes of every block under every configuration: (blocks, configurations).

    ``rows`` are those that one rank has of parameters that are sharded, where its bytes are asked for.

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
    """What an update must move through memory at the least; of fp32 parameters and gradients, if nothing else is said.

    Every parameter is read and written once, every gradient read once, all state read and written once. Two kinds of
    update need more: sums that must be there before the first element moves, for which gradients are read once more
    (Adafactor's step length: parameters and state too), and balanced gradients, which are read for every turn.

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


def operations(shape: Shape, configuration: Configuration) -> int:
    """Of an update's products of matrices; what is done element by element is hidden behind the bytes it moves."""
    mechanism = configuration.layout(shape).mechanism
    if mechanism.reach is not Reach.MATRIX:
        return 0
    matrices, rows, cols = as_matrices(shape)
    return matrices * mechanism.operations(rows, cols)


def update_ratios(blocks: Blocks, configurations: Sequence[Configuration]) -> NDArray[np.float64]:
    """The paper's r_(i,c) (Sec. 3.1): each block's update time relative to AdamW16's, as torch runs them on a GPU.

    Bytes are what takes time there: one pass over memory where a fused kernel is to be had, and :data:`UNFUSED`
    where none is.

    >>> from baoc.core.configuration import parse
    >>> update_ratios([{"weight": (768, 768)}], [parse("adamw-8"), parse("adafactor")]).round(2).tolist()
    [[0.8, 3.4]]
    """
    moved = _each(blocks, (*configurations, REFERENCE), _moved_by_torch)
    unit = moved[:, -1:]
    # an empty block costs what AdamW16 costs it: it must not make room for slower ones
    return np.divide(moved[:, :-1], unit, out=np.ones_like(moved[:, :-1]), where=unit > 0)


def _moved_by_torch(shape: Shape, configuration: Configuration) -> int:
    unfused = UNFUSED.get(configuration.mechanism_name)
    return bytes_moved(shape, configuration) if unfused is None else unfused * math.prod(shape)


def step_ratios(
    blocks: Blocks,
    configurations: Sequence[Configuration],
    tokens: int,
    operations_per_byte: float = OPERATIONS_PER_BYTE["cpu"],
) -> NDArray[np.float64]:
    """Shares of a whole training step, with AdamW16's as one: the mean over blocks is how much longer a step becomes.

    A step of ``tokens`` tokens computes six operations for each of them and every weight; ``operations_per_byte`` is
    what the device computes while it moves one byte.

    >>> from baoc.core.configuration import parse
    >>> step_ratios([{"weight": (768, 768)}], [parse("adamw-16"), parse("muon-8")], tokens=4096).round(2).tolist()
    [[1.0, 1.93]]
    """
    chosen = (*configurations, REFERENCE)
    update = operations_per_byte * _each(blocks, chosen, bytes_moved) + _each(blocks, chosen, operations)
    weights = sum(math.prod(shape) for block in blocks for shape in block.values())
    computed = _FLOPS_PER_WEIGHT * tokens * weights / max(1, len(blocks))
    whole = computed * len(blocks) + update[:, -1].sum()
    ratios: NDArray[np.float64] = (computed + update[:, :-1]) * len(blocks) / max(1.0, whole)
    return ratios


def _each(
    blocks: Blocks, configurations: Sequence[Configuration], cost: Callable[[Shape, Configuration], int]
) -> NDArray[np.float64]:
    rows = [[sum(cost(shape, c) for shape in block.values()) for c in configurations] for block in blocks]
    return np.array(rows, dtype=np.float64).reshape(len(blocks), len(configurations))

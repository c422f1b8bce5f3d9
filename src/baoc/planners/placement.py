"""Placement of state: on the device, or in host memory, from where it must be copied."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from baoc.core.configuration import Configuration
from baoc.core.plan import Block, Plan
from baoc.core.spec import SMALL_NUMEL, Reach, Shape

WIDTH = 2
"""Default bytes of an element of parameters and gradients: those of bf16."""
DIRECTION_WIDTH = 4
"""Bytes of an element of a direction that is copied to the device to be finished there."""
_DIVISIONS = 8  # that are tried


class NoRoom(ValueError):
    """State that cannot be divided between two budgets without cutting a tensor."""

    def __init__(self, lacking: int) -> None:
        super().__init__(f"{lacking} bytes find no room")
        self.lacking = lacking


class Traffic(NamedTuple):
    """Bytes of a step that are copied to the host, and up to the device."""

    down: int
    up: int


def traffic(configuration: Configuration, shape: Shape, weights: int = WIDTH, gradients: int = WIDTH) -> Traffic:
    """Return what one step copies for a parameter whose state is in host memory.

    The gradient is copied down; the parameter is copied down and up. If matrix products follow, the direction is copied
    up to the device instead of the parameter.

    Args:
        configuration: of the parameter.
        shape: of the parameter.
        weights: bytes of an element of the parameter.
        gradients: bytes of an element of the gradient.

    Example:
        >>> from baoc.core.configuration import parse
        >>> traffic(parse("adamw-8"), (64, 64)), traffic(parse("muon-8"), (64, 64)), traffic(parse("sgd"), (64, 64))
        (Traffic(down=16384, up=8192), Traffic(down=8192, up=16384), Traffic(down=0, up=0))
    """
    layout, numel = configuration.layout(shape), math.prod(shape)
    if not layout.formats:
        return Traffic(0, 0)
    if layout.reach is Reach.MATRIX and layout.mechanism.decoupled:
        return Traffic(gradients * numel, DIRECTION_WIDTH * numel)
    return Traffic((gradients + weights) * numel, weights * numel)


def plan_traffic(plan: Plan, weights: int = WIDTH, gradients: int = WIDTH) -> Traffic:
    """Return what one step of a plan copies."""
    each = [
        traffic(block.configuration, shape, weights, gradients)
        for block in plan.blocks
        for shape in block.parameters.values()
        if block.host
    ]
    return Traffic(sum(one.down for one in each), sum(one.up for one in each))


def divided(plan_for: Callable[[int], Plan], device: int, host: int, rows: Mapping[str, int]) -> Plan:
    """Return the plan for the sum of two budgets, divided between them by :func:`placed`.

    Tensors are not split, so the plan for the sum may not fit. Then it is made again for the bytes that did fit, a few
    times, and finally for the larger of the two budgets, which always fits.

    Args:
        plan_for: returns the plan for a budget in bytes.
        device: budget of the device.
        host: budget of the host.
        rows: for sharded parameters, the rows that one rank holds.
    """
    largest, total = max(device, host), device + host
    for left in reversed(range(_DIVISIONS)):
        plan = plan_for(total)
        try:
            return placed(plan, device, host, rows)
        except NoRoom as error:
            found_room = replace(plan, rows=rows).state_bytes_per_rank - error.lacking
            total = max(largest, found_room) if left > 1 else largest
    raise AssertionError("a plan for one budget did not fit it")


def placed(plan: Plan, device: int, host: int, rows: Mapping[str, int] = MappingProxyType({})) -> Plan:
    """Return the same plan with state divided between the device and host memory.

    Tensors with the most state per copied byte are offloaded first, and small tensors last because their copies are
    bound by latency. Then tensors that need not be offloaded are taken back, those that copy most first. So, apart from
    small tensors, a step copies at most one tensor more than it must. Tensors are not split, but blocks are.

    Args:
        plan: to divide.
        device: bytes of state that the device may hold.
        host: bytes of state that host memory may hold.
        rows: for sharded parameters, the rows that one rank holds; then its bytes count.

    Raises:
        NoRoom: this order leaves bytes that fit in neither.

    >>> plan = Plan.uniform("adamw-8", {"wte.weight": (512, 64), "h.weight": (64, 64), "h.bias": (64,)})
    >>> print(placed(plan, device=9_000, host=70_000))
    block  tensors  params  configuration      state  lr
    -----  -------  ------  -------------  ---------  --
    all          2    4160  adamw-8         8.6 KiB    -
    all'         1   32.8K  adamw-8        65.0 KiB*   -
    73.6 KiB of state, 51.0% of AdamW16's 144.5 KiB; *65.0 KiB in host memory
    """
    tensors = list(_tensors(plan, rows))
    needed = sum(tensor.state for tensor in tensors) - device
    chosen: list[_Tensor] = []
    held = 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.is_small, tensor.moved / tensor.state)):
        if held < needed and held + tensor.state <= host:
            chosen.append(tensor)
            held += tensor.state
    if held < needed:
        raise NoRoom(needed - held)
    offloaded = {tensor.name for tensor in chosen}
    for tensor in sorted(chosen, key=lambda tensor: -tensor.moved):
        if held - tensor.state >= needed:
            offloaded.discard(tensor.name)
            held -= tensor.state
    return replace(plan, blocks=tuple(part for block in plan.blocks for part in _divided(block, offloaded)))


class _Tensor(NamedTuple):
    name: str
    state: int  # bytes
    moved: int
    is_small: bool


def _tensors(plan: Plan, rows: Mapping[str, int]) -> Iterator[_Tensor]:
    """Yield the tensors that have state."""
    for block in plan.blocks:
        for name, shape in block.parameters.items():
            state = block.configuration.state_bytes(shape, rows=rows.get(name))
            if state:
                moved = sum(traffic(block.configuration, shape))
                yield _Tensor(name, state, moved, math.prod(shape) < SMALL_NUMEL)


def _divided(block: Block, offloaded: Set[str]) -> Iterator[Block]:
    """Yield a block, or its parts on the device and on the host, each with its share of the risk."""
    there = {name: shape for name, shape in block.parameters.items() if name in offloaded}
    here = {name: shape for name, shape in block.parameters.items() if name not in offloaded}
    if not there or not here:
        yield replace(block, host=bool(there))
        return
    for name, parameters, host in ((block.name, here, False), (f"{block.name}'", there, True)):
        part = replace(block, name=name, parameters=parameters, host=host)
        yield replace(part, risk={term: value * part.numel / block.numel for term, value in block.risk.items()})

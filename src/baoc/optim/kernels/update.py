"""One parameter's update, written once. The eager kernel runs it tile by tile; the compiled one on whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from baoc.core.configuration import StoredSlot
from baoc.core.spec import Mechanism, Rounding, Scalar, Scalars, WholeCodec

State = Mapping[str, Any]
Phases = Mapping[str, "int | Tensor"]  # rounding phase of each slot at this step


class Job(NamedTuple):
    """Everything that one parameter's step needs. Tensors are real-valued, with at least one dim."""

    mechanism: Mechanism
    slots: tuple[StoredSlot, ...]
    param: Tensor
    grad: Tensor
    state: State  # by the keys of the layout; may hold more
    scalars: Mapping[str, float]
    phases: Mapping[str, int]
    maximize: bool = False


def update(
    mechanism: Mechanism,
    stored: tuple[StoredSlot, ...],
    param: Tensor,
    grad: Tensor,
    state: State,
    scalars: Scalars,
    phases: Phases,
    maximize: bool,
    tiles: Sequence[slice],
) -> None:
    """Advance the state and the parameter in place, touching one tile of rows (dim 0) at a time."""
    tile = _Tiles(mechanism, stored, param, grad, state, scalars, phases, maximize)
    for each in stored:
        if isinstance(each.codec, WholeCodec):
            tile.absorb(each, each.codec, tiles)
    step: Scalar = scalars["step"]
    if mechanism.normalizes:
        step = step * tile.step_factor(tiles)
    for rows in tiles:
        grad_rows = tile.grad(rows)
        slots = tile.advanced(rows, grad_rows)
        direction = mechanism.direction(grad_rows, slots, scalars)
        tile.store(rows, grad_rows, slots)
        target = param[rows]
        wide = target if target.dtype in (torch.float32, torch.float64) else target.float()
        target.copy_(wide * scalars["shrink"] - direction * step)


class _Tiles:
    """Reads and writes the rows of one parameter, its gradient and its state."""

    def __init__(
        self,
        mechanism: Mechanism,
        stored: tuple[StoredSlot, ...],
        param: Tensor,
        grad: Tensor,
        state: State,
        scalars: Scalars,
        phases: Phases,
        maximize: bool,
    ) -> None:
        self._mechanism = mechanism
        self._stored = stored
        self._param = param
        self._grad = grad
        self._buffers = {each.slot.name: buffers_of(each, state) for each in stored}
        self._scalars = scalars
        self._phases = phases
        self._maximize = maximize

    def grad(self, rows: slice) -> Tensor:
        """fp32 gradient to descend on, with L2 decay if the mechanism's decay is coupled."""
        grad = self._grad[rows].float()
        grad = -grad if self._maximize else grad
        if self._mechanism.decoupled:
            return grad
        return grad + self._param[rows].float() * self._scalars["coupled_decay"]

    def absorb(self, stored: StoredSlot, codec: WholeCodec, tiles: Sequence[slice]) -> None:
        name = stored.slot.name
        keep, add = self._scalars[f"{name}.keep"], self._scalars[f"{name}.add"]
        rounding = Rounding(self._phases[name])
        partial = None
        for rows in tiles:
            observed = self._mechanism.observe(name, self.grad(rows))
            partial = codec.absorb(self._buffers[name], rows, observed, keep, add, rounding, partial)
        codec.finish(self._buffers[name], keep, add, rounding, partial)

    def advanced(self, rows: slice, grad: Tensor) -> dict[str, Tensor]:
        """Every slot's new value, before it is rounded into its codec."""
        slots = {}
        for stored in self._stored:
            name = stored.slot.name
            if isinstance(stored.codec, WholeCodec):  # has absorbed the gradient already
                slots[name] = stored.codec.expand(self._buffers[name], rows, self._scalars[f"{name}.mean_floor"])
            else:
                value = stored.codec.decode(self._buffers[name], rows)
                observed = self._mechanism.observe(name, grad)
                slots[name] = value * self._scalars[f"{name}.keep"] + observed * self._scalars[f"{name}.add"]
        return slots

    def store(self, rows: slice, grad: Tensor, slots: Mapping[str, Tensor]) -> None:
        for stored in self._stored:
            if stored.codec.pointwise:
                rounding = self._rounding(stored, grad, slots)
                stored.codec.encode(self._buffers[stored.slot.name], rows, slots[stored.slot.name], rounding)

    def _rounding(self, stored: StoredSlot, grad: Tensor, slots: Mapping[str, Tensor]) -> Rounding:
        """Dithered; but an element without gradient must not move further than exact state would let it.

        Its momentum is rounded down, and its second moment up for as long as there is momentum to divide.
        """
        phase = self._phases[stored.slot.name]
        if stored.codec.bits == 32:
            return Rounding(phase)
        idle = grad == 0
        if stored.slot.signed:
            return Rounding(phase, toward_zero=idle)
        if "m" in slots:
            return Rounding(phase, away_from_zero=idle & (slots["m"] != 0))
        return Rounding(phase)

    def step_factor(self, tiles: Sequence[slice]) -> Tensor:
        """From the RMS of the whole direction and of the parameter, before either has changed."""
        squares = torch.zeros(2, device=self._param.device)
        for rows in tiles:
            grad = self.grad(rows)
            direction = self._mechanism.direction(grad, self.advanced(rows, grad), self._scalars)
            param = self._param[rows].float()
            squares = squares + torch.stack((direction.square().sum(), param.square().sum()))
        direction_rms, param_rms = (squares / self._param.numel()).sqrt()
        return self._mechanism.step_factor(direction_rms, param_rms, self._scalars)


def buffers_of(stored: StoredSlot, state: State) -> dict[str, Tensor]:
    """A slot's buffers under its codec's own names, with at least one dim."""
    found = {name: state[stored.key(name)] for name in stored.buffer_names}
    return {name: tensor if tensor.dim() else tensor.view(1) for name, tensor in found.items()}


def row_tiles(shape: torch.Size | Sequence[int], tile_numel: int) -> list[slice]:
    """Cut dim 0 into slices of at most ``tile_numel`` elements, or one row.

    >>> row_tiles((5, 10), 20)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    rows = shape[0]
    row_numel = max(1, torch.Size(shape[1:]).numel())
    height = max(1, tile_numel // row_numel)
    return [slice(start, min(start + height, rows)) for start in range(0, rows, height)]

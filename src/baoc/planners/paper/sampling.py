"""Sparse gradient streams: a few fixed coordinates of every parameter, followed through the warm-up (Sec. 3.1, Eq. 3).

The sampler keeps its own moments of these coordinates, so its results do not depend on the optimizer of the warm-up.
All streams of a device are stored in a few tensors: a step is one gather per parameter, a few operations over all
streams, and one number for the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baoc.core.codecs import BF16Format, FP32Format
from baoc.core.rounding import Rounding, rounding_phase
from baoc.core.sharding import Ranks, local, shard_of
from baoc.core.spec import DEFAULT_BETAS, Shape, Slot, real_shape
from baoc.planners.paper.coordinates import FLOOR, RATIO, Coordinates, draw, strata_places

HISTORY = 64
"""Steps whose dots and squares are kept. Older ones would have a weight below 0.2% in the direction stability."""
_SETTINGS = ("ratio", "floor", "seed", "betas", "codec")
_FORMATS = {"bf16": BF16Format, "fp32": FP32Format}
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_MOMENT = Slot("moment", signed=True)
_SLOTS = ("first", "second", "previous")
_TILE = 1 << 15  # elements that fit in a core's cache and run on one thread


@dataclass(frozen=True)
class Stream:
    """The sampled gradients of one tensor, as fp32."""

    coordinates: Coordinates
    first: Tensor  # (count,) EMA of g, not yet divided by its mass
    second: Tensor  # (count,) EMA of g * g
    previous: Tensor  # (count,)
    dots: Tensor  # (steps,) <g_t, g_t-1>, of the last HISTORY steps at most
    squares: Tensor  # (steps,) |g_t|^2, likewise


class Sampler:
    """Samples the gradients of named parameters at fixed coordinates.

    Args:
        params: parameters by name.
        ratio: share of each tensor's coordinates.
        floor: sample at least this many coordinates of a tensor, or all.
        seed: of the choice of coordinates.
        betas: decay of the moments (Eq. 3).
        codec: how moments are stored: ``"bf16"`` with stochastic rounding, or ``"fp32"``.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(100, 100))
        >>> sampler = Sampler({"weight": weight}, seed=0)
        >>> weight.grad = torch.ones(100, 100)
        >>> sampler.observe({"weight": weight})
        True
        >>> sampler.steps, sampler.streams["weight"].coordinates.count
        (1, 256)
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        *,
        ratio: float = RATIO,
        floor: int = FLOOR,
        seed: int = 0,
        betas: tuple[float, float] = DEFAULT_BETAS,
        codec: str = "bf16",
    ) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(
                f"the sampling ratio is {ratio}; it must be above 0 and at most 1 (the paper's is {RATIO})."
            )
        if codec not in _FORMATS:
            raise ValueError(f"samples cannot be stored as {codec!r}. Choose one of {', '.join(_FORMATS)}.")
        self.ratio, self.floor, self.seed, self.betas, self.codec = ratio, floor, seed, betas, codec
        self.steps = 0
        self.skipped = 0
        generator = torch.Generator("cpu").manual_seed(seed)
        drawn = {name: draw(real_shape(param), generator, ratio, floor) for name, param in params.items()}
        devices = dict.fromkeys(param.device for param in params.values())
        self._parts = [
            _Part({name: drawn[name] for name, param in params.items() if param.device == device}, device, codec)
            for device in devices
        ]
        self._names = tuple(params)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sampled parameters."""
        return self._names

    @property
    def nbytes(self) -> int:
        """Bytes that the sampler holds."""
        return sum(part.nbytes for part in self._parts)

    @property
    def streams(self) -> dict[str, Stream]:
        """All streams by name, in the order of the parameters."""
        streams = {name: stream for part in self._parts for name, stream in part.streams(self.steps).items()}
        return {name: streams[name] for name in self._names}

    @torch.no_grad()
    def observe(self, params: Mapping[str, Tensor]) -> bool:
        """Sample the gradients of a step.

        Returns:
            Whether they are finite. If not, the step is skipped and counted in :attr:`skipped`.
        """
        taken = [part.gather(params, lambda param: param.grad) for part in self._parts]
        sums = [part.dots_and_squares(grad) for part, grad in zip(self._parts, taken)]
        # a square that overflows fp32 would stay in the second moment for good
        if not all(bool(both.isfinite().all()) for both in sums):
            self.skipped += 1
            return False
        for part, grad, both in zip(self._parts, taken, sums):
            part.absorb(grad, both, self.steps, self.betas)
        self.steps += 1
        return True

    @torch.no_grad()
    def values(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters at the sampled coordinates, as fp32."""
        found: dict[str, Tensor] = {}
        for part in self._parts:
            found |= part.by_name(part.gather(params, lambda param: param.detach()))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return plain values and the live tensors. The seed draws the coordinates again, so they are not in it.

        Parameters go by their positions, since their names may differ in the run that loads it.
        """
        position = {name: index for index, name in enumerate(self._names)}
        return {
            **{name: getattr(self, name) for name in _SETTINGS},
            "steps": self.steps,
            "skipped": self.skipped,
            "parts": [{**part.state_dict(), "names": [position[name] for name in part.counts]} for part in self._parts],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], params: Mapping[str, Tensor]) -> Sampler:
        """Go on where another sampler stopped, on whichever devices the parameters are now.

        Args:
            state: of another sampler; without its tensors, sampling starts anew.
            params: the same parameters in the same order.

        Raises:
            ValueError: the state is damaged.
        """
        for name in ("steps", "skipped"):
            if type(state[name]) is not int or state[name] < 0:
                raise ValueError(f"{name} of the samples is {state[name]!r}")
        betas = tuple(state["betas"])
        if len(betas) != 2 or not all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas of the samples are {betas!r}")
        sampler = cls(params, **{**{name: state[name] for name in _SETTINGS}, "betas": betas})
        names = list(params)
        if sorted(index for part in state["parts"] for index in part["names"]) != list(range(len(names))):
            raise ValueError(f"the samples are of other parameters than the {len(names)} that are planned")
        if any(part[slot] is None for part in state["parts"] for slot in (*_SLOTS, "history")):
            return sampler
        sampler.steps, sampler.skipped = state["steps"], state["skipped"]
        counts = {name: count for part in sampler._parts for name, count in part.counts.items()}
        saved: dict[str, dict[str, Tensor]] = {}
        for part in state["parts"]:
            _check_tensors(part, _DTYPES[sampler.codec])
            mine = [names[index] for index in part["names"]]
            pieces = [part[slot].split([counts[name] for name in mine]) for slot in _SLOTS]
            for name, *piece in zip(mine, *pieces, part["history"].unbind(-1)):
                saved[name] = dict(zip((*_SLOTS, "history"), piece))
        for own in sampler._parts:
            own.load(saved)
        return sampler


def _check_tensors(part: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Raise if tensors from outside are not what a sampler holds."""
    for key in (*_SLOTS, "history"):
        held, wanted = part[key], torch.float32 if key == "history" else dtype
        if not isinstance(held, Tensor) or held.dtype is not wanted or not bool(held.isfinite().all()):
            raise ValueError(f"{key!r} of the samples is not a tensor of finite {wanted} numbers")
    if part["history"].shape[:2] != (2, HISTORY):
        raise ValueError(f"the history of the samples is not of {HISTORY} steps")
    if bool((part["second"] < 0).any()):
        raise ValueError("a mean of squares in the samples is negative")


@dataclass(frozen=True)
class _Shared(Rounding):
    """Stochastic rounding with one noise for both moments of a tile."""

    made: Tensor | None = None

    @classmethod
    def at(cls, step: int, rows: slice, device: torch.device) -> _Shared:
        phase = rounding_phase(step, 0)
        return cls(phase, made=Rounding(phase).noise(rows.start, (rows.stop - rows.start,), device))

    def noise(self, first_row: int, shape: Shape, device: torch.device) -> Tensor:
        assert self.made is not None and self.made.shape == shape
        return self.made


class _Part:
    """The streams of one device, one after the other in each tensor."""

    def __init__(self, coordinates: Mapping[str, Coordinates], device: torch.device, codec: str) -> None:
        self.device = device
        self._coordinates = dict(coordinates)
        self._size = sum(self.counts.values())
        self._format = _FORMATS[codec](_MOMENT, (self._size,))
        [buffer] = self._format.buffers
        self._slots = {slot: torch.zeros(buffer.shape, dtype=buffer.dtype, device=device) for slot in _SLOTS}
        self._history = torch.zeros(2, HISTORY, len(coordinates), dtype=torch.float32, device=device)
        self._lengths = torch.tensor(list(self.counts.values()), device=device)
        axes = [axis for each in coordinates.values() for axis in each.axes]
        starts = itertools.accumulate((axis.count for axis in axes), initial=0)
        # with the shift less what comes before an axis, one arange serves all of them
        table = [
            (axis.count, axis.shift - start * axis.step, axis.step, axis.size) for axis, start in zip(axes, starts)
        ]
        self._axes = torch.tensor(table, dtype=torch.int64, device="cpu").view(-1, 4).t().contiguous().to(device)

    @property
    def counts(self) -> dict[str, int]:
        return {name: each.count for name, each in self._coordinates.items()}

    @property
    def nbytes(self) -> int:
        held = (*self._slots.values(), self._history, self._lengths, self._axes)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def gather(self, params: Mapping[str, Tensor], of: Callable[[Tensor], Tensor | None]) -> Tensor:
        """Return the sampled entries of all parameters, as fp32.

        Coordinates refer to whole parameters. Ranks that share a parameter read the entries that they hold, and a sum
        over ranks gives all of them the same result.

        Args:
            params: parameters by name; those that are missing count as zero.
            of: returns the tensor to sample, such as the gradient; ``None`` counts as zero.
        """
        taken = torch.zeros(self._size, dtype=torch.float32, device=self.device)
        places = iter(self._places())
        shared: dict[Ranks, list[Tensor]] = {}
        for (name, coordinates), into in zip(self._coordinates.items(), self._split(taken)):
            mine = [next(places) for _ in coordinates.axes]
            if name not in params:  # it has left the optimizer: counts as zero
                continue
            shard, tensor = shard_of(params[name], name), of(params[name])
            if shard is not None:
                shared.setdefault(shard.ranks, []).append(into)
            if tensor is not None:
                here = local(tensor)
                here = torch.view_as_real(here) if here.is_complex() else here
                coordinates.take_into(into, here, mine, None if shard is None else shard.rows)
        for ranks, pieces in shared.items():
            summed = torch.split(ranks.sum(torch.cat(pieces)), [len(piece) for piece in pieces])
            for piece, found in zip(pieces, summed):
                piece.copy_(found)
        return taken

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the pieces of a tensor that holds all streams."""
        return dict(zip(self._coordinates, self._split(flat)))

    def dots_and_squares(self, grad: Tensor) -> Tensor:
        """Return <g_t, g_t-1> and |g_t|^2 of every stream, shape ``(2, streams)``, summed in fp64."""
        exact = grad.double()
        dots = self._sums(exact * self._slots["previous"])
        return torch.stack((dots, self._sums(exact.square_()))).float()

    def absorb(self, grad: Tensor, dots_and_squares: Tensor, step: int, betas: tuple[float, float]) -> None:
        """Update moments and history with the gradients of a step."""
        self._history[:, step % HISTORY] = dots_and_squares
        tile = _TILE if self.device.type == "cpu" else max(1, self._size)
        for start in range(0, self._size, tile):
            rows = slice(start, min(start + tile, self._size))
            rounding = _Shared.at(step, rows, self.device)
            for slot, beta, observed in zip(("first", "second"), betas, (grad[rows], grad[rows].square())):
                stored = {"": self._slots[slot]}
                # not fused, because devices round fused operations differently
                value = self._format.decode(stored, rows) * beta
                value += observed * (1 - beta)
                self._format.encode(stored, rows, value, rounding)
        self._slots["previous"].copy_(grad)

    def streams(self, steps: int) -> dict[str, Stream]:
        slots = [self._split(slot.float()) for slot in self._slots.values()]
        in_order = self._history[:, :steps] if steps <= HISTORY else self._history.roll(-(steps % HISTORY), dims=1)
        pieces = zip(*slots, *(kind.unbind(-1) for kind in in_order))
        return {
            name: Stream(coordinates, *piece) for (name, coordinates), piece in zip(self._coordinates.items(), pieces)
        }

    def state_dict(self) -> dict[str, Any]:
        return {**self._slots, "history": self._history}

    def load(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        for slot, into in self._slots.items():
            torch.cat([saved[name][slot].to(self.device) for name in self._coordinates], out=into)
        torch.stack([saved[name]["history"].to(self.device) for name in self._coordinates], -1, out=self._history)

    def _places(self) -> tuple[Tensor, ...]:
        """Return the places on every axis of every stream. Storing them would add a tenth to the sampler's bytes."""
        sizes = [axis.count for each in self._coordinates.values() for axis in each.axes]
        order = torch.arange(sum(sizes), device=self.device)
        shift, step, size = self._axes[1:].repeat_interleave(self._axes[0], dim=1, output_size=len(order))
        return torch.split(strata_places(order * step + shift, step, size), sizes)

    def _sums(self, values: Tensor) -> Tensor:
        return torch.segment_reduce(values, "sum", lengths=self._lengths, unsafe=True, initial=0)

    def _split(self, flat: Tensor) -> tuple[Tensor, ...]:
        return torch.split(flat, list(self.counts.values()))

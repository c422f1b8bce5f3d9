"""Sparse gradient streams: a few fixed coordinates of every parameter, followed through the warm-up (Sec. 3.1, Eq. 3).

The sampler keeps its own moments of these coordinates, so its results do not depend on the optimizer of the warm-up.
All streams of a device are stored in a few tensors: a step is one gather per parameter, a few operations over all
streams, and two numbers per parameter for the host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baoc.core.sharding import Ranks, local, shard_of
from baoc.core.spec import DEFAULT_BETAS, real_shape
from baoc.planners.paper.coordinates import RATIO, Coordinates, draw, sample_counts, strata_places
from baoc.planners.paper.units import Granularity

BETA_RHO = 0.9
_SETTINGS = ("ratio", "floor", "seed", "betas", "beta_rho")
_SLOTS = ("first", "second", "previous")


def history_steps(beta_rho: float) -> int:
    """Return how many steps the direction stability of Eq. 5 depends on.

    Older ones have a weight below the precision of doubles: without them the result is the same number.

    >>> history_steps(0.9), history_steps(0.99), history_steps(0.0)
    (350, 3657, 2)
    """
    return 2 if beta_rho == 0 else 1 + math.ceil(53 * math.log(2) / -math.log(beta_rho))


@dataclass(frozen=True)
class Stream:
    """The sampled gradients of one tensor, as fp32."""

    coordinates: Coordinates
    first: Tensor  # (count,) EMA of g as in Eq. 3, which starts at zero
    second: Tensor  # (count,) EMA of g * g, likewise
    previous: Tensor  # (count,)
    dots: Tensor  # (steps,) <g_t, g_t-1>, of all steps that Eq. 5 depends on
    squares: Tensor  # (steps,) |g_t|^2, likewise


class Sampler:
    """Samples the gradients of named parameters at fixed coordinates.

    Args:
        params: parameters by name.
        ratio: s of Sec. 3.1: the share of each structural unit's coordinates.
        floor: sample at least this many coordinates of a unit, or all.
        seed: of the choice of coordinates.
        betas: beta_m and beta_v of Eq. 3.
        beta_rho: of Eq. 5, which says how many steps matter.
        granularity: of the units.
        counts: how many coordinates to sample of each parameter; overrides ratio, floor and granularity.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(100, 100))
        >>> sampler = Sampler({"weight": weight}, seed=0)
        >>> weight.grad = torch.ones(100, 100)
        >>> sampler.observe({"weight": weight})
        True
        >>> sampler.steps, sampler.streams["weight"].coordinates.count
        (1, 10)
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        *,
        ratio: float = RATIO,
        floor: int = 0,
        seed: int = 0,
        betas: tuple[float, float] = DEFAULT_BETAS,
        beta_rho: float = BETA_RHO,
        granularity: Granularity = "module",
        counts: Mapping[str, int] | None = None,
    ) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(
                f"the sampling ratio is {ratio}; it must be above 0 and at most 1 (the paper's is {RATIO})."
            )
        self.ratio, self.floor, self.seed, self.betas, self.beta_rho = ratio, floor, seed, betas, beta_rho
        self.steps = 0
        self.skipped = 0
        shapes = {name: real_shape(param) for name, param in params.items()}
        counts = sample_counts(shapes, ratio, floor, granularity) if counts is None else counts
        generator = torch.Generator("cpu").manual_seed(seed)
        drawn = {name: draw(shape, generator, counts[name]) for name, shape in shapes.items()}
        devices = dict.fromkeys(param.device for param in params.values())
        self._parts = [
            _Part({name: drawn[name] for name, param in params.items() if param.device == device}, device)
            for device in devices
        ]
        self._names = tuple(params)
        # on the host, where it is small beside everything else
        self._history = torch.zeros(2, history_steps(beta_rho), len(params), dtype=torch.float32, device="cpu")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sampled parameters."""
        return self._names

    @property
    def nbytes(self) -> int:
        """Bytes that the sampler holds on the parameters' devices."""
        return sum(part.nbytes for part in self._parts)

    @property
    def streams(self) -> dict[str, Stream]:
        """All streams by name, in the order of the parameters."""
        length = self._history.shape[1]
        turned = self._history.roll(-(self.steps % length), dims=1) if self.steps > length else self._history
        seen = turned[:, : self.steps].clone()
        history = dict(zip(self._names, zip(*(kind.unbind(-1) for kind in seen))))
        slots = {name: slots for part in self._parts for name, slots in part.slots().items()}
        return {name: Stream(*slots[name], *history[name]) for name in self._names}

    @torch.no_grad()
    def observe(self, params: Mapping[str, Tensor]) -> bool:
        """Sample the gradients of a step.

        Returns:
            Whether they are finite. If not, the step is skipped and counted in :attr:`skipped`.
        """
        taken = [part.gather(params, lambda param: param.grad) for part in self._parts]
        sums = [part.dots_and_squares(grad).cpu() for part, grad in zip(self._parts, taken)]
        # a square that overflows fp32 would stay in the second moment for good
        if sums and not bool(torch.cat(sums, dim=1).isfinite().all()):
            self.skipped += 1
            return False
        place = self.steps % self._history.shape[1]
        position = {name: index for index, name in enumerate(self._names)}
        for part, grad, both in zip(self._parts, taken, sums):
            part.absorb(grad, self.betas)
            self._history[:, place, [position[name] for name in part.counts]] = both
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
        counts = {name: count for part in self._parts for name, count in part.counts.items()}
        return {
            **{name: getattr(self, name) for name in _SETTINGS},
            "counts": [counts[name] for name in self._names],
            "steps": self.steps,
            "skipped": self.skipped,
            "history": self._history,
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
        for beta in (*betas, state["beta_rho"]):
            if len(betas) != 2 or not isinstance(beta, (int, float)) or not 0 <= beta < 1:
                raise ValueError(f"betas of the samples are {betas!r} and {state['beta_rho']!r}")
        names, counts = list(params), state["counts"]
        if len(counts) != len(names) or sorted(i for part in state["parts"] for i in part["names"]) != list(
            range(len(names))
        ):
            raise ValueError(f"the samples are of other parameters than the {len(names)} that are planned")
        for name, count in zip(names, counts):
            if type(count) is not int or not 0 <= count <= math.prod(real_shape(params[name])):
                raise ValueError(f"{count!r} samples of {name!r}")
        settings = {name: state[name] for name in _SETTINGS}
        sampler = cls(params, **{**settings, "betas": betas, "counts": dict(zip(names, counts))})
        if state["history"] is None or any(part[slot] is None for part in state["parts"] for slot in _SLOTS):
            return sampler
        sampler.steps, sampler.skipped = state["steps"], state["skipped"]
        _check_tensor("history", state["history"])
        if state["history"].shape != sampler._history.shape:
            raise ValueError(f"the history of the samples is not of {sampler._history.shape[1]} steps")
        sampler._history.copy_(state["history"])
        saved: dict[str, dict[str, Tensor]] = {}
        for part in state["parts"]:
            for slot in _SLOTS:
                _check_tensor(slot, part[slot])
            if bool((part["second"] < 0).any()):
                raise ValueError("a mean of squares in the samples is negative")
            pieces = [part[slot].split([counts[index] for index in part["names"]]) for slot in _SLOTS]
            for index, *piece in zip(part["names"], *pieces):
                saved[names[index]] = dict(zip(_SLOTS, piece))
        for own in sampler._parts:
            own.load(saved)
        return sampler


def _check_tensor(key: str, held: object) -> None:
    """Raise if a tensor from outside is not what a sampler holds."""
    if not isinstance(held, Tensor) or held.dtype is not torch.float32 or not bool(held.isfinite().all()):
        raise ValueError(f"{key!r} of the samples is not a tensor of finite {torch.float32} numbers")


class _Part:
    """The streams of one device, one after the other in each tensor."""

    def __init__(self, coordinates: Mapping[str, Coordinates], device: torch.device) -> None:
        self.device = device
        self._coordinates = dict(coordinates)
        self._size = sum(self.counts.values())
        self._slots = {slot: torch.zeros(self._size, dtype=torch.float32, device=device) for slot in _SLOTS}
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
        held = (*self._slots.values(), self._lengths, self._axes)
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

    def absorb(self, grad: Tensor, betas: tuple[float, float]) -> None:
        """Update the moments with the gradients of a step (Eq. 3)."""
        for slot, beta, observed in zip(("first", "second"), betas, (grad, grad.square())):
            # not fused, because devices round fused operations differently
            self._slots[slot].mul_(beta).add_(observed * (1 - beta))
        self._slots["previous"].copy_(grad)

    def slots(self) -> dict[str, tuple[Coordinates, Tensor, Tensor, Tensor]]:
        """Return coordinates, moments and last gradients by name; later steps do not change them."""
        first, second, previous = (self._split(slot.clone()) for slot in self._slots.values())
        return dict(zip(self._coordinates, zip(self._coordinates.values(), first, second, previous)))

    def state_dict(self) -> dict[str, Any]:
        return dict(self._slots)

    def load(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        for slot, into in self._slots.items():
            torch.cat([saved[name][slot].to(self.device) for name in self._coordinates], out=into)

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

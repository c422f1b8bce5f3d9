"""Sparse gradient streams: a few fixed coordinates of every parameter, followed through the warm-up (Sec. 3.1, Eq. 3).

The sampler keeps fp32 moments of its own for those coordinates, so what it measures does not depend on what the warm-up
itself is trained with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from baoc.spec import DEFAULT_BETAS, Shape, real_shape

RATIO = 0.001
FLOOR = 256
"""A tensor is not judged on fewer coordinates than this, unless it has fewer."""
_SETTINGS = ("ratio", "floor", "seed", "betas")
_FEW_MATRICES = 8  # of a stack, such as experts: enough not to judge all by one


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of one tensor, seen as a stack of matrices: the first ``count`` of a grid, row by row.

    A grid of some matrices x some rows x some columns lets one sample serve every metric, the rank-1 residual too.
    """

    shape: Shape
    matrices: Tensor  # (b,) int64, which of the stacked matrices
    rows: Tensor  # (r,) int64
    cols: Tensor  # (c,) int64
    count: int

    def take(self, tensor: Tensor) -> Tensor:
        """The sampled entries as fp32, shape ``(count,)``."""
        # indexed in its own dims and at once: a view of a strided tensor or of whole matrices would copy them
        if not self.count:
            return torch.zeros(0, device=tensor.device)
        if tensor.dim() < 2:
            return tensor.reshape(-1)[self.rows].float()
        stack = torch.unravel_index(self.matrices, self.shape[:-2]) if len(self.shape) > 2 else ()
        index = (*(each[:, None, None] for each in stack), self.rows[:, None], self.cols)
        grid = tensor[index]
        return grid.reshape(-1)[: self.count].float()

    def to(self, device: torch.device) -> Coordinates:
        return Coordinates(self.shape, self.matrices.to(device), self.rows.to(device), self.cols.to(device), self.count)

    @property
    def grid(self) -> tuple[int, int, int]:
        return len(self.matrices), len(self.rows), len(self.cols)

    @property
    def nbytes(self) -> int:
        return 8 * (len(self.matrices) + len(self.rows) + len(self.cols))


def stacked(shape: Shape) -> tuple[int, int, int]:
    """A tensor as (matrices, rows, columns): its last two dims, and how many of them there are.

    >>> stacked((64, 32, 3, 3)), stacked((768, 3072)), stacked((768,)), stacked(())
    ((2048, 3, 3), (1, 768, 3072), (1, 768, 1), (1, 1, 1))
    """
    if len(shape) < 2:
        return 1, math.prod(shape), 1
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def sample_count(numel: int, ratio: float = RATIO, floor: int = FLOOR) -> int:
    """Exactly ``ceil(ratio * numel)`` coordinates, but at least ``floor`` or all.

    >>> sample_count(2_359_296), sample_count(768), sample_count(100)
    (2360, 256, 100)
    """
    # as written: 0.07 * 100 is above 7 in floats
    return min(numel, max(math.ceil(Fraction(str(ratio)) * numel), floor))


def draw(shape: Shape, generator: torch.Generator, ratio: float = RATIO, floor: int = FLOOR) -> Coordinates:
    """Choose coordinates at random."""
    count = sample_count(math.prod(shape), ratio, floor)
    matrices, rows, cols = stacked(shape)
    b = min(matrices, max(_FEW_MATRICES, -(-count // max(1, rows * cols))))
    per_matrix = -(-count // b) if b else 0
    # as square as the matrix allows, so that both its rows and its columns are seen
    r = min(rows, max(math.isqrt(per_matrix), -(-per_matrix // max(1, cols))))
    c = -(-per_matrix // r) if r else 0
    return Coordinates(
        shape,
        matrices=_subset(matrices, b, generator),
        rows=_subset(rows, r, generator),
        cols=_subset(cols, c, generator),
        count=count,
    )


def _subset(size: int, count: int, generator: torch.Generator) -> Tensor:
    if size <= 16 * count:
        return torch.randperm(size, generator=generator, device="cpu")[:count].sort().values
    chosen = torch.zeros(0, dtype=torch.int64, device="cpu")
    while len(chosen) < count:  # a permutation of a long vector would take more memory than its optimizer state
        more = torch.randint(size, (2 * count,), generator=generator, device="cpu")
        chosen = torch.unique(torch.cat((chosen, more)))
    return chosen[torch.randperm(len(chosen), generator=generator, device="cpu")[:count]].sort().values


@dataclass
class Stream:
    """What is kept of one tensor's sampled gradients."""

    coordinates: Coordinates
    first: Tensor  # (count,) EMA of g, not yet divided by its mass
    second: Tensor  # (count,) EMA of g * g
    previous: Tensor  # (count,)
    dots: list[float] = field(default_factory=list)  # <g_t, g_t-1> at every step
    squares: list[float] = field(default_factory=list)  # |g_t|^2 at every step

    @property
    def nbytes(self) -> int:
        return self.coordinates.nbytes + sum(
            t.numel() * t.element_size() for t in (self.first, self.second, self.previous)
        )


class Sampler:
    """Follows the gradients of named parameters at fixed coordinates.

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
    ) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(
                f"the sampling ratio is {ratio}; it must be above 0 and at most 1 (the paper's is {RATIO})."
            )
        self.ratio, self.floor, self.seed, self.betas = ratio, floor, seed, betas
        self.steps = 0
        self.skipped = 0
        generator = torch.Generator("cpu").manual_seed(seed)
        self.streams: dict[str, Stream] = {}
        for name, param in params.items():
            coordinates = draw(real_shape(param), generator, ratio, floor).to(param.device)
            first, second, previous = (torch.zeros(coordinates.count, device=param.device) for _ in range(3))
            self.streams[name] = Stream(coordinates, first, second, previous)

    @property
    def nbytes(self) -> int:
        """What the sampler holds."""
        return sum(stream.nbytes for stream in self.streams.values())

    @torch.no_grad()
    def observe(self, params: Mapping[str, Tensor]) -> bool:
        """Take in the gradients as the optimizer sees them. A step with a non-finite one is skipped and counted."""
        taken = {name: self._gradient(name, params[name]) for name in self.streams}
        squares = {name: float(grad.double().square().sum()) for name, grad in taken.items()}
        # a square that overflows fp32 would stay in the second moment for good; NaN is not below either
        if not all(square < torch.finfo(torch.float32).max for square in squares.values()):
            self.skipped += 1
            return False
        for name, grad in taken.items():
            stream = self.streams[name]
            stream.dots.append(float(torch.dot(grad.double(), stream.previous.double())))
            stream.squares.append(squares[name])
            stream.first.lerp_(grad, 1 - self.betas[0])
            stream.second.lerp_(grad.square(), 1 - self.betas[1])
            stream.previous.copy_(grad)
        self.steps += 1
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain values and the live tensors. Coordinates are not in it: the seed draws them again."""
        settings = {name: getattr(self, name) for name in _SETTINGS}
        streams = {
            name: {"first": s.first, "second": s.second, "previous": s.previous, "dots": s.dots, "squares": s.squares}
            for name, s in self.streams.items()
        }
        return {**settings, "steps": self.steps, "skipped": self.skipped, "streams": streams}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], params: Mapping[str, Tensor]) -> Sampler:
        """Go on where another sampler stopped."""
        named = {name: params[name] for name in state["streams"]}
        sampler = cls(named, **{name: state[name] for name in _SETTINGS})
        sampler.steps, sampler.skipped = state["steps"], state["skipped"]
        for name, saved in state["streams"].items():
            stream = sampler.streams[name]
            for key in ("first", "second", "previous"):
                getattr(stream, key).copy_(saved[key])
            stream.dots, stream.squares = list(saved["dots"]), list(saved["squares"])
        return sampler

    def _gradient(self, name: str, param: Tensor) -> Tensor:
        coordinates = self.streams[name].coordinates
        if param.grad is None:
            return torch.zeros(coordinates.count, device=param.device)
        grad = torch.view_as_real(param.grad) if param.is_complex() else param.grad
        return coordinates.take(grad)

"""The paper's diagnostics of a block, from the sampled streams of its tensors (Sec. 3.3, Eq. 4 to 8).

Samples are weighted by how many elements they stand for, because small tensors are sampled more densely. With the
paper's plain sampling all weights are equal, and these are its formulas.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from baoc.core.codecs import CODECS, Codec, Format, SummedFormat
from baoc.core.configuration import Configuration, parse
from baoc.core.mechanisms import Evidence, pooled_rms
from baoc.core.rounding import NEAREST
from baoc.core.spec import Hyper, Slot
from baoc.planners.paper.statistics import Array, GradientStatistics, TensorRecord

EPSILON = 1e-12  # App. A.1
BETA_RHO = 0.9


class Metrics:
    """The diagnostics of one block at the end of the warm-up: the paper's z_i, and the length of updates.

    Args:
        statistics: of all parameters.
        names: parameters of the block.
        hyper: betas, epsilon and weight decay of the run.
        epsilon: of the paper's formulas.
    """

    def __init__(
        self,
        statistics: GradientStatistics,
        names: Iterable[str],
        hyper: Hyper,
        *,
        epsilon: float = EPSILON,
    ) -> None:
        self._records = [statistics.records[name] for name in names if statistics.records[name].numel]
        self._steps, self._hyper, self._epsilon = statistics.steps, hyper, epsilon
        samples = sum(len(record.second) for record in self._records)
        elements = sum(record.numel for record in self._records)
        # relative to the block's mean: equal weights are 1, so that epsilon means the same as in the paper
        self._weight = {r.name: r.weight * samples / elements for r in self._records}
        self._weights = self._joined("weights")
        first, second, values = (self._joined(key) for key in ("first", "second", "values"))
        self._first = first
        none = np.zeros(max((len(record.dots) for record in self._records), default=0))
        squares = sum((self._weight[r.name] * r.squares for r in self._records), none)
        dots = sum((self._weight[r.name] * r.dots for r in self._records), none)
        self._stored: dict[tuple[str, str], Tensor] = {}
        self._exact: tuple[object, Array, float] | None = None

        self.has_signal = bool((second > 0).any())
        """Whether some sampled gradient was not zero. If not, the other diagnostics are meaningless."""
        self.anisotropy = anisotropy(second, self._weights, epsilon)
        self.direction_stability = direction_stability(dots, squares, epsilon)
        self.snr = snr(first, second, self._weights, epsilon)
        self.distortion = distortion(second, values, self._weights, epsilon)
        self.structure_residual = structure_residual(
            self._records, [self._weight[r.name] for r in self._records], epsilon
        )
        """``None`` if the block has no matrix."""

    def precision(self, bits: int) -> float:
        """Return Q(b) of the paper: the cosine between AdamW's update with b-bit state and with fp32 state."""
        return self.alignment(parse(f"adamw-{bits}"))

    def alignment(self, configuration: Configuration) -> float:
        """Return Eq. 8: the cosine between the updates with exact state and with the configuration's codecs.

        Exact state is fp32. For a factored codec it is the fp32 factorization, whose error Eq. 7 measures. For rules
        that work on whole matrices, it is the cosine of the matrices that they start from.
        """
        stored = {slot.name: configuration.codec(slot.name) for slot in self._slots(configuration)}
        exact = {name: CODECS[codec.exact()] for name, codec in stored.items()}
        u32, exact_norm = self._exact_direction(configuration, exact)
        if exact_norm == 0 or not stored:
            return 1.0  # without updates or without state nothing is lost
        ub = self._direction(configuration, stored)
        stored_norm = _norm(ub, self._weights)
        if stored_norm == 0:
            return 0.0
        # of unit vectors, because an absolute epsilon would look like a loss where updates are small, as in SGD
        return float((self._weights * (u32 / exact_norm)) @ (ub / stored_norm)) / (1 + self._epsilon)

    def update_rms(self, configuration: Configuration) -> float:
        """Return the RMS of a configuration's typical update on these gradients, in units of the learning rate."""
        parts = []
        for record in self._records:
            mechanism = configuration.layout(record.shape).mechanism
            first, second = torch.from_numpy(record.first), torch.from_numpy(record.second)
            means = {"m": first, "v": second}
            means |= {slot.name: first if slot.signed else second for slot in mechanism.slots}
            param_rms = math.sqrt(float(np.square(record.values).mean())) if len(record.values) else 0.0
            evidence = Evidence(means, dict.fromkeys(means, self._steps), param_rms)
            rms = mechanism.typical_rms(evidence, self._hyper)
            if rms is not None:
                parts.append((record.numel, rms))
        return pooled_rms(parts)

    def _exact_direction(self, configuration: Configuration, codecs: dict[str, Codec]) -> tuple[Array, float]:
        """Return the update with exact state and its norm. The last one is cached for configurations of one rule."""
        key = (configuration.mechanism_name, codecs)
        if self._exact is None or self._exact[0] != key:
            direction = self._direction(configuration, codecs)
            self._exact = (key, direction, _norm(direction, self._weights))
        return self._exact[1:]

    def _direction(self, configuration: Configuration, codecs: dict[str, Codec]) -> Array:
        mechanism = configuration.mechanism
        ages = {slot.name: self._steps for slot in configuration.slots}
        slots = {
            slot.name: self._read_back(slot, codecs[slot.name]) * mechanism.mass(slot.name, self._steps, self._hyper)
            for slot in self._slots(configuration)
        }
        grad = torch.from_numpy(self._first)
        direction: Array = mechanism.direction(grad, slots, mechanism.scalars(self._hyper, ages)).double().numpy()
        return direction

    def _slots(self, configuration: Configuration) -> list[Slot]:
        """Return the slots that store gradients, of which there are samples."""
        return [slot for slot in configuration.slots if not slot.is_of_matrix]

    def _read_back(self, slot: Slot, codec: Codec) -> Tensor:
        """Return the samples of a moment after a round trip through a codec. A common factor makes no difference."""
        key = (slot.name, codec.name)
        if key not in self._stored:
            parts = [stored_and_read(r, r.first if slot.signed else r.second, codec, slot) for r in self._records]
            self._stored[key] = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float32, device="cpu")
        return self._stored[key]

    def _joined(self, key: str) -> Array:
        if key == "weights":
            parts = [np.full(len(record.second), self._weight[record.name]) for record in self._records]
        else:
            parts = [getattr(record, key) for record in self._records]
        return np.concatenate(parts) if parts else np.zeros(0)


def anisotropy(second: Array, weights: Array, epsilon: float = EPSILON) -> float:
    """Return Eq. 4: the log-ratio of the 90% and the 10% quantile of the second moment."""
    if not len(second):
        return 0.0
    low, high = weighted_quantiles(second, weights, (0.1, 0.9))
    return math.log((high + epsilon) / (low + epsilon))


def direction_stability(dots: Array, squares: Array, epsilon: float = EPSILON, beta: float = BETA_RHO) -> float:
    """Return Eq. 5, left: the debiased EMA of cosines between successive gradients. A zero norm counts as 0."""
    mean, mass = 0.0, 0.0
    for dot, square, previous in zip(dots[1:], squares[1:], squares[:-1]):
        cosine = float(dot) / (math.sqrt(square) * math.sqrt(previous) + epsilon)
        cosine = min(max(cosine, -1.0), 1.0)  # all three are rounded
        mean = beta * mean + (1 - beta) * cosine
        mass = beta * mass + (1 - beta)
    return mean / mass if mass else 0.0


def snr(first: Array, second: Array, weights: Array, epsilon: float = EPSILON) -> float:
    """Return Eq. 5, right: the share of the squared mean in the mean square of gradients."""
    return float((weights * first**2).sum() / ((weights * second).sum() + epsilon))


def distortion(second: Array, values: Array, weights: Array, epsilon: float = EPSILON) -> float:
    """Return Eq. 6: how far the preconditioner is from a constant, weighted by the parameters that it would decay."""
    if not len(second):
        return 0.0
    preconditioner = 1 / (np.sqrt(second) + epsilon)
    relative = preconditioner / np.average(preconditioner, weights=weights) - 1
    return _norm(relative * values, weights) / (_norm(values, weights) + epsilon)


def structure_residual(
    records: Sequence[TensorRecord], weights: Sequence[float], epsilon: float = EPSILON
) -> float | None:
    """Return Eq. 7: the relative error of the rank-1 estimate from row and column means of all sampled matrices."""
    error = total = 0.0
    found = False
    for record, weight in zip(records, weights):
        for matrix in sampled_matrices(record, record.second)[0]:
            rows, cols = matrix.mean(1, keepdims=True), matrix.mean(0, keepdims=True)
            estimate = rows * cols / max(float(matrix.mean()), np.finfo(np.float64).tiny)
            error += weight * float(((matrix - estimate) ** 2).sum())
            total += weight * float((matrix**2).sum())
            found = True
    return math.sqrt(error) / (math.sqrt(total) + epsilon) if found else None


def stored_and_read(record: TensorRecord, samples: Array, codec: Codec, slot: Slot) -> Tensor:
    """Return samples after a round trip through the codec that this tensor would use."""
    stored = codec.at(record.shape, slot)
    value = torch.from_numpy(samples).float()
    if len(value) == record.numel:
        return _round_trip(value.view(record.shape or (1,)), stored).flatten()
    if not isinstance(stored, SummedFormat):
        # groups span several short rows, or several small matrices of a convolution
        trailing = math.prod(record.shape[1:])
        cols = record.grid[2] * max(1, min(256, trailing) // record.shape[-1]) if len(record.shape) > 1 else 1
        padded = torch.nn.functional.pad(value, (0, -len(value) % cols)).view(-1, cols)
        return _round_trip(padded, stored).flatten()[: len(value)]
    matrices, tail = sampled_matrices(record, samples)
    if len(record.shape) > 2:  # the factors of many matrices are one tensor, whose groups span several of them
        whole = sum(len(matrix) == record.grid[1] for matrix in matrices)
        matrices = [*([np.stack(matrices[:whole])[None]] if whole else []), *matrices[whole:]]
    back = [_round_trip(torch.from_numpy(matrix).float(), stored).flatten() for matrix in matrices]
    return torch.cat([*back, torch.from_numpy(tail).float()])


def _round_trip(value: Tensor, stored: Format) -> Tensor:
    """Return values after a round trip through a format, although they are only some of its tensor's."""
    stored = dataclasses.replace(stored, shape=tuple(value.shape), rows=None)
    held = {buffer.name: torch.zeros(buffer.shape, dtype=buffer.dtype, device="cpu") for buffer in stored.buffers}
    stored.encode(held, slice(0, len(value)), value, NEAREST)
    return stored.decode(held, slice(0, len(value)))


def sampled_matrices(record: TensorRecord, samples: Array) -> tuple[list[Array], Array]:
    """Return samples as matrices, with full rows of the grid only, and the rest. Vectors have no matrices."""
    if len(record.shape) < 2:
        return [], samples
    _, rows, cols = record.grid
    cut = len(samples) // cols * cols
    full = samples[:cut].reshape(-1, cols)
    return [full[start : start + rows] for start in range(0, len(full), rows)], samples[cut:]


def weighted_quantiles(x: Array, weights: Array, at: Sequence[float]) -> list[float]:
    """Return quantiles of a weighted sample, interpolated as ``numpy.quantile`` does for equal weights.

    >>> weighted_quantiles(np.array([3.0, 1.0, 2.0]), np.ones(3), [0.0, 0.25, 1.0])
    [1.0, 1.5, 3.0]
    """
    order = np.lexsort((weights, x))
    x, weights = x[order], weights[order]
    middle = np.cumsum(weights) - 0.5 * weights  # the centre of each sample's share
    span = middle[-1] - middle[0]
    position = (middle - middle[0]) / span if span > 0 else np.zeros_like(middle)
    return [float(value) for value in np.interp(at, position, x)]


def _norm(x: Array, weights: Array) -> float:
    return math.sqrt(float((weights * x**2).sum()))

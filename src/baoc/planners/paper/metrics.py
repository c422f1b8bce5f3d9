"""The paper's diagnostics of a block, from the sampled streams of its tensors (Sec. 3.3, Eq. 4 to 8)."""

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
from baoc.planners.paper.sampling import BETA_RHO, history_steps
from baoc.planners.paper.statistics import Array, GradientStatistics, StatisticsError, TensorRecord

EPSILON = 1e-12  # App. A.1


@dataclasses.dataclass(frozen=True)
class MetricSettings:
    """How metrics are computed from samples.

    Args:
        beta_rho: of the direction stability (Eq. 5).
        bias_correction: divide the EMAs of Eq. 3 and 5 by their mass, as Adam does. The paper does not.
        epsilon: of all formulas.
    """

    beta_rho: float = BETA_RHO
    bias_correction: bool = False
    epsilon: float = EPSILON


AS_PRINTED = MetricSettings()


class Metrics:
    """The diagnostics of one block at the end of the warm-up: the paper's z_i, and the length of updates.

    Args:
        statistics: of all parameters.
        names: parameters of the block.
        hyper: betas, epsilon and weight decay of the run.
        settings: of the formulas.

    Raises:
        StatisticsError: the statistics do not go back as far as ``beta_rho`` needs.
    """

    def __init__(
        self,
        statistics: GradientStatistics,
        names: Iterable[str],
        hyper: Hyper,
        settings: MetricSettings = AS_PRINTED,
    ) -> None:
        held = [statistics.records[name] for name in names]
        self._records = [record for record in held if len(record.second)]
        self._steps, self._hyper, self._epsilon = statistics.steps, hyper, settings.epsilon
        self._masses = statistics.masses
        masses = self._masses if settings.bias_correction else (1.0, 1.0)
        first, second = self._joined("first") / masses[0], self._joined("second") / masses[1]
        values, epsilon = self._joined("values"), settings.epsilon
        seen = min((len(record.dots) for record in held), default=0)
        if seen < min(statistics.steps, history_steps(settings.beta_rho)) and held:
            raise StatisticsError(
                f"beta_rho={settings.beta_rho:g} needs {history_steps(settings.beta_rho)} steps, and the gradient "
                f"statistics have the last {seen} of {statistics.steps}. Collect them with this beta_rho."
            )
        dots, squares = (
            np.sum([getattr(r, key) for r in self._records], axis=0) if self._records else np.zeros(seen)
            for key in ("dots", "squares")
        )
        self._stored: dict[tuple[str, str], Tensor] = {}
        self._exact: tuple[object, Array, float] | None = None

        self.steps = statistics.steps
        """Steps that were observed."""
        self.has_signal = bool((second > 0).any())
        """Whether some sampled gradient was not zero. If not, the other diagnostics are meaningless."""
        self.has_matrix = any(len(record.shape) > 1 and record.numel for record in held)
        """Whether there is something that can be factored."""
        self.anisotropy = anisotropy(second, epsilon)
        self.direction_stability = direction_stability(
            dots, squares, settings.beta_rho, epsilon, steps=statistics.steps if settings.bias_correction else None
        )
        self.snr = snr(first, second, epsilon)
        self.distortion = distortion(second, values, epsilon)
        self.structure_residual = structure_residual(self._records, 1 / masses[1], epsilon)
        """``None`` if the block has no matrix with enough samples."""

    def precision(self, bits: int) -> float:
        """Return Q(b) of Eq. 8: the cosine between AdamW's update with b-bit state and with fp32 state."""
        configuration = parse(f"adamw-{bits}")
        stored = {slot.name: configuration.codec(slot.name) for slot in configuration.slots}
        u32, exact_norm = self._exact_direction(configuration, dict.fromkeys(stored, CODECS["fp32"]))
        ub = self._direction(configuration, stored)
        return float(u32 @ ub) / (exact_norm * float(np.linalg.norm(ub)) + self._epsilon)

    def alignment(self, configuration: Configuration) -> float:
        """Return Eq. 8 for any configuration: the cosine between updates with exact state and with its codecs.

        Exact state is fp32. For a factored codec it is the fp32 factorization, whose error Eq. 7 measures. For rules
        that work on whole matrices, it is the cosine of the matrices that they start from.
        """
        stored = {slot.name: configuration.codec(slot.name) for slot in self._slots(configuration)}
        exact = {name: CODECS[codec.exact()] for name, codec in stored.items()}
        u32, exact_norm = self._exact_direction(configuration, exact)
        if exact_norm == 0 or not stored:
            return 1.0  # without updates or without state nothing is lost
        ub = self._direction(configuration, stored)
        stored_norm = float(np.linalg.norm(ub))
        if stored_norm == 0:
            return 0.0
        # of unit vectors, because an absolute epsilon would look like a loss where updates are small, as in SGD
        return float((u32 / exact_norm) @ (ub / stored_norm)) / (1 + self._epsilon)

    def update_rms(self, configuration: Configuration) -> float:
        """Return the RMS of a configuration's typical update on these gradients, in units of the learning rate."""
        parts = []
        for record in self._records:
            mechanism = configuration.layout(record.shape).mechanism
            moments = zip((record.first, record.second), self._masses)
            first, second = (torch.from_numpy(moment / mass) for moment, mass in moments)
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
            self._exact = (key, direction, float(np.linalg.norm(direction)))
        return self._exact[1:]

    def _direction(self, configuration: Configuration, codecs: dict[str, Codec]) -> Array:
        mechanism = configuration.mechanism
        ages = {slot.name: self._steps for slot in configuration.slots}
        # moments are stored as they are; the update divides them by the mass that they would have with its own betas
        # doubles: at 16 bits 1 - Q is near 1e-6, of which fp32 would leave one digit
        slots = {
            slot.name: self._read_back(slot, codecs[slot.name]).double()
            * (mechanism.mass(slot.name, self._steps, self._hyper) / self._masses[not slot.signed])
            for slot in self._slots(configuration)
        }
        grad = torch.from_numpy(self._joined("first") / self._masses[0])
        direction: Array = mechanism.direction(grad, slots, mechanism.scalars(self._hyper, ages)).numpy()
        return direction

    def _slots(self, configuration: Configuration) -> list[Slot]:
        """Return the slots that store gradients, of which there are samples."""
        return [slot for slot in configuration.slots if not slot.is_of_matrix]

    def _read_back(self, slot: Slot, codec: Codec) -> Tensor:
        """Return the samples of a moment after a round trip through a codec."""
        key = (slot.name, codec.name)
        if key not in self._stored:
            parts = [stored_and_read(r, r.first if slot.signed else r.second, codec, slot) for r in self._records]
            self._stored[key] = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float32, device="cpu")
        return self._stored[key]

    def _joined(self, key: str) -> Array:
        parts = [getattr(record, key) for record in self._records]
        return np.concatenate(parts) if parts else np.zeros(0)


def anisotropy(second: Array, epsilon: float = EPSILON) -> float:
    """Return Eq. 4: the log-ratio of the 90% and the 10% quantile of the second moment."""
    if not len(second):
        return 0.0
    low, high = np.quantile(second, (0.1, 0.9))
    return math.log((float(high) + epsilon) / (float(low) + epsilon))


def direction_stability(
    dots: Array, squares: Array, beta: float = BETA_RHO, epsilon: float = EPSILON, *, steps: int | None = None
) -> float:
    """Return Eq. 5, left: the EMA of cosines between successive gradients, from zero. A zero norm counts as 0.

    Args:
        dots: <g_t, g_t-1> by step; the first has no predecessor.
        squares: |g_t|^2 by step.
        beta: beta_rho.
        epsilon: of the denominator.
        steps: divide by the mass of an EMA over this many steps; ``None`` for the printed formula.
    """
    mean = 0.0
    for dot, square, previous in zip(dots[1:], squares[1:], squares[:-1]):
        cosine = float(dot) / (math.sqrt(square) * math.sqrt(previous) + epsilon)
        cosine = min(max(cosine, -1.0), 1.0)  # all three are rounded
        mean = beta * mean + (1 - beta) * cosine
    return mean / (1 - beta ** (steps - 1)) if steps is not None and steps > 1 else mean


def snr(first: Array, second: Array, epsilon: float = EPSILON) -> float:
    """Return Eq. 5, right: the squared norm of the first moment over the sum of the second."""
    return float((first**2).sum() / (second.sum() + epsilon))


def distortion(second: Array, values: Array, epsilon: float = EPSILON) -> float:
    """Return Eq. 6: how far the preconditioner is from a constant, weighted by the parameters that it would decay."""
    if not len(second):
        return 0.0
    preconditioner = 1 / (np.sqrt(second) + epsilon)
    relative = preconditioner / preconditioner.mean() - 1
    return float(np.linalg.norm(relative * values) / (np.linalg.norm(values) + epsilon))


def structure_residual(records: Sequence[TensorRecord], scale: float = 1.0, epsilon: float = EPSILON) -> float | None:
    """Return Eq. 7: the relative error of the rank-1 estimate from row and column means of all sampled matrices.

    A matrix counts if at least two rows and two columns of it were sampled, or all it has.

    Args:
        records: of the tensors of a block.
        scale: of the second moments.
        epsilon: of the denominator.
    """
    error = total = 0.0
    found = False
    for record in records:
        enough = tuple(min(2, size) for size in record.shape[-2:])
        for sampled in sampled_matrices(record, record.second)[0]:
            if sampled.shape[0] < enough[0] or sampled.shape[1] < enough[1]:
                continue
            matrix = sampled * scale
            rows, cols = matrix.mean(1, keepdims=True), matrix.mean(0, keepdims=True)
            estimate = rows * cols / max(float(matrix.mean()), np.finfo(np.float64).tiny)
            error += float(((matrix - estimate) ** 2).sum())
            total += float((matrix**2).sum())
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

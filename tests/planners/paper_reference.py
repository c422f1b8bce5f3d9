"""The paper's formulas in plain numpy, written from its text, for comparison. Nothing of the package is imported.

A block is given as the stream of its sampled gradients. Where the paper leaves something open, the comment "choice"
says what was chosen; `docs/equations.md` has the reasons.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Settings:
    beta_m: float = 0.9
    beta_v: float = 0.999
    beta_rho: float = 0.9
    bias_correction: bool = False
    epsilon: float = 1e-12
    adam_eps: float = 1e-8
    a_low: float = math.log(2)
    a_high: float = math.log(10)
    rho_low: float = 0.2
    rho_high: float = 0.6
    eta_low: float = 0.0
    eta_high: float = 2.0
    snr: str = "auto"
    gamma: float = 0.1
    weights: Mapping[str, float] = field(default_factory=dict)  # W, by term
    w: Sequence[float] = (1.0, 1.0, 1.0, 1.0, 1.0)  # w_k of Algorithm 2
    alpha: float = 0.001
    tau: float | None = None
    quantile: float = 0.75


# Sec. 3.1


def omega_size(s: float, d: int) -> int:
    """|Omega| = ceil(s d), for an s with few decimals."""
    return -(-round(s * 10**6) * d // 10**6)


# Sec. 3.3, a block's raw metrics


@dataclass(frozen=True)
class Tensor:
    """One tensor of a block: its sampled gradients by step, its sampled values, and how samples form matrices."""

    gradients: Array  # (steps, samples)
    theta: Array  # (samples,)
    matrices: Sequence[NDArray[np.int64]]  # places of the samples of each matrix, (rows, columns)
    can_be_factored: bool
    quantizer: Callable[[Array, int, bool], Array]  # (moment, bits, signed) -> moment as stored


@dataclass(frozen=True)
class Raw:
    """A, rho-bar, SNR, C, F and Q(b) of a block."""

    a: float
    rho: float
    snr: float
    c: float
    f: float | None
    q: Mapping[int, float]
    steps: int
    has_signal: bool
    can_be_factored: bool


def moments(gradients: Array, settings: Settings) -> tuple[Array, Array]:
    """Eq. 3."""
    m, v = np.zeros(gradients.shape[1]), np.zeros(gradients.shape[1])
    for g in gradients:
        m = settings.beta_m * m + (1 - settings.beta_m) * g
        v = settings.beta_v * v + (1 - settings.beta_v) * g * g
    return m, v


def raw_metrics(tensors: Sequence[Tensor], settings: Settings) -> Raw:
    eps = settings.epsilon
    g = np.concatenate([tensor.gradients for tensor in tensors], axis=1)
    theta = np.concatenate([tensor.theta for tensor in tensors])
    steps = len(g)
    m, v = moments(g, settings)
    if settings.bias_correction:
        m, v = m / (1 - settings.beta_m**steps), v / (1 - settings.beta_v**steps)
    # Eq. 4
    low, high = (np.quantile(v, 0.1), np.quantile(v, 0.9)) if len(v) else (0.0, 0.0)
    a = math.log((high + eps) / (low + eps))
    # Eq. 5
    rho = 0.0
    for before, now in itertools.pairwise(g):
        cosine = (now @ before) / (np.linalg.norm(now) * np.linalg.norm(before) + eps)
        rho = settings.beta_rho * rho + (1 - settings.beta_rho) * cosine
    if settings.bias_correction and steps > 1:
        rho /= 1 - settings.beta_rho ** (steps - 1)
    snr = float(np.linalg.norm(m) ** 2 / (np.abs(v).sum() + eps))
    # Eq. 6
    p = 1 / (np.sqrt(v) + eps)
    c = float(np.linalg.norm((p / p.mean() - 1) * theta) / (np.linalg.norm(theta) + eps)) if len(v) else 0.0
    q = {bits: precision(tensors, bits, settings) for bits in (32, 16, 8)}
    can_be_factored = any(tensor.can_be_factored for tensor in tensors)
    return Raw(a, rho, snr, c, structure(tensors, settings), q, steps, bool((v > 0).any()), can_be_factored)


def structure(tensors: Sequence[Tensor], settings: Settings) -> float | None:
    """Eq. 7. Choice: the matrices of a block are approximated one by one, and their errors are pooled."""
    error = norm = 0.0
    found = False
    for tensor in tensors:
        _, v = moments(tensor.gradients, settings)
        if settings.bias_correction:
            v = v / (1 - settings.beta_v ** len(tensor.gradients))
        for places in tensor.matrices:
            s = v[places]
            approximation = np.outer(s.mean(axis=1), s.mean(axis=0)) / (s.mean() or 1.0)
            error += ((s - approximation) ** 2).sum()
            norm += (s**2).sum()
            found = True
    return math.sqrt(error) / (math.sqrt(norm) + settings.epsilon) if found else None


def precision(tensors: Sequence[Tensor], bits: int, settings: Settings) -> float:
    """Eq. 8. Choice: the update is AdamW's, from moments that are stored with b bits."""
    exact, stored = [], []
    for tensor in tensors:
        m, v = moments(tensor.gradients, settings)
        steps = len(tensor.gradients)
        for into, (first, second) in (
            (exact, (m, v)),
            (stored, (tensor.quantizer(m, bits, True), tensor.quantizer(v, bits, False))),
        ):
            mean, square = first / (1 - settings.beta_m**steps), second / (1 - settings.beta_v**steps)
            into.append(mean / (np.sqrt(square) + settings.adam_eps))
    u32, ub = np.concatenate(exact), np.concatenate(stored)
    return float(u32 @ ub / (np.linalg.norm(u32) * np.linalg.norm(ub) + settings.epsilon))


# App. A and Eq. 9


@dataclass(frozen=True)
class Signals:
    s_a: float
    s_m: float
    c: float
    s_f: float
    l_q: Mapping[int, float]


def clip(x: float, low: float, high: float) -> float:
    return float(min(max(x, low), high))


def normalize(raw: Raw, settings: Settings) -> Signals:
    s_a = clip((raw.a - settings.a_low) / (settings.a_high - settings.a_low), 0, 1)  # Eq. 12
    s_rho = clip((raw.rho - settings.rho_low) / (settings.rho_high - settings.rho_low), 0, 1)  # Eq. 14
    s_snr = clip((math.log(1 + raw.snr) - settings.eta_low) / (settings.eta_high - settings.eta_low), 0, 1)  # Eq. 16
    # choice: the SNR is unreliable before 1 / (1 - beta_m) steps
    is_reliable = raw.steps * (1 - settings.beta_m) >= 1 - 1e-9
    uses_snr = {"always": True, "never": False, "auto": is_reliable and raw.has_signal}[settings.snr]
    # choice: without samples enough for Eq. 7, factoring a matrix counts as the full risk, and vectors as none
    f = raw.f if raw.f is not None else float(raw.can_be_factored)
    q = {bits: clip(value, settings.epsilon, 1.0) for bits, value in raw.q.items()}  # Eq. 10
    return Signals(
        s_a,
        s_rho * s_snr if uses_snr else s_rho,  # Eq. 17
        math.log(1 + raw.c),  # Eq. 18
        clip(f, 0, 1),  # Eq. 19
        {bits: -math.log(value + settings.epsilon) for bits, value in q.items()},  # Eq. 20
    )


@dataclass(frozen=True)
class Configuration:
    """Definition 1."""

    y_a: int
    y_m: int
    y_d: int
    y_f: int
    b: int


def aggressiveness(c: Configuration) -> float:
    """Eq. 1."""
    return (1 - c.y_a) + (1 - c.y_m) + (1 - c.y_d) + c.y_f + 32 / c.b - 1


def phi(z: Signals, c: Configuration, settings: Settings) -> float:
    """Eq. 9 with W, plus gamma Agg."""
    terms = {
        "adaptive": z.s_a * (1 - c.y_a),
        "momentum": z.s_m * (1 - c.y_m),
        "decay": z.c * (1 - c.y_d),
        "structure": z.s_f * c.y_f,
        "precision": z.l_q[c.b],
        "aggressive": settings.gamma * aggressiveness(c),
    }
    return sum(settings.weights.get(name, 1.0) * value for name, value in terms.items())


# Algorithm 2


def vector(raw: Raw, settings: Settings) -> list[float]:
    """z_j. Choice: five diagnostics, of which precision is that at 8 bits; a missing one is NaN."""
    if not raw.has_signal:
        return [math.nan] * 5
    z = normalize(raw, settings)
    return [z.s_a, z.s_m, z.c, math.nan if raw.f is None else z.s_f, z.l_q[8]]


def delta(a: Sequence[float], b: Sequence[float], w: Sequence[float]) -> float:
    """Choice: over diagnostics that both have; infinite without any, 0 if neither has one."""
    shared = [weight * abs(x - y) for weight, x, y in zip(w, a, b) if weight > 0 and not math.isnan(x + y)]
    if shared:
        return max(shared)
    known = [any(weight > 0 and not math.isnan(x) for weight, x in zip(w, z)) for z in (a, b)]
    return math.inf if any(known) else 0.0


def mean_vector(units: Sequence[int], z: Sequence[Sequence[float]], n: Sequence[int]) -> list[float]:
    """Choice: a temporary block has the means of its units, weighted by their sizes."""
    means = []
    for k in range(len(z[0])):
        have = [j for j in units if not math.isnan(z[j][k])]
        total = sum(n[j] for j in have)
        means.append(sum(n[j] * z[j][k] for j in have) / total if have else math.nan)
    return means


def partition(z: Sequence[Sequence[float]], n: Sequence[int], settings: Settings) -> list[list[int]]:
    """Algorithm 2 on units in forward order with diagnostics z and sizes n."""
    w = settings.w
    pairs = [delta(z[a], z[b], w) for a, b in itertools.combinations(range(len(z)), 2)]
    finite = [value for value in pairs if math.isfinite(value)]
    tau = settings.tau if settings.tau is not None else float(np.quantile(finite, settings.quantile)) if finite else 0.0
    tau += 1e-9 * max([abs(weight * x) for unit in z for weight, x in zip(w, unit) if x == x], default=0.0)
    n_min = settings.alpha * sum(n)

    def size(units: Sequence[int]) -> int:
        return sum(n[j] for j in units)

    def apart(a: Sequence[int], b: Sequence[int]) -> float:
        return delta(mean_vector(a, z, n), mean_vector(b, z, n), w)

    # minimum-size filtering; choice: smallest first, ties by the better size and then the earlier neighbor
    blocks = [[j] for j in range(len(z))]
    while len(blocks) > 1 and min(map(size, blocks)) < n_min:
        i = min(range(len(blocks)), key=lambda i: size(blocks[i]))
        near = [k for k in (i - 1, i + 1) if 0 <= k < len(blocks)]
        k = min(near, key=lambda k: (apart(blocks[k], blocks[i]), abs(size(blocks[k]) + size(blocks[i]) - n_min)))
        first = min(i, k)
        blocks[first : first + 2] = [blocks[first] + blocks[first + 1]]
    # block formation, between neighbors
    formed = [list(blocks[0])]
    for before, block in itertools.pairwise(blocks):
        if apart(before, block) > tau:
            formed.append(list(block))
        else:
            formed[-1] += block

    # post-processing; choice: cut where the two parts differ most, if by more than tau and both are large enough
    def split(block: list[int]) -> list[list[int]]:
        best, where = tau, None
        for cut in range(1, len(block)):
            left, right = block[:cut], block[cut:]
            if size(left) >= n_min and size(right) >= n_min and apart(left, right) > best:
                best, where = apart(left, right), cut
        return [block] if where is None else split(block[:where]) + split(block[where:])

    return [part for block in formed for part in split(block)]


# Eq. 2


def best_assignment(costs: Array, memory: NDArray[np.int64], ratios: Array, b_mem: float, b_time: float) -> float:
    """The optimum of Eq. 2, over all assignments: by blocks, keeping those that no other dominates."""
    kept = [(0.0, 0, 0.0)]  # cost, memory, time
    for row in range(len(costs)):
        options = [option for option in zip(costs[row], memory[row], ratios[row]) if math.isfinite(option[0])]
        grown = sorted(
            (cost + c, held + b, spent + t)
            for cost, held, spent in kept
            for c, b, t in options
            if held + b <= b_mem and (spent + t) / len(costs) <= b_time + 1e-12
        )
        kept = []
        for state in grown:  # of rising cost
            if not any(other[1] <= state[1] and other[2] <= state[2] + 1e-12 for other in kept):
                kept.append(state)
    return min((cost for cost, *_ in kept), default=math.inf)

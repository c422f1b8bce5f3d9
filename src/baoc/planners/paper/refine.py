"""Algorithm 2 of the paper: which neighboring units behave alike and share a block.

Units are in forward order and a block is a run of them, so a partition is a list of cuts. Merging removes a cut,
splitting adds one, and no unit can be lost or counted twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from baoc.planners.paper.units import Unit

Array = NDArray[np.float64]
Run = tuple[int, int]  # units start, ..., stop - 1

MIN_SHARE = 0.001
"""The paper's alpha, for which it gives no value. At 1%, size alone would merge every attention of Llama 3.2 1B (0.85%
of the model each) with an MLP. At 0.1%, attentions of models with a hundred layers are still candidates, and norms are
not."""

_ROUNDING = 1e-9  # relative to the largest value: smaller differences are rounding errors of means


def refine(
    units: Sequence[Unit],
    vectors: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    min_share: float = MIN_SHARE,
    threshold: float | None = None,
    quantile: float = 0.75,
) -> tuple[tuple[int, ...], ...]:
    """Merge neighboring units into blocks (Alg. 2).

    The difference of two units, or of two blocks, is

        Delta(a, b) = max_k  w_k |z_a,k - z_b,k|

    over the diagnostics that both have. A unit has no diagnostic where its value is NaN or infinite, such as the
    structure residual of vectors. Delta is infinite for units without a common diagnostic, and 0 for two units without
    any, which got no gradient. The vector of a block is the mean over its units, weighted by their sizes.

    The steps of the algorithm, with n_min = alpha |Theta|:

    1. *Minimum size.* While a block is smaller than n_min, the smallest block (of equals, the first) joins the neighbor
       with the smaller Delta; of equals, the one that brings its size closer to n_min, then the earlier one.
    2. *Block formation.* Neighbors share a block unless Delta > tau.
    3. *Splitting.* A block that can be cut into two of at least n_min each with Delta > tau is cut where Delta is
       largest, and its parts are examined again. This separates units that drift apart in small steps.

    No block is smaller than n_min unless it is the only one.

    Args:
        units: in forward order.
        vectors: normalized diagnostics, (units, diagnostics).
        weights: w of Delta, by diagnostic; 1 by default.
        min_share: alpha of the paper.
        threshold: tau of the paper; by default a quantile of all finite Delta between units.
        quantile: which one.

    Returns:
        The unit indices of each block, in order.

    Raises:
        ValueError: an argument has the wrong shape or is out of range.

    >>> parts = [("embed", 900), ("norm", 1), ("attn", 300), ("mlp", 600), ("head", 900)]
    >>> units = [Unit(name, (), numel) for name, numel in parts]
    >>> vectors = [[0.1, 0.5], [0.7, np.nan], [0.8, 0.5], [0.7, 0.4], [0.0, 0.5]]
    >>> refine(units, vectors, threshold=0.5)
    ((0,), (1, 2, 3), (4,))
    >>> refine(units, vectors, threshold=0.05)
    ((0,), (1, 2), (3,), (4,))
    >>> refine(units, vectors, threshold=0.05, min_share=0.2)
    ((0,), (1, 2, 3), (4,))
    """
    scaled = _scaled(vectors, weights, len(units))
    if not (math.isfinite(min_share) and min_share >= 0):
        raise ValueError(f"min_share is {min_share}; it must be a number >= 0.")
    if threshold is not None and not threshold >= 0:
        raise ValueError(f"threshold is {threshold}; it must be a number >= 0, or None for the upper quartile.")
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile is {quantile}; it must be in [0, 1].")
    if not units:
        return ()
    sizes = np.array([unit.numel for unit in units], dtype=np.float64)
    tau = float(np.quantile(_pairwise(scaled), quantile)) if threshold is None else threshold
    noise = _ROUNDING * float(np.fmax.reduce(np.abs(scaled), axis=None, initial=0.0))
    partition = _Partition(scaled, sizes, min_share * sizes.sum(), tau + noise)

    # Alg. 2, boundary selection: every structural boundary is a candidate. Large differences add none, because units
    # are not cut and blocks are runs of neighbors.
    runs = [(index, index + 1) for index in range(len(units))]
    runs = partition.absorb_small(runs)
    runs = partition.form(runs)
    runs = [part for run in runs for part in partition.split(run)]
    # Alg. 2 ends with "re-merge blocks whose parameter count remains below n_min". There are none: splits keep n_min.
    return tuple(tuple(range(*run)) for run in runs)


class _Partition:
    """Vectors, sizes and limits that all steps of the algorithm use."""

    def __init__(self, vectors: Array, sizes: Array, min_size: float, tau: float) -> None:
        self.vectors = vectors  # (units, diagnostics), scaled by the weights
        self.sizes = sizes  # (units,)
        self.min_size = min_size
        self.tau = tau

    def absorb_small(self, runs: list[Run]) -> list[Run]:
        """Alg. 2, minimum-size filtering."""
        runs = list(runs)
        sizes = [self.size(run) for run in runs]
        while len(runs) > 1 and min(sizes) < self.min_size:
            small = sizes.index(min(sizes))
            neighbours = [near for near in (small - 1, small + 1) if 0 <= near < len(runs)]

            def unfitness(near: int, small: int = small) -> tuple[float, float]:
                merged = sizes[near] + sizes[small]
                return self.difference(runs[near], runs[small]), abs(merged - self.min_size)

            left = min(small, min(neighbours, key=unfitness))
            runs[left : left + 2] = [(runs[left][0], runs[left + 1][1])]
            sizes[left : left + 2] = [self.size(runs[left])]
        return runs

    def form(self, runs: list[Run]) -> list[Run]:
        """Alg. 2, block formation."""
        # Candidates are compared with each other, not with the block so far: a large embedding would dominate its mean
        # for many layers. Alg. 2 also requires the minimum size of both, which absorb_small ensures.
        formed = runs[:1]
        for before, run in pairwise(runs):
            if self.difference(before, run) > self.tau:
                formed.append(run)
            else:
                formed[-1] = (formed[-1][0], run[1])
        return formed

    def split(self, run: Run) -> list[Run]:
        """Alg. 2, post-processing: blocks with clearly separated internal statistics."""
        done: list[Run] = []
        todo = [run]
        while todo:  # from first to last
            start, stop = todo.pop()
            cut = self.best_cut((start, stop))
            if cut is None:
                done.append((start, stop))
            else:
                todo += [(cut, stop), (start, cut)]
        return done

    def best_cut(self, run: Run) -> int | None:
        """Return the first unit of the second part if the block should be cut, or ``None``."""
        inside = slice(*run)
        vectors, sizes = self.vectors[inside], self.sizes[inside]
        left = _running_means(vectors, sizes)[:-1]  # row i: the mean of units up to i
        right = _running_means(vectors[::-1], sizes[::-1])[-2::-1]  # row i: of those after i
        allowed = np.cumsum(sizes)[:-1] >= self.min_size
        allowed &= np.cumsum(sizes[::-1])[-2::-1] >= self.min_size
        differences = np.where(allowed, _difference(left, right), 0.0)
        if not (differences > self.tau).any():
            return None
        return run[0] + int(differences.argmax()) + 1

    def difference(self, a: Run, b: Run) -> float:
        return float(_difference(self.mean(a), self.mean(b)))

    def mean(self, run: Run) -> Array:
        mean: Array = _running_means(self.vectors[slice(*run)], self.sizes[slice(*run)])[-1]
        return mean

    def size(self, run: Run) -> float:
        return float(self.sizes[slice(*run)].sum())


def _scaled(vectors: ArrayLike, weights: ArrayLike | None, units: int) -> Array:
    """Return weighted diagnostics, because w |a - b| = |w a - w b|, without those of weight 0; NaN if not finite."""
    values = np.array(vectors, dtype=np.float64)
    if units == 0 and values.size == 0:
        values = values.reshape(0, 0)
    if values.ndim != 2 or len(values) != units:
        raise ValueError(f"vectors have shape {values.shape}; for {units} units they must be ({units}, diagnostics).")
    scale = np.ones(values.shape[1]) if weights is None else np.asarray(weights, dtype=np.float64)
    if scale.shape != values.shape[1:] or not (np.isfinite(scale) & (scale >= 0)).all():
        raise ValueError(f"weights are {scale.tolist()}; they must be {values.shape[1]} finite numbers >= 0.")
    values[~np.isfinite(values)] = np.nan
    scaled: Array = values[:, scale > 0] * scale[scale > 0]
    return scaled


def _difference(a: Array, b: Array) -> Array:
    """Return Delta of vectors (..., diagnostics)."""
    known: Array = np.fmax.reduce(np.abs(a - b), axis=-1, initial=-np.inf)  # fmax ignores NaN
    both_empty = np.isnan(a).all(axis=-1) & np.isnan(b).all(axis=-1)
    return np.where(known >= 0, known, np.where(both_empty, 0.0, np.inf))


def _pairwise(vectors: Array) -> Array:
    """Return the finite Delta of all pairs; [0] if there is none."""
    rows = [_difference(vectors[index], vectors[index + 1 :]) for index in range(len(vectors))]
    pairs = np.concatenate(rows)
    comparable = pairs[np.isfinite(pairs)]
    return comparable if len(comparable) else np.zeros(1)


def _running_means(vectors: Array, sizes: Array) -> Array:
    """Return in row i the means over units 0, ..., i that have a diagnostic, weighted by size."""
    weight = np.where(np.isnan(vectors), 0.0, np.maximum(sizes, 1.0)[:, None])  # empty tensors count as one element
    total = np.cumsum(np.where(weight > 0, vectors, 0.0) * weight, axis=0)
    with np.errstate(invalid="ignore"):
        means: Array = total / np.cumsum(weight, axis=0)  # 0 / 0 = NaN: no unit has it
    return means

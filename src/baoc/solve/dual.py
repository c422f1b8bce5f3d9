"""The Lagrangian dual: the best price per byte and per unit of time.

Put prices p = (p_memory, p_time) >= 0 on what the budgets limit, and the blocks come apart: each takes the
configuration with the least ``cost + p . weights``, all in one vectorised pass. Summed over blocks, less what the
budgets are worth,

    L(p) = sum_i min_c (cost_ic + p . weights_ic) - p . limits

is a lower bound on the cost of every assignment within the limits. It is concave and piecewise linear in the two
prices; its maximum is the value of the linear relaxation, and there the prices are the budgets' shadow prices.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baoc.solve.problem import COST, MEMORY, TIME, Floats, Integers

MOST_PASSES = 80
MOST_PIVOTS = 40
TOLERANCE = 1e-9  # of L. Any prices give a valid bound, so this decides how much is left to search, not what is found


class Dual:
    """L of some weights. Every pass is remembered, and holds for any limits: a frontier shares one `Dual`."""

    def __init__(self, weights: Floats) -> None:
        self.weights = weights
        self.prices = np.empty((0, 2))  # (passes, 2)
        self.totals = np.empty((0, 3))  # (passes, 3): cost, memory and time of the best assignment at these prices
        self._choices: list[npt.NDArray[np.unsignedinteger]] = []
        self._small = np.min_scalar_type(weights.shape[2] - 1)  # a frontier remembers many choices
        self._priced, self._term = np.empty((2, *weights.shape[1:]))
        self._pass(np.zeros(2))

    def choice(self, index: int) -> Integers:
        """(blocks,): the best assignment at the prices of that pass."""
        return self._choices[index].astype(np.int64)

    def values(self, limits: Floats) -> Floats:
        """(passes,): L at all prices seen so far."""
        values: Floats = self.totals[:, COST] + (self.prices * (self.totals[:, 1:] - limits)).sum(axis=1)
        return values

    def maximise(self, limits: Floats, feasible: Floats) -> int:
        """Make passes until one is at the maximum of L. Returns how many it took.

        Each pass yields an assignment k of cost c_k that exceeds the limits by e_k, and L(p) <= c_k + p . e_k for any
        p. Kelley's method asks next for the prices at which the least of these planes is highest:

            max t   such that   t <= c_k + p . e_k for all k,   p >= 0.

        The dual of this linear program mixes assignments so that they fit on average: min sum_k w_k c_k such that
        sum_k w_k e_k <= 0, sum_k w_k = 1, w >= 0. It has three rows only, and any assignment that fits (`feasible` are
        its totals) starts it, so a simplex method with 3 x 3 systems is enough.
        """
        scale = np.maximum(limits, 1)
        planes = np.vstack([feasible, self.totals])
        columns = np.hstack([[[1, 0], [0, 1], [0, 0]], _columns(planes, limits, scale)])  # the first two are slacks
        costs = np.concatenate([[0, 0], planes[:, COST]])
        basis = [0, 1, 2]
        for passes in range(MOST_PASSES):
            *negative, upper = _simplex(columns, costs, basis)
            price = np.maximum(-np.array(negative), 0) / scale
            if (self.prices == price).all(axis=1).any():
                return passes
            self._pass(price)
            newest = self.totals[-1]
            if newest[COST] + price @ (newest[1:] - limits) >= upper - TOLERANCE * abs(upper):
                return passes + 1
            columns = np.hstack([columns, _columns(newest[None], limits, scale)])
            costs = np.append(costs, newest[COST])
        return MOST_PASSES

    def _pass(self, price: Floats) -> None:
        np.multiply(self.weights[MEMORY], price[0], out=self._priced)
        np.multiply(self.weights[TIME], price[1], out=self._term)
        self._priced += self._term
        self._priced += self.weights[COST]
        choice = self._priced.argmin(axis=1)
        self.prices = np.vstack([self.prices, price])
        self.totals = np.vstack([self.totals, self.weights[:, np.arange(len(choice)), choice].sum(axis=1)])
        self._choices.append(choice.astype(self._small))


def _columns(totals: Floats, limits: Floats, scale: Floats) -> Floats:
    return np.vstack([((totals[:, 1:] - limits) / scale).T, np.ones(len(totals))])


def _simplex(columns: Floats, costs: Floats, basis: list[int]) -> Floats:
    """Minimise ``costs . w`` such that ``columns @ w = (0, 0, 1)``, w >= 0, from a feasible basis, changed in place.

    Returns the prices of the three rows. To stop early (a cycle, a singular basis) would cost passes, not correctness.
    """
    right = np.array([0.0, 0.0, 1.0])
    prices = np.zeros(3)
    for _ in range(MOST_PIVOTS):
        matrix = columns[:, basis]
        try:
            prices = np.linalg.solve(matrix.T, costs[basis])
            reduced = costs - prices @ columns
            entering = int(reduced.argmin())
            if reduced[entering] >= -1e-12 * (1 + abs(prices[2])):
                break
            weights, change = np.linalg.solve(matrix, np.stack([right, columns[:, entering]], axis=1)).T
        except np.linalg.LinAlgError:
            break
        falling = change > 1e-12
        if not falling.any():
            break
        ratios = np.full(3, np.inf)
        ratios[falling] = np.maximum(weights[falling], 0) / change[falling]
        basis[int(ratios.argmin())] = entering
    return prices

"""The Lagrangian dual: the best price per byte and per unit of time.

With prices p = (p_memory, p_time) >= 0 on memory and time, every block is a problem of its own: it takes the
configuration with the least ``cost + p . weights``. One vectorised pass does this for all blocks. The sum over blocks
minus the value of the budgets,

    L(p) = sum_i min_c (cost_ic + p . weights_ic) - p . limits,

is a lower bound on the cost of every assignment within the limits. L is concave and piecewise linear. Its maximum is
the value of the linear relaxation, and the prices at the maximum are the budgets' shadow prices.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baoc.solve.problem import COST, MEMORY, TIME, Floats, Integers

MOST_PASSES = 80
MOST_PIVOTS = 40
TOLERANCE = 1e-9  # of L. Any prices give a valid bound, so this affects the effort of the search but not its result
RIGHT = np.array([0.0, 0.0, 1.0])  # of the linear program's rows


class Dual:
    """The function L of some weights. It stores every pass; passes hold for any limits, so a frontier shares them."""

    def __init__(self, weights: Floats) -> None:
        self.weights = weights
        self.prices = np.empty((0, 2))  # (passes, 2)
        self.totals = np.empty((0, 3))  # (passes, 3): cost, memory and time of the best assignment at these prices
        self._choices: list[npt.NDArray[np.unsignedinteger]] = []
        self._small = np.min_scalar_type(weights.shape[2] - 1)  # a frontier remembers many choices
        self._priced, self._term = np.empty((2, *weights.shape[1:]))
        self._pass(np.zeros(2))

    def choice(self, index: int) -> Integers:
        """Return (blocks,): the best assignment at the prices of a pass."""
        return self._choices[index].astype(np.int64)

    def values(self, limits: Floats) -> Floats:
        """Return (passes,): L at the prices of all passes."""
        values: Floats = self.totals[:, COST] + (self.prices * (self.totals[:, 1:] - limits)).sum(axis=1)
        return values

    def maximise(self, limits: Floats, feasible: Floats) -> int:
        """Make passes until one is at the maximum of L, and return their number.

        Each pass yields an assignment k of cost c_k that exceeds the limits by e_k, and L(p) <= c_k + p . e_k for any
        p. Kelley's method makes the next pass at the prices where the least of these planes is highest:

            max t   such that   t <= c_k + p . e_k for all k,   p >= 0.

        The dual of this linear program mixes assignments so that they fit on average: min sum_k w_k c_k such that
        sum_k w_k e_k <= 0, sum_k w_k = 1, w >= 0. It has three rows only, so a simplex method with 3 x 3 systems is
        enough. It starts from any assignment that fits.

        Args:
            limits: (2,), of memory and of time.
            feasible: (3,), the totals of an assignment within the limits.
        """
        scale = np.maximum(limits, 1)
        columns, costs = self._program(limits, feasible)
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

    def mixture(self, limits: Floats, feasible: Floats) -> Floats:
        """Return how the linear relaxation's solution mixes assignments: (1 + passes,) weights that add up to 1.

        The first weight is that of the assignment with the totals `feasible`.
        """
        columns, costs = self._program(limits, feasible)
        basis = [0, 1, 2]
        _simplex(columns, costs, basis)
        weights = np.zeros(len(costs))
        try:
            weights[basis] = np.linalg.solve(columns[:, basis], RIGHT)
        except np.linalg.LinAlgError:
            weights[2] = 1
        mixture: Floats = weights[2:]
        return mixture

    def _program(self, limits: Floats, feasible: Floats) -> tuple[Floats, Floats]:
        """Return the columns and costs of the linear program of `maximise`. The first two are slacks."""
        planes = np.vstack([feasible, self.totals])
        columns = np.hstack([[[1, 0], [0, 1], [0, 0]], _columns(planes, limits, np.maximum(limits, 1))])
        return columns, np.concatenate([[0, 0], planes[:, COST]])

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

    Returns the prices of the three rows. If it stops early (a cycle, a singular basis), `Dual` makes more passes, and
    bounds remain valid.
    """
    prices = np.zeros(3)
    for _ in range(MOST_PIVOTS):
        matrix = columns[:, basis]
        try:
            prices = np.linalg.solve(matrix.T, costs[basis])
            reduced = costs - prices @ columns
            entering = int(reduced.argmin())
            if reduced[entering] >= -1e-12 * (1 + abs(prices[2])):
                break
            weights, change = np.linalg.solve(matrix, np.stack([RIGHT, columns[:, entering]], axis=1)).T
        except np.linalg.LinAlgError:
            break
        falling = change > 1e-12
        if not falling.any():
            break
        ratios = np.full(3, np.inf)
        ratios[falling] = np.maximum(weights[falling], 0) / change[falling]
        basis[int(ratios.argmin())] = entering
    return prices

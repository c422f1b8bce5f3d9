"""The Lagrangian dual: the best price per byte and per unit of time.

Put a price p = (p_memory, p_time) >= 0 on what the budgets limit, and the blocks come apart: each takes the configuration with
the least ``cost + p . weights``, in one vectorised pass. With a_i the cheapest such value of block i,

    L(p) = sum_i a_i(p) - p . limits

is a lower bound on the cost of every feasible assignment, concave and piecewise linear in the two prices. Its maximum is the
value of the linear relaxation, and the maximising prices are the shadow prices of the budgets.
"""

from __future__ import annotations

import numpy as np

from baoc.solve.problem import Floats, Integers

MOST_PASSES = 80
MOST_PIVOTS = 40
TOLERANCE = 1e-9  # of the dual's value: enough to see which entries matter. The bound is valid at any price.


class Dual:
    """Remembers every pass. A pass is one assignment, and a cut for *any* limits: a frontier shares one `Dual`."""

    def __init__(self, weights: Floats) -> None:
        self.weights = weights
        self.prices = np.empty((0, 2))  # (passes, 2)
        self.totals = np.empty((0, 3))  # (passes, 3): cost, memory and time of the assignment that is best at these prices
        self.choices: list[Integers] = []
        self._everyone = np.arange(weights.shape[1])
        self._priced = np.empty(weights.shape[1:])
        self._term = np.empty(weights.shape[1:])
        self._pass(np.zeros(2))

    def reduced_costs(self, price: Floats) -> Floats:
        """(blocks, configurations): what an entry costs above the cheapest of its block, at these prices."""
        priced = self._at(price)
        return priced - priced.min(axis=1, keepdims=True)

    def values(self, limits: Floats) -> Floats:
        """L at every price seen so far."""
        excess: Floats = self.totals[:, 1:] - limits
        return self.totals[:, 0] + (self.prices * excess).sum(axis=1)

    def maximise(self, limits: Floats, feasible: Floats) -> int:
        """Pass over the arrays until L is at its maximum. Returns how many passes that took.

        Each pass gives an assignment k with cost c_k and excess e_k = weights - limits, and L(p) <= c_k + p . e_k for all p.
        The prices for the next pass maximise the least of these planes. As a linear program this is

            max t   s.t.  t <= c_k + p . e_k for every k,  p >= 0

        with a dual that mixes assignments: min sum w_k c_k, s.t. sum w_k e_k <= 0, sum w_k = 1, w >= 0. That one has three
        rows, and any feasible assignment (whose `totals` are given) starts it: a simplex of 3 x 3 systems is all it takes.
        """
        scale = np.maximum(limits, 1)
        planes = np.vstack([feasible, self.totals])
        # Columns of the program: two slacks, the feasible assignment, then all passes.
        columns = np.hstack([[[1, 0], [0, 1], [0, 0]], _columns(planes, limits, scale)])
        costs = np.concatenate([[0, 0], planes[:, 0]])
        basis = [0, 1, 2]
        passes = 0
        while passes < MOST_PASSES:
            row_prices = _simplex(columns, costs, basis)
            upper = row_prices[2]
            price = np.maximum(-row_prices[:2], 0) / scale
            if (self.prices == price).all(axis=1).any():
                break
            self._pass(price)
            passes += 1
            newest = self.totals[-1]
            if newest[0] + price @ (newest[1:] - limits) >= upper - TOLERANCE * abs(upper):
                break
            columns = np.hstack([columns, _columns(newest[None], limits, scale)])
            costs = np.append(costs, newest[0])
        return passes

    def _pass(self, price: Floats) -> None:
        choice = self._at(price).argmin(axis=1)
        self.prices = np.vstack([self.prices, price])
        self.totals = np.vstack([self.totals, self.weights[:, self._everyone, choice].sum(axis=1)])
        self.choices.append(choice)

    def _at(self, price: Floats) -> Floats:
        np.multiply(self.weights[1], price[0], out=self._priced)
        np.multiply(self.weights[2], price[1], out=self._term)
        self._priced += self._term
        self._priced += self.weights[0]
        return self._priced


def _columns(totals: Floats, limits: Floats, scale: Floats) -> Floats:
    return np.vstack([((totals[:, 1:] - limits) / scale).T, np.ones(len(totals))])


def _simplex(columns: Floats, costs: Floats, basis: list[int]) -> Floats:
    """Minimise costs . w subject to columns @ w = (0, 0, 1), w >= 0, from a feasible basis (updated in place).

    Returns the prices of the three rows. Stopping early (a cycle, a singular basis) costs passes, never correctness.
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

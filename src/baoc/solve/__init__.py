"""The allocation problem: one configuration per block, least risk, within a memory and a time budget.

This is the paper's MILP (Eq. baoc_milp), a multiple-choice knapsack with two budgets. Arrays go in; an assignment, a
proven bound and the prices of both budgets come out. Nothing here knows of torch or of what a configuration is.

How it is solved, one file for each step:

- `problem`: costs, bytes and times become whole numbers, so that sums are exact and a budget holds to the byte;
- `dual`: a price per byte and a price per unit of time take the problem apart into blocks, and the best two prices,
  found in some twenty passes over the arrays, bound every assignment from below;
- `core`: the few blocks and configurations that the bound leaves open are searched exactly, by dynamic programming;
- `solver`: the loop around them, frontiers, and what to say when nothing fits.
"""

from baoc.solve.problem import Infeasible, Problem, Solution
from baoc.solve.solver import frontier, smallest_memory, smallest_time, solve

__all__ = ["Infeasible", "Problem", "Solution", "frontier", "smallest_memory", "smallest_time", "solve"]

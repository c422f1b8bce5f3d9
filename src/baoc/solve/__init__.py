"""The allocation problem: one configuration per block, least risk, within a memory and a time budget.

This is the paper's MILP (Eq. baoc_milp), a multiple-choice knapsack with two budgets. Arrays go in; an assignment, a proven
bound and the price of both budgets come out. Nothing here knows of torch, of blocks' names, or of what a configuration is.

How it is solved, one file for each step:

- `problem`: costs, bytes and times become whole numbers, so that sums are exact and a budget holds to the byte;
- `dual`: the Lagrangian dual has only two multipliers, a price per byte and a price per unit of time; a few dozen passes over
  the arrays find the best two, which bound every assignment from below;
- `core`: what the bound leaves open is a small core of blocks and configurations, searched exactly by dynamic programming;
- `solver`: the loop around them, ties, and what to say when nothing fits.
"""

from baoc.solve.problem import Infeasible, Problem, Solution
from baoc.solve.solver import frontier, smallest_memory, smallest_time, solve

__all__ = ["Infeasible", "Problem", "Solution", "frontier", "smallest_memory", "smallest_time", "solve"]

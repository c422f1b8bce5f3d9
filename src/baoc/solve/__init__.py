"""The allocation problem: choose configurations of least total cost within a memory and a time budget.

There are two forms of it. `solve` chooses one configuration for each block. This is the paper's MILP (Eq. baoc_milp), a
multiple-choice knapsack with two budgets. `solve_classes` chooses how many tensors of each class get a configuration;
tensors of the same role and shape are interchangeable, and many rows become one. The input is arrays. The output is an
assignment, a proven bound and the prices of both budgets. The package does not import torch.

The files, in the order of the steps:

- `problem` rounds costs, bytes and times to whole numbers, so that sums are exact and a budget holds to the byte;
- `dual` finds the best price per byte and per unit of time. At given prices every block is a problem of its own, and
  the sum of their minima is a lower bound on the cost of every assignment;
- `core` searches the few blocks and configurations that the bound leaves open, by dynamic programming;
- `solver` runs these steps for one budget or many, and reports what is feasible if nothing fits;
- `class_core` and `classes` do the same for classes.
"""

from baoc.solve.classes import ClassProblem, ClassSolution, class_frontier, smallest_class_memory, solve_classes
from baoc.solve.problem import Infeasible, Problem, Solution
from baoc.solve.solver import frontier, smallest_memory, smallest_time, solve

__all__ = [
    "ClassProblem",
    "ClassSolution",
    "Infeasible",
    "Problem",
    "Solution",
    "class_frontier",
    "frontier",
    "smallest_class_memory",
    "smallest_memory",
    "smallest_time",
    "solve",
    "solve_classes",
]

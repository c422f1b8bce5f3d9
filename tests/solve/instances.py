"""Problems like those of real models, and HiGHS as a judge."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from baoc.solve import ClassProblem, Problem

BYTES = (8, 4, 2.03, 4.01, 2.01, 1.03, 4, 2, 1.02, 0.01, 0)
SLACK, BINDING = 1.3, 0.8
CLASSES = ((64, 4096, 4096, 0), (64, 1024, 4096, 0), (96, 14336, 4096, 1), (1, 128256, 4096, 2), (1, 128256, 4096, 3))
VECTORS = (65, 4096, 1, 4)  # as above: tensors, rows, columns, role
CLASS_BYTES = (8, 4, 6, 4, 2, 3, 5, 4, 2, 1, 1, 2, 0.5, 0)  # per element
ROW_BYTES = (0, 0, 4, 4, 8, 4, 4, 8, 4, 8, 12, 0, 12, 0)  # per row
CLASS_SHARES = (0.1, 0.25, 0.5, 0.75)  # of 8 bytes per element


def instance(blocks: int, configurations: int, time_budget: float = SLACK, seed: int = 0) -> Problem:
    random = np.random.default_rng(seed)
    sizes = np.exp(random.uniform(np.log(1e4), np.log(1e8), blocks)).astype(np.int64)
    per_parameter = np.resize(BYTES, configurations)
    memory = np.ceil(sizes[:, None] * per_parameter).astype(np.int64)
    cheapness = 1 - per_parameter / 8
    risk = 3 * cheapness * random.random(memory.shape) + 0.3 * random.random(memory.shape)
    times = random.uniform(0.5, 1.6, memory.shape)
    return Problem(np.clip(risk, 0, 3), memory, times, int(4 * sizes.sum()) // 2, time_budget)


def class_instance(share: float, time_budget: float | None = None, seed: int = 0) -> ClassProblem:
    """Return the class problem of a Llama with 8B parameters.

    Args:
        share: Memory budget as a fraction of 8 bytes per element.
        time_budget: Total time, where 1 is about what a configuration of average speed takes; None for no limit.
        seed: Of the costs and times. Within a role, both are in proportion to the number of elements.
    """
    random = np.random.default_rng(seed)
    counts, rows, columns, roles = np.array([*CLASSES, VECTORS]).T
    elements, configurations = rows * columns, len(CLASS_BYTES)
    per_element = np.array(CLASS_BYTES)
    memory = np.floor(elements[:, None] * per_element + rows[:, None] * np.array(ROW_BYTES)).astype(np.int64)
    effects = np.round(3 * random.random((roles.max() + 1, configurations)) * (1 - per_element / 9) ** 2, 3)
    size = elements[:, None] / (counts @ elements)
    cost = effects[roles] * size
    cost[-1, 1:] = np.inf  # vectors keep the first configuration
    times = np.round(random.uniform(0.5, 1.6, configurations), 2) * size
    return ClassProblem(counts, cost, memory, times, int(share * 8 * (counts @ elements)), time_budget)


@dataclass(frozen=True)
class Judgement:
    """What HiGHS says of a problem."""

    seconds: float
    objective: float
    relative_gap: float
    optimal: bool  # to the gap asked for


def highs(
    problem: Problem | ClassProblem, *, relative_gap: float = 0.0, time_limit: float = 60.0, relaxed: bool = False
) -> Judgement:
    """Give the MILP as it stands, or its linear relaxation, to HiGHS."""
    import highspy

    blocks, configurations = problem.cost.shape
    counts, time_budget = np.ones(blocks), problem.time_budget
    if isinstance(problem, ClassProblem):
        counts = problem.counts.astype(float)
    elif time_budget is not None:
        time_budget *= blocks
    entries = problem.cost.size
    scale = max(1, int(problem.memory.max()))
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = entries, blocks + 2
    allowed = np.isfinite(problem.cost).ravel()
    model.col_cost_ = np.where(allowed, problem.cost.ravel(), 0)
    model.col_lower_, model.col_upper_ = np.zeros(entries), allowed * np.repeat(counts, configurations)
    budgets = [
        np.inf if problem.memory_budget is None else problem.memory_budget / scale,
        np.inf if time_budget is None else time_budget,
    ]
    model.row_lower_ = np.concatenate([counts, [-np.inf, -np.inf]])
    model.row_upper_ = np.concatenate([counts, budgets])
    rows = np.stack([np.repeat(np.arange(blocks), configurations), *np.full((2, entries), [[blocks], [blocks + 1]])])
    values = np.stack([np.ones(entries), problem.memory.ravel() / scale, problem.time.ravel()])
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = 3 * np.arange(entries + 1)
    model.a_matrix_.index_, model.a_matrix_.value_ = rows.T.ravel(), values.T.ravel()
    if not relaxed:
        model.integrality_ = [highspy.HighsVarType.kInteger] * entries
    solver = highspy.Highs()
    options = {
        "output_flag": False,
        "threads": 1,
        "mip_rel_gap": relative_gap,
        "mip_abs_gap": 0.0,
        "time_limit": time_limit,
    }
    for name, value in options.items():
        solver.setOptionValue(name, value)
    began = time.perf_counter()
    solver.passModel(model)
    solver.run()
    seconds = time.perf_counter() - began
    info = solver.getInfo()
    optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return Judgement(seconds, info.objective_function_value, 0.0 if relaxed else info.mip_gap, optimal)

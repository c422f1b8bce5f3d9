"""The paper's planner: sampling, metrics, risk, partition and the MILP of Algorithms 1 and 2."""

from baoc.planners.paper.planner import PaperPlanner
from baoc.planners.paper.statistics import GradientStatistics, StatisticsError

__all__ = ["GradientStatistics", "PaperPlanner", "StatisticsError"]

"""The public names of ``import baoc``."""

from baoc._version import __version__
from baoc.core.codecs import register_codec
from baoc.core.configuration import CATALOG, EXTENDED, Configuration, ConfigurationError, parse
from baoc.core.fused import splits_of
from baoc.core.mechanisms import register_mechanism
from baoc.core.splits import Split
from baoc.optim.checkpoint import CheckpointError
from baoc.optim.low_bits import fp32_state_dict, load_fp32_state_dict, to_low_precision
from baoc.optim.optimizer import BlockOptimizer
from baoc.optim.release import ReleasedGradients, release_gradients
from baoc.optim.state import state_bytes
from baoc.optim.torch_state import to_torch
from baoc.optimizer import BAOC
from baoc.plan import Block, Plan, PlanError, collect_statistics, make_plan
from baoc.planners import Budget, EffectPlanner, ModelFacts, PaperPlanner
from baoc.planners.paper.risk import register_risk
from baoc.planners.paper.statistics import GradientStatistics, StatisticsCollector, StatisticsError
from baoc.resume import prepare_for_load

__all__ = [
    "BAOC",
    "CATALOG",
    "EXTENDED",
    "Block",
    "BlockOptimizer",
    "Budget",
    "CheckpointError",
    "Configuration",
    "ConfigurationError",
    "EffectPlanner",
    "GradientStatistics",
    "ModelFacts",
    "PaperPlanner",
    "Plan",
    "PlanError",
    "ReleasedGradients",
    "Split",
    "StatisticsCollector",
    "StatisticsError",
    "__version__",
    "collect_statistics",
    "fp32_state_dict",
    "load_fp32_state_dict",
    "make_plan",
    "parse",
    "prepare_for_load",
    "register_codec",
    "register_mechanism",
    "register_risk",
    "release_gradients",
    "splits_of",
    "state_bytes",
    "to_low_precision",
    "to_torch",
]

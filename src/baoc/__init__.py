"""baoc: optimizer memory as a budget you set."""

from baoc._version import __version__
from baoc.configurator import BAOC
from baoc.core.configuration import CATALOG, Configuration, ConfigurationError, parse
from baoc.core.plan import Block, Plan, PlanError
from baoc.optim.checkpoint import CheckpointError
from baoc.optim.measure import state_bytes
from baoc.optim.optimizer import BlockOptimizer
from baoc.optim.torch_state import to_torch
from baoc.planning.planner import plan
from baoc.profiling.profile import Profile, ProfileError
from baoc.profiling.profiler import Profiler, profile

__all__ = [
    "BAOC",
    "CATALOG",
    "Block",
    "BlockOptimizer",
    "CheckpointError",
    "Configuration",
    "ConfigurationError",
    "Plan",
    "PlanError",
    "Profile",
    "ProfileError",
    "Profiler",
    "__version__",
    "parse",
    "plan",
    "profile",
    "state_bytes",
    "to_torch",
]

"""baoc: optimizer memory as a budget you set."""

from baoc._version import __version__
from baoc.checkpoint import CheckpointError
from baoc.configuration import CATALOG, Configuration, ConfigurationError, parse
from baoc.configurator import BAOC
from baoc.measure import state_bytes
from baoc.optimizer import BlockOptimizer
from baoc.plan import Block, Plan, PlanError
from baoc.planner import plan
from baoc.profiler import Profiler, profile
from baoc.profiles import Profile, ProfileError
from baoc.torch_state import to_torch

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

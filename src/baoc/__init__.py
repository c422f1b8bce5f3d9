"""baoc: optimizer memory as a budget you set."""

from baoc._version import __version__
from baoc.configurator import BAOC, lay_out_for
from baoc.core.codecs import register_codec
from baoc.core.configuration import BEYOND, CATALOG, Configuration, ConfigurationError, parse
from baoc.core.mechanisms import register_mechanism
from baoc.optim.checkpoint import CheckpointError
from baoc.optim.measure import state_bytes
from baoc.optim.optimizer import BlockOptimizer
from baoc.optim.torch_state import to_torch
from baoc.plan import Block, Plan, PlanError, make_plan, profile
from baoc.profiling.profile import Profile, ProfileError
from baoc.profiling.profiler import Profiler

__all__ = [
    "BAOC",
    "BEYOND",
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
    "lay_out_for",
    "make_plan",
    "parse",
    "profile",
    "register_codec",
    "register_mechanism",
    "state_bytes",
    "to_torch",
]

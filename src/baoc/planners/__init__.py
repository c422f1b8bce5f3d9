"""What turns a model and a budget into a plan: measured effects (the default), or the paper's Algorithm 1."""

from baoc.planners.base import Budget, Planner
from baoc.planners.effects import EffectPlanner
from baoc.planners.model_facts import ModelFacts
from baoc.planners.paper import PaperPlanner

__all__ = ["Budget", "EffectPlanner", "ModelFacts", "PaperPlanner", "Planner"]

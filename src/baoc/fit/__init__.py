"""Will it fit? What training a model takes on every rank, and the best plan for what is left."""

from baoc.fit.activations import Activations, trace
from baoc.fit.answer import Answer, Change, Choice, Fitter
from baoc.fit.memory import PRECISIONS, FitError, Measured, Memory, Setup

__all__ = [
    "PRECISIONS",
    "Activations",
    "Answer",
    "Change",
    "Choice",
    "FitError",
    "Fitter",
    "Measured",
    "Memory",
    "Setup",
    "trace",
]

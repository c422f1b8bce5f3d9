"""Estimate the memory of a training step on every rank, and find the best plan that fits."""

from baoc.tools.fit.activations import Activations, trace
from baoc.tools.fit.answer import Answer, Change, Choice, Fitter
from baoc.tools.fit.memory import PRECISIONS, FitError, Measured, Memory, Setup

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

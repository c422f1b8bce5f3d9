"""The laws that carry effects to other scales: what they are fitted to, the fit, and its page."""

from __future__ import annotations

from experiments.scaling.fit import fitted
from experiments.scaling.page import text

__all__ = ["fitted", "text"]

"""``BAOC`` (Alg. 1), cut by its jobs: wishes, the warm-up, agreement between ranks, and going on after a resume."""

from baoc.configurator.layout import lay_out_for
from baoc.configurator.optimizer import BAOC

__all__ = ["BAOC", "lay_out_for"]

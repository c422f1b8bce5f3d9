"""Which parameters are judged and configured together: a structural scan, then the paper's Algorithm 2.

The scan reads candidate *units* (attention, MLP, norm, embedding, head ...) off the module tree. :func:`refine` merges
neighbours that behave alike into *blocks*, given one vector of diagnostics per unit; where these come from is not its
business. A tensor is never split, and every parameter is in exactly one unit and in exactly one block.

>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10))
>>> units = structural_units(model)
>>> groups = refine(units, [[0.1, 0.8], [0.2, 0.7], [0.9, 0.1]], threshold=0.5)
>>> blocks(units, groups)
[('0..1', ('0.weight', '0.bias', '1.weight', '1.bias')), ('2', ('2.weight', '2.bias'))]
"""

from baoc.planning.partition.refine import MIN_SHARE, refine
from baoc.planning.partition.structure import GRANULARITIES, Granularity, structural_units
from baoc.planning.partition.units import Unit, blocks

__all__ = ["GRANULARITIES", "MIN_SHARE", "Granularity", "Unit", "blocks", "refine", "structural_units"]

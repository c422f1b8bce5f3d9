"""How many bytes an optimizer's step must move through memory at the least.

The rule, for ours and for peers alike: a step reads and writes every parameter once, reads every gradient once, and
reads and writes every tensor of its state once. Two kinds of update cannot do with one pass:

- a factored second moment needs the sums over all rows before it can scale the first: gradients are read once more;
- balanced gradients need the sums over rows and columns first: gradients and state are read once more for each turn,
  rows and columns in one;
- Adafactor's step length needs the RMS of the whole direction and of the parameter before it moves any: gradients,
  state and parameters are all read once more.

So a factored AdamW reads its gradients twice and Adafactor three times. What is read again is counted as if it came
from memory; for small tensors it comes from a cache, and the share of the bandwidth is overstated by as much.
"""

from __future__ import annotations

import math

import torch

from baoc import BlockOptimizer, Configuration, parse, state_bytes
from baoc.core.spec import Reach, Shape


def bytes_moved(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of one step of an optimizer that has made one, for fp32 parameters and gradients."""
    moved = 2 * state_bytes(optimizer)
    for configuration, shape in _forms(optimizer):
        layout = configuration.layout(shape)
        turns = layout.mechanism.norms.count("col") or len(layout.mechanism.norms)
        again = turns or layout.mechanism.reach is Reach.SUMS
        absorbs = any(stored.reach is Reach.SUMS for stored in layout.formats)
        param_accesses, gradient_reads = 2 + (again and not turns), 1 + again + absorbs
        moved += 4 * math.prod(shape) * (param_accesses + gradient_reads) + again * layout.nbytes
    return moved


def _forms(optimizer: torch.optim.Optimizer) -> list[tuple[Configuration, Shape]]:
    """What every parameter is updated with: for a peer, our configuration that needs the same passes."""
    if isinstance(optimizer, BlockOptimizer):
        blocks = optimizer.plan.blocks
        return [(block.configuration, shape) for block in blocks for shape in block.parameters.values()]
    twin = parse("adafactor" if isinstance(optimizer, torch.optim.Adafactor) else "adamw-32")
    return [(twin, tuple(param.shape)) for group in optimizer.param_groups for param in group["params"]]

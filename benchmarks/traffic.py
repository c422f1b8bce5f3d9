"""How many bytes an optimizer's step must move through memory at the least, for ours and for peers alike.

The rule is `baoc.planners.cost.bytes_moved`. What is read again is counted as if it came from memory; for small tensors
it comes from a cache, and the share of the bandwidth is overstated by as much.
"""

from __future__ import annotations

import torch

from baoc import BlockOptimizer, Configuration, parse, state_bytes
from baoc.core.spec import Shape
from baoc.planners import cost


def bytes_moved(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of one step of an optimizer that has made one, for fp32 parameters and gradients."""
    forms = _forms(optimizer)
    ours = sum(configuration.state_bytes(shape) for configuration, shape in forms)
    # a peer may hold more than our configuration that needs the same passes
    return sum(cost.bytes_moved(shape, configuration) for configuration, shape in forms) + 2 * (
        state_bytes(optimizer) - ours
    )


def _forms(optimizer: torch.optim.Optimizer) -> list[tuple[Configuration, Shape]]:
    """What every parameter is updated with: for a peer, our configuration that needs the same passes."""
    if isinstance(optimizer, BlockOptimizer):
        blocks = optimizer.plan.blocks
        return [(block.configuration, shape) for block in blocks for shape in block.parameters.values()]
    twin = parse("adafactor" if isinstance(optimizer, torch.optim.Adafactor) else "adamw-32")
    return [(twin, tuple(param.shape)) for group in optimizer.param_groups for param in group["params"]]

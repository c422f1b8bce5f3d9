"""From what a framework hands back to the optimizer within it."""

from __future__ import annotations

from typing import Any

from baoc.optim.optimizer import BlockOptimizer

_INSIDE = ("optimizer", "_optimizer")  # Accelerate's and DeepSpeed's; Lightning's


def unwrap(wrapper: Any) -> BlockOptimizer:
    """The optimizer inside of Accelerate's, Lightning's or DeepSpeed's wrappers of it, however many there are.

    So ``unwrap(optimizer).plan`` works on what ``accelerator.prepare`` returned, whose class knows the methods of
    ``torch.optim`` only.

    >>> import torch
    >>> optimizer = BlockOptimizer(torch.nn.Linear(2, 2))
    >>> class Wrapper:
    ...     def __init__(self, optimizer):
    ...         self.optimizer = optimizer
    >>> unwrap(Wrapper(Wrapper(optimizer))) is optimizer
    True
    """
    inner, seen = wrapper, set()
    while not isinstance(inner, BlockOptimizer):
        seen.add(id(inner))
        inside = (getattr(inner, name, None) for name in _INSIDE)
        inner = next((each for each in inside if each is not None and id(each) not in seen), None)
        if inner is None:
            raise TypeError(f"there is no optimizer of baoc in this {type(wrapper).__name__}.")
    return inner

"""From what a framework hands back to the optimizer within it."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from baoc.optim.optimizer import BlockOptimizer

Wrapper = TypeVar("Wrapper")
_INSIDE = ("optimizer", "_optimizer")  # Accelerate's and DeepSpeed's; Lightning's


def unwrap(wrapper: Any) -> BlockOptimizer:
    """The optimizer inside of Accelerate's, Lightning's or DeepSpeed's wrappers of it, however many there are.

    So ``unwrap(optimizer).plan`` works on what ``accelerator.prepare`` returned, whose class knows the methods of
    ``torch.optim`` only. :func:`see_through` makes it work without.

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


def see_through(wrapper: Wrapper) -> Wrapper:
    """Let what a framework's wrapper does not have be that of the optimizer within: plan, metrics, ``print``.

    The wrapper stays what it was, and all that it does itself, such as ``step``, it still does: it becomes an instance
    of a subclass of its class, as modules do under ``torch.distributed.fsdp.fully_shard``. It is returned, too.

    >>> import torch
    >>> class Wrapper:
    ...     def __init__(self, optimizer):
    ...         self.optimizer = optimizer
    ...     def step(self):
    ...         return "the wrapper's own"
    >>> optimizer = see_through(Wrapper(BlockOptimizer(torch.nn.Linear(2, 2), plan="adamw-16")))
    >>> optimizer.plan.blocks[0].configuration.alias, optimizer.step(), isinstance(optimizer, Wrapper)
    ('adamw-16', "the wrapper's own", True)
    """
    unwrap(wrapper)  # or there is nothing to see
    if not isinstance(wrapper, (BlockOptimizer, _SeenThrough)):
        outside: Any = type(wrapper)
        wrapper.__class__ = _seen_through(outside)
    return wrapper


class _SeenThrough:
    """Comes before a wrapper's class."""

    def __getattr__(self, name: str) -> Any:
        # Names with an underscore are how classes talk to themselves: pickle, copy and wrappers ask for theirs.
        if name.startswith("_") or name in _INSIDE:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(unwrap(self), name)

    def __repr__(self) -> str:
        return repr(unwrap(self))

    def __reduce__(self) -> tuple[Any, ...]:
        own = getattr(super(), "__getstate__", None)  # objects have one from Python 3.11 on
        return _bare, (type(self).__bases__[1],), own() if own else self.__dict__


@cache
def _seen_through(wrapper: Any) -> Any:
    return type(wrapper.__name__, (_SeenThrough, wrapper), {})


def _bare(wrapper: type) -> Any:
    """Of a class that pickle can find by its name."""
    return object.__new__(_seen_through(wrapper))

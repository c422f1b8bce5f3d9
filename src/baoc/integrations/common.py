"""Helpers for any training loop: unwrap an optimizer, exempt vectors from weight decay, release gradients."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from torch import Tensor

from baoc.optim.checkpoint import CARRIED
from baoc.optim.optimizer import BlockOptimizer
from baoc.optimizer import BAOC

Wrapper = TypeVar("Wrapper")
Optimizer = TypeVar("Optimizer", bound=BlockOptimizer)
_INNER = ("optimizer", "_optimizer")  # the attribute of Accelerate and DeepSpeed; of Lightning


def unwrap(wrapper: Any) -> BlockOptimizer:
    """Return the baoc optimizer inside a framework's wrapper.

    Accelerate, Lightning and DeepSpeed wrap optimizers in classes that only have the methods of ``torch.optim``.
    Wrappers may be nested. Use :func:`unwrap_accelerate` to read attributes such as ``plan`` from the wrapper itself.

    Args:
        wrapper: A wrapped optimizer, or a baoc optimizer, which is returned as it is.

    Returns:
        The innermost optimizer.

    Raises:
        TypeError: If there is no baoc optimizer inside.

    Example:
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
        candidates = (getattr(inner, name, None) for name in _INNER)
        inner = next((each for each in candidates if each is not None and id(each) not in seen), None)
        if inner is None:
            raise TypeError(
                f"{type(wrapper).__name__} does not contain a baoc optimizer. Pass what the framework returned for a "
                "BAOC or a BlockOptimizer."
            )
    return inner


def unwrap_accelerate(wrapper: Wrapper) -> Wrapper:
    """Make the attributes of the inner optimizer available on Accelerate's wrapper.

    After this call, ``wrapper.plan``, ``wrapper.metrics()`` and ``print(wrapper)`` work. The wrapper keeps its own
    methods, such as ``step``. Its class becomes a subclass of the class it had, as
    ``torch.distributed.fsdp.fully_shard`` does with modules.

    Args:
        wrapper: The optimizer that ``accelerator.prepare`` returned.

    Returns:
        The same object.

    Raises:
        TypeError: If there is no baoc optimizer inside.

    Example:
        >>> import torch
        >>> class Wrapper:
        ...     def __init__(self, optimizer):
        ...         self.optimizer = optimizer
        ...     def step(self):
        ...         return "step of the wrapper"
        >>> optimizer = unwrap_accelerate(Wrapper(BlockOptimizer(torch.nn.Linear(2, 2), plan="adamw-16")))
        >>> optimizer.plan.blocks[0].configuration.alias, optimizer.step(), isinstance(optimizer, Wrapper)
        ('adamw-16', 'step of the wrapper', True)
    """
    unwrap(wrapper)  # raises if there is no optimizer inside
    if not isinstance(wrapper, (BlockOptimizer, _Transparent)):
        original: Any = type(wrapper)
        wrapper.__class__ = _transparent(original)
    return wrapper


class _Transparent:
    """A mixin in front of a wrapper's class that looks up missing attributes in the inner optimizer."""

    def __getattr__(self, name: str) -> Any:
        # pickle, copy and the wrapper itself look up private names and expect an AttributeError.
        if name.startswith("_") or name in _INNER:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(unwrap(self), name)

    def __repr__(self) -> str:
        return repr(unwrap(self))

    def __reduce__(self) -> tuple[Any, ...]:
        own = getattr(super(), "__getstate__", None)  # objects have this method since Python 3.11
        return _new_transparent, (type(self).__bases__[1],), own() if own else self.__dict__


@cache
def _transparent(wrapper: Any) -> Any:
    return type(wrapper.__name__, (_Transparent, wrapper), {})


def _new_transparent(wrapper: type) -> Any:
    """Create an empty instance for pickle, which can find the original class by name but not the subclass."""
    return object.__new__(_transparent(wrapper))


def spare_vectors(optimizer: Optimizer) -> Optimizer:
    """Exempt norms and biases from weight decay, as most training scripts do.

    The vectors and scalars of every param group move to a new group with ``weight_decay=0``. Names, plan and state do
    not change.

    Args:
        optimizer: An optimizer that was built from a module.

    Returns:
        The same optimizer.

    Example:
        >>> import torch
        >>> optimizer = spare_vectors(BlockOptimizer(torch.nn.Linear(4, 4), weight_decay=0.1))
        >>> [(group["param_names"], group["weight_decay"]) for group in optimizer.param_groups]
        [(['weight'], 0.1), (['bias'], 0.0)]
    """
    for group in list(optimizer.param_groups):
        named = list(zip(group["param_names"], group["params"]))
        vectors = [(name, param) for name, param in named if param.dim() < 2]
        matrices = [(name, param) for name, param in named if param.dim() >= 2]
        if not group["weight_decay"] or not vectors:
            continue
        if not matrices:
            group["weight_decay"] = 0.0
            continue
        group["param_names"], group["params"] = [name for name, _ in matrices], [param for _, param in matrices]
        others = {key: value for key, value in group.items() if key not in CARRIED}
        names, params = [name for name, _ in vectors], [param for _, param in vectors]
        optimizer.param_groups.append({**others, "params": params, "param_names": names, "weight_decay": 0.0})
    return optimizer


def release_gradients(optimizer: BlockOptimizer) -> list[Any]:
    """Update each parameter during ``backward()`` and free its gradient immediately.

    All gradients never exist at the same time, which saves their memory. One optimizer with one plan serves all
    parameters, and ``loss.backward()`` is the whole training step. Gradients cannot be clipped by their global norm or
    accumulated, and ``on_nonfinite`` applies to each parameter separately. If a parameter is used several times, its
    gradient is complete when the update runs.

    A :class:`~baoc.BAOC` needs all gradients of a step. Make a plan first instead::

        plan = baoc.make_plan(model, memory=0.25)
        optimizer = baoc.BlockOptimizer(model, lr=3e-4, plan=plan)

    Args:
        optimizer: The optimizer to step.

    Returns:
        Handles of the hooks. Call ``remove()`` on each to return to normal steps.

    Raises:
        TypeError: If the optimizer is a :class:`~baoc.BAOC`.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(8, 8)
        >>> handles = release_gradients(BlockOptimizer(model, lr=1e-2))
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> model.weight.grad is None
        True
    """
    if isinstance(optimizer, BAOC):
        raise TypeError(
            "BAOC needs all gradients of a step, but gradient release frees them one by one. Use a fixed plan: "
            "baoc.BlockOptimizer(model, plan=baoc.make_plan(model, memory=...), ...)."
        )

    def step(param: Tensor) -> None:
        optimizer.step()  # only this parameter has a gradient now
        param.grad = None

    optimizer.zero_grad(set_to_none=True)
    return [
        member.param.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
        for member in optimizer.members()
    ]

"""Helpers for any training loop, and distributed frameworks with their own optimizer contract.

Unwrap an optimizer, exempt vectors from weight decay, release gradients; torchtitan and DeepSpeed ZeRO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from torch import nn

from baoc.core.configuration import Configuration, ConfigurationError, parse
from baoc.core.spec import Reach
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


# ---- torchtitan and DeepSpeed ----

OPTIMIZERS: dict[str, type[BlockOptimizer]] = {"BAOC": BAOC, "BlockOptimizer": BlockOptimizer}
"""Optimizer names that :func:`torchtitan_container` adds."""
_TORCH_KERNEL_OPTIONS = ("fused", "foreach")
_MATRIX = (1 << 10, 1 << 10)


def torchtitan_container() -> type:
    """Return a torchtitan ``OptimizersContainer`` that also accepts ``"BAOC"`` and ``"BlockOptimizer"``.

    Set the options of a param group (lr, betas, eps, weight_decay) in ``optimizer_kwargs``. Set everything else, such
    as the budget, the planner or a plan, in ``optimizer_factory_kwargs_by_name``.

    Returns:
        A subclass of torchtitan's ``OptimizersContainer``.

    Example::

        torchtitan_container().Config(
            param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="BAOC", optimizer_kwargs={"lr": 3e-4})],
            optimizer_factory_kwargs_by_name={"BAOC": {"memory": 0.5, "planner": baoc.EffectPlanner(time=1.5)}},
        )
    """
    from torchtitan.components.optimizer import OptimizersContainer

    class BAOCContainer(OptimizersContainer):  # type: ignore[misc]
        """A container that also builds the optimizers of baoc."""

        @dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config):  # type: ignore[misc]
            """The fields of torchtitan's config; it builds this container."""

        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Callable[..., Any]:
            return _factory(name) if name in OPTIMIZERS else OptimizersContainer._resolve_optimizer_factory(name)

    return BAOCContainer


def _factory(name: str) -> Callable[..., BlockOptimizer]:
    """Return a function that builds the named optimizer from torchtitan's param groups.

    The groups contain options of torch's own kernels, which baoc does not accept.

    >>> import torch
    >>> group = {"params": [torch.ones(4, 4)], "param_names": ["w"], "lr": 0.1, "fused": True, "foreach": False}
    >>> sorted(_factory("BlockOptimizer")([group], plan="adamw-8").param_groups[0])[:5]
    ['adafactor_eps', 'beta2_decay', 'betas', 'clip_threshold', 'eps']
    """

    def make(groups: Iterable[dict[str, Any]], **settings: Any) -> BlockOptimizer:
        own = [{key: value for key, value in group.items() if key not in _TORCH_KERNEL_OPTIONS} for group in groups]
        return OPTIMIZERS[name](own, **settings)

    return make


def for_zero(
    params: nn.Module | Iterable[Any], configuration: Configuration | str = "adamw-16", **settings: Any
) -> BlockOptimizer:
    """Build a client optimizer for ``deepspeed.initialize(optimizer=...)``.

    ZeRO passes flat partitions of all parameters to the optimizer, without names or shapes. A partition may start in
    the middle of a matrix. The optimizer therefore uses one configuration for all parameters, and that configuration
    must be element-wise. Set ``"zero_allow_untested_optimizer": True`` in DeepSpeed's configuration.

    Args:
        params: The model or its parameters.
        configuration: An element-wise configuration.
        **settings: Keywords of :class:`~baoc.BlockOptimizer`.

    Returns:
        The optimizer.

    Raises:
        ConfigurationError: If the configuration needs matrices, rows, columns or quantization groups.

    Example:
        >>> for_zero(nn.Linear(64, 64), "adamw-16").plan.blocks[0].configuration.alias
        'adamw-16'
        >>> for_zero(nn.Linear(64, 64), "muon-8")
        Traceback (most recent call last):
        baoc.core.configuration.ConfigurationError: muon-8 needs whole matrices, which ZeRO's partitions do not have.
        Choose an element-wise configuration, such as adamw-32, adamw-16, lion-16 or sgdwm-16, or shard the model with
        FSDP2, which keeps rows.
    """
    configuration = parse(configuration)
    needed = _needs(configuration)
    if needed is not None:
        raise ConfigurationError(
            f"{configuration.alias} needs {needed}, which ZeRO's partitions do not have.\nChoose an element-wise "
            "configuration, such as adamw-32, adamw-16, lion-16 or sgdwm-16, or shard the model with\nFSDP2, which "
            "keeps rows."
        )
    if isinstance(params, nn.Module):  # parameter names would not match the partitions
        params = [param for param in params.parameters() if param.requires_grad]
    return BlockOptimizer(params, plan=configuration, **settings)


def _needs(configuration: Configuration) -> str | None:
    """Return which structure of a matrix a configuration needs, or None if it is element-wise."""
    layout = configuration.layout(_MATRIX)
    if layout.reach is Reach.MATRIX:
        return "whole matrices"
    if layout.reach is Reach.SUMS:
        return "sums over rows and columns"
    if any(stored.groups for stored in layout.formats):
        return "rows that share quantization scales (a vector's state would be bf16 instead)"
    return None

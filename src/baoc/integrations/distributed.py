"""Distributed frameworks with their own optimizer contract: torchtitan and DeepSpeed ZeRO."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from baoc.core.configuration import Configuration, ConfigurationError, parse
from baoc.core.spec import Reach
from baoc.optim.optimizer import BlockOptimizer
from baoc.optimizer import BAOC

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

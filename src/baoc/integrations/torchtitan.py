"""torchtitan: an ``OptimizersContainer`` whose param groups may ask for ``BAOC`` or ``BlockOptimizer``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from baoc.configurator import BAOC
from baoc.optim.optimizer import BlockOptimizer

_TORCHS = ("fused", "foreach")
OPTIMIZERS: dict[str, type[BlockOptimizer]] = {"BAOC": BAOC, "BlockOptimizer": BlockOptimizer}


def container() -> type:
    """The container of torchtitan, which knows these names as well::

        container().Config(
            param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="BAOC", optimizer_kwargs={"lr": 3e-4})],
            optimizer_factory_kwargs_by_name={"BAOC": {"memory": 0.5}},
        )

    What belongs to a group (lr, betas, eps, weight_decay) goes into ``optimizer_kwargs``, all else, such as the budget
    or a plan, into ``optimizer_factory_kwargs_by_name``.
    """
    from torchtitan.components.optimizer import OptimizersContainer

    class BAOCContainer(OptimizersContainer):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config):  # type: ignore[misc]
            """As torchtitan's; it builds this container."""

        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Callable[..., Any]:
            return factory(name) if name in OPTIMIZERS else OptimizersContainer._resolve_optimizer_factory(name)

    return BAOCContainer


def factory(name: str) -> Callable[..., BlockOptimizer]:
    """What makes the optimizer of that name from torchtitan's groups, which have settings of torch's kernels.

    >>> import torch
    >>> group = {"params": [torch.ones(4, 4)], "param_names": ["w"], "lr": 0.1, "fused": True, "foreach": False}
    >>> sorted(factory("BlockOptimizer")([group], plan="adamw-8").param_groups[0])[:5]
    ['adafactor_eps', 'beta2_decay', 'betas', 'clip_threshold', 'eps']
    """

    def make(groups: Iterable[dict[str, Any]], **settings: Any) -> BlockOptimizer:
        own = [{key: value for key, value in group.items() if key not in _TORCHS} for group in groups]
        return OPTIMIZERS[name](own, **settings)

    return make

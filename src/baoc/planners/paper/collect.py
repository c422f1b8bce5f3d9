"""Collect gradient statistics without BAOC: in a short warm-up of a model, or beside a training loop of your own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from baoc.core.roles import canonical_name
from baoc.core.spec import DEFAULT_BETAS
from baoc.planners.model_facts import ModelFacts, TokenCounter
from baoc.planners.paper.coordinates import RATIO
from baoc.planners.paper.sampling import BETA_RHO, Sampler
from baoc.planners.paper.statistics import GradientStatistics, StatisticsError

logger = logging.getLogger("baoc")

LossFunction = Callable[[Any, Any], Tensor]
"""``loss_fn(model, batch)``: a scalar to call ``backward()`` on."""


class StatisticsCollector:
    """Samples the gradients of a training loop, with any optimizer.

    Args:
        params: a module, of which the trainable parameters are sampled, or parameters by name.
        ratio: share of each structural unit's coordinates that is sampled.
        seed: of the choice of coordinates.
        betas: beta_m and beta_v of the sampled moments.
        floor: sample at least this many coordinates of a unit, or all.
        beta_rho: the largest decay of the direction stability that plans will ask for.

    Example:
        >>> model = nn.Linear(8, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> collector = StatisticsCollector(model).attach(optimizer)
        >>> for _ in range(3):
        ...     model(torch.randn(2, 8)).square().mean().backward()
        ...     _ = optimizer.step()
        ...     optimizer.zero_grad()
        >>> collector.detach()
        >>> collector.steps, list(collector.statistics().records)
        (3, ['weight', 'bias'])
    """

    def __init__(
        self,
        params: nn.Module | Mapping[str, Tensor],
        *,
        ratio: float = RATIO,
        seed: int = 0,
        betas: tuple[float, float] = DEFAULT_BETAS,
        floor: int = 0,
        beta_rho: float = BETA_RHO,
    ) -> None:
        named = dict(params.named_parameters()) if isinstance(params, nn.Module) else dict(params)
        self._params = {canonical_name(name): param for name, param in named.items() if param.requires_grad}
        if not self._params:
            raise StatisticsError("there is nothing to sample: no parameter is trainable (requires_grad=True).")
        self._model = ModelFacts.of(params if isinstance(params, nn.Module) else self._params)
        self._tokens = TokenCounter(params) if isinstance(params, nn.Module) else None
        self._sampler = Sampler(self._params, ratio=ratio, floor=floor, seed=seed, betas=betas, beta_rho=beta_rho)
        self._handle: RemovableHandle | None = None

    @property
    def steps(self) -> int:
        """Steps observed so far; those with non-finite gradients do not count."""
        return self._sampler.steps

    def attach(self, optimizer: torch.optim.Optimizer) -> StatisticsCollector:
        """Observe before each ``optimizer.step()``. A closure computes its gradients too late to be seen."""
        if self._handle is not None:
            raise RuntimeError("this collector is attached to an optimizer already. Call detach() first.")
        self._handle = optimizer.register_step_pre_hook(lambda *_: self._observe_for_hook())
        return self

    def detach(self) -> None:
        """Stop observing. What was seen stays."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def observe(self) -> bool:
        """Sample the gradients as they are now. Return False if they are not finite and were skipped."""
        finite = self._sampler.observe(self._params)
        if self._tokens is not None:  # one step tells
            self._model, self._tokens = self._model.with_tokens(self._tokens.stop()), None
        if not finite:
            logger.warning("skipped a step with non-finite gradients (%d so far)", self._sampler.skipped)
        return finite

    def statistics(self) -> GradientStatistics:
        """Return what was seen so far."""
        return GradientStatistics.from_sampler(self._sampler, self._params, self._model)

    def _observe_for_hook(self) -> None:
        self.observe()  # a hook's result would replace the arguments of step()


def record_steps(
    collector: StatisticsCollector,
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    steps: int,
    on_step: Callable[[int, int, float], None] | None = None,
) -> GradientStatistics:
    """Train for a few steps and sample their gradients. See :func:`baoc.collect_statistics` for the arguments."""
    if steps < 1:
        raise StatisticsError(f"steps is {steps}; at least one gradient must be seen.")
    optimizer.zero_grad()
    taken = 0
    for batch in _cycle(batches, steps):
        loss = loss_fn(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise StatisticsError(f"the loss function returned {kind}. It must return a tensor with one element.")
        if not loss.requires_grad:
            raise StatisticsError("the loss does not depend on any trainable parameter, so it has no gradient.")
        loss.backward()  # type: ignore[no-untyped-call]
        if collector.observe():  # a non-finite step would spoil the weights, and with them all steps after it
            optimizer.step()
        optimizer.zero_grad()
        taken += 1
        if on_step is not None:
            on_step(taken, steps, float(loss.detach()))
    if taken < steps:
        logger.warning("the batches ended after %d of %d steps; the statistics cover those.", taken, steps)
    return collector.statistics()


def _cycle(batches: Iterable[Any], steps: int) -> Iterator[Any]:
    """Up to ``steps`` batches, starting over where that is possible."""
    taken = 0
    while taken < steps:
        before = taken
        source = iter(batches)
        for batch in source:
            yield batch
            taken += 1
            if taken == steps:
                return
        if not taken:
            raise StatisticsError("there are no batches: a warm-up needs at least one.")
        if taken == before or source is batches:  # used up
            return

"""Take a profile without BAOC: a short warm-up of your model, or watching a training loop that you have already."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from baoc.core.roles import canonical_name
from baoc.core.spec import DEFAULT_BETAS
from baoc.profiling.coordinates import RATIO
from baoc.profiling.facts import Facts, TokenCounter
from baoc.profiling.profile import Profile, ProfileError
from baoc.profiling.sampling import Sampler

logger = logging.getLogger("baoc")

LossFunction = Callable[[Any, Any], Tensor]
"""``loss_fn(model, batch)``: a scalar to call ``backward()`` on."""


class Profiler:
    """Watches the gradients of a training loop, whatever its optimizer.

    ``params`` is a module (its trainable parameters) or a mapping from names to parameters.

    >>> model = nn.Linear(8, 4)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> profiler = Profiler(model).attach(optimizer)
    >>> for _ in range(3):
    ...     model(torch.randn(2, 8)).square().mean().backward()
    ...     _ = optimizer.step()
    ...     optimizer.zero_grad()
    >>> profiler.detach()
    >>> profiler.steps, list(profiler.profile().records)
    (3, ['weight', 'bias'])
    """

    def __init__(
        self,
        params: nn.Module | Mapping[str, Tensor],
        *,
        ratio: float = RATIO,
        seed: int = 0,
        betas: tuple[float, float] = DEFAULT_BETAS,
    ) -> None:
        named = dict(params.named_parameters()) if isinstance(params, nn.Module) else dict(params)
        self._params = {canonical_name(name): param for name, param in named.items() if param.requires_grad}
        if not self._params:
            raise ProfileError("there is nothing to profile: no parameter is trainable (requires_grad=True).")
        self._facts = Facts.of(params if isinstance(params, nn.Module) else self._params)
        self._tokens = TokenCounter(params) if isinstance(params, nn.Module) else None
        self._sampler = Sampler(self._params, ratio=ratio, seed=seed, betas=betas)
        self._handle: RemovableHandle | None = None

    @property
    def steps(self) -> int:
        """Steps observed so far; those with non-finite gradients do not count."""
        return self._sampler.steps

    def attach(self, optimizer: torch.optim.Optimizer) -> Profiler:
        """Observe before each ``optimizer.step()``. A closure computes its gradients too late to be seen."""
        if self._handle is not None:
            raise RuntimeError("this profiler is attached to an optimizer already. Call detach() first.")
        self._handle = optimizer.register_step_pre_hook(lambda *_: self._observe_for_hook())
        return self

    def detach(self) -> None:
        """Stop observing. What was seen stays."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def observe(self) -> bool:
        """Take in the gradients as they are now; False if they are not finite and were skipped."""
        finite = self._sampler.observe(self._params)
        if self._tokens is not None:  # one step tells
            self._facts, self._tokens = self._facts.with_tokens(self._tokens.stop()), None
        if not finite:
            logger.warning("skipped a step with non-finite gradients (%d so far)", self._sampler.skipped)
        return finite

    def profile(self) -> Profile:
        """What was learned so far."""
        return Profile.from_sampler(self._sampler, self._params, self._facts)

    def _observe_for_hook(self) -> None:
        self.observe()  # a hook's result would replace the arguments of step()


def record(
    profiler: Profiler,
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    steps: int,
    on_step: Callable[[int, int, float], None] | None = None,
) -> Profile:
    """Train for a few steps under a profiler's eyes. See :func:`baoc.profile`, which says what the arguments are."""
    if steps < 1:
        raise ProfileError(f"steps is {steps}; at least one gradient must be seen.")
    optimizer.zero_grad()
    taken = 0
    for batch in _cycle(batches, steps):
        loss = loss_fn(model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ProfileError(f"the loss function returned {kind}. It must return a tensor with one element.")
        if not loss.requires_grad:
            raise ProfileError("the loss does not depend on any trainable parameter, so it has no gradient.")
        loss.backward()  # type: ignore[no-untyped-call]
        if profiler.observe():  # a non-finite step would spoil the weights, and with them all steps after it
            optimizer.step()
        optimizer.zero_grad()
        taken += 1
        if on_step is not None:
            on_step(taken, steps, float(loss.detach()))
    if taken < steps:
        logger.warning("the batches ended after %d of %d steps; the profile is of these.", taken, steps)
    return profiler.profile()


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
            raise ProfileError("there are no batches: a warm-up needs at least one.")
        if taken == before or source is batches:  # used up
            return

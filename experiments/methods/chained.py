"""Several optimizers that look like one, for methods that treat kinds of parameters differently."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Chained(torch.optim.Optimizer):
    """Optimizers over disjoint parameters, stepped together.

    Groups and state are the members' own dictionaries, so that schedulers, counters of state and checkpoints, which are
    in torch's usual format, need to know nothing of it.

    >>> first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    >>> optimizer = Chained(torch.optim.SGD([first], lr=0.1), torch.optim.AdamW([second], lr=0.01))
    >>> [group["lr"] for group in optimizer.param_groups]
    [0.1, 0.01]
    """

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        self.members = members
        super().__init__([group for member in members for group in member.param_groups], {})
        self._gather()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.members:
            member.step()
        self._gather()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, which replaces all dictionaries: they are handed back to the members."""
        super().load_state_dict(state_dict)
        groups = iter(self.param_groups)
        for member in self.members:
            member.param_groups = [next(groups) for _ in member.param_groups]
            for param in _params(member):
                member.state[param] = self.state[param]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is built: later it would not be known which member is to have the group."""
        if len(self.param_groups) == sum(len(member.param_groups) for member in self.members):
            raise RuntimeError("add the group to one of the members, and build a new Chained.")
        super().add_param_group(param_group)

    def _gather(self) -> None:
        self.param_groups = [group for member in self.members for group in member.param_groups]
        for member in self.members:
            self.state.update(member.state)


def chained(*members: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    """The only member itself, or all of them as one."""
    present = [member for member in members if member is not None]
    return present[0] if len(present) == 1 else Chained(*present)


def _params(optimizer: torch.optim.Optimizer) -> Iterable[torch.nn.Parameter]:
    return (param for group in optimizer.param_groups for param in group["params"])

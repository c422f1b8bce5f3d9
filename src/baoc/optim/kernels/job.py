"""What a kernel is told: one parameter's step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from baoc.core.configuration import Layout
from baoc.core.rounding import rounding_phase
from baoc.core.spec import Hyper, Scalar
from baoc.optim.place import WHOLE, Place
from baoc.optim.state import ParamState, set_age

Numbers = tuple[dict[str, float], dict[str, int]]  # a step's scalars, and the rounding phase of each slot


class Job(NamedTuple):
    """Everything that one parameter's step needs. Tensors are as the place shows them: real, with at least one dim."""

    layout: Layout
    param: Tensor
    grad: Tensor
    state: ParamState  # by the keys of the layout, as the optimizer has it; may hold more
    held: Mapping[str, Any]  # the same as the place shows it
    scalars: Mapping[str, Scalar]
    phases: Mapping[str, int | Tensor]
    ages: tuple[int, ...]  # of the slots, this step included
    maximize: bool = False
    place: Place = WHOLE
    name: str = ""  # for errors
    offloaded: bool = False  # its state is in host memory, which its parameter is not in

    @classmethod
    def of(
        cls,
        layout: Layout,
        param: Tensor,
        grad: Tensor,
        state: ParamState,
        hyper: Hyper,
        lr_scale: float | None = None,
        maximize: bool = False,
        place: Place = WHOLE,
        name: str = "",
        known: dict[object, Numbers] | None = None,
        offloaded: bool = False,
    ) -> Job:
        """The one way to make a job. Ages in ``state`` are those before the step: see :func:`advance_ages`.

        Tensors are as the place shows them. ``known`` keeps the numbers of a step: parameters of one group, mechanism
        and age share them.
        """
        ages = tuple([int(state[key]) + 1 for key in layout.age_keys])
        shared = id(hyper), layout.mechanism, lr_scale, ages
        numbers = None if known is None else known.get(shared)
        if numbers is None:
            numbers = _numbers(layout, dataclasses.replace(hyper, lr_scale=lr_scale or hyper.lr_scale), ages)
            if known is not None:
                known[shared] = numbers
        scalars, phases = numbers
        held = place.held(state)
        return cls(layout, param, grad, state, held, scalars, phases, ages, maximize, place, name, offloaded)

    def refuse_freed(self) -> None:
        """Raise if memory that the step would read was given back, as some sharding frameworks do between steps."""
        buffers = {f"its {key!r}": self.held[key] for stored in self.layout.formats for _, key in stored.keys}
        for what, tensor in {"it": self.param, "its gradient": self.grad, **buffers}.items():
            # a subclass may have its numbers elsewhere
            if type(tensor) in (Tensor, nn.Parameter) and not tensor.data_ptr() and tensor.numel():
                raise RuntimeError(
                    f"parameter {self.name!r} cannot be updated: the memory of {what} was freed. Is it sharded by a "
                    "framework that gathers it for the forward pass only?"
                )


def _numbers(layout: Layout, hyper: Hyper, ages: tuple[int, ...]) -> Numbers:
    by_slot = {stored.slot.name: age for stored, age in zip(layout.formats, ages)}
    phases = {name: rounding_phase(age, index) for index, (name, age) in enumerate(by_slot.items())}
    return layout.mechanism.scalars(hyper, by_slot), phases


def advance_ages(jobs: Iterable[Job]) -> None:
    """Count a step, after the kernel has returned."""
    for job in jobs:
        for stored, age in zip(job.layout.formats, job.ages):
            set_age(job.state, stored, age)

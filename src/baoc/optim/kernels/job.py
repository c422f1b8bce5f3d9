"""What a kernel is told: one parameter's step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

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
    state: Mapping[str, Any]  # by the keys of the layout; may hold more
    scalars: Mapping[str, Scalar]
    phases: Mapping[str, int | Tensor]
    maximize: bool = False
    place: Place = WHOLE

    @classmethod
    def of(
        cls,
        layout: Layout,
        param: Tensor,
        grad: Tensor,
        state: ParamState,
        hyper: Hyper,
        *,
        lr_scale: float | None = None,
        maximize: bool = False,
        place: Place = WHOLE,
        known: dict[object, Numbers] | None = None,
    ) -> Job:
        """The one way to make a job. Ages in ``state`` are those before the step: see :func:`advance_ages`.

        ``known`` keeps the numbers of a step: parameters of one group, mechanism and age share them.
        """
        ages = tuple(int(state[stored.age_key]) + 1 for stored in layout.formats)
        known = {} if known is None else known
        key = id(hyper), layout.mechanism.name, lr_scale, ages
        if key not in known:
            known[key] = _numbers(layout, dataclasses.replace(hyper, lr_scale=lr_scale or hyper.lr_scale), ages)
        scalars, phases = known[key]
        return cls(layout, place.local(param), place.local(grad), state, scalars, phases, maximize, place)


def _numbers(layout: Layout, hyper: Hyper, ages: tuple[int, ...]) -> Numbers:
    by_slot = {stored.slot.name: age for stored, age in zip(layout.formats, ages)}
    phases = {name: rounding_phase(age, index) for index, (name, age) in enumerate(by_slot.items())}
    return layout.mechanism.scalars(hyper, by_slot), phases


def advance_ages(layout: Layout, state: ParamState) -> None:
    """Count a step, after the kernel has returned."""
    for stored in layout.formats:
        set_age(state, stored, int(state[stored.age_key]) + 1)

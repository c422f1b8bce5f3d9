"""What a configuration costs a block: bytes from layouts, time measured on the target with the kernels that run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from baoc.core.configuration import REFERENCE, Configuration, StoredSlot
from baoc.core.spec import SMALL_NUMEL, Hyper, Shape, rounding_phase
from baoc.optim import kernels, migrate
from baoc.optim.kernels.update import Job

REPEATS = 7
_LARGEST_TIMED = 1 << 17  # elements: beyond, time grows with size alike for all configurations
_STEP = 0.1  # ratios are rounded to this: noise below it must not decide between plans


def memory(blocks: Sequence[Mapping[str, Shape]], configurations: Sequence[Configuration]) -> NDArray[np.int64]:
    """Bytes of every block (a mapping name -> shape) under every configuration: (blocks, configurations).

    >>> from baoc.core.configuration import parse
    >>> memory([{"weight": (768, 768)}], [parse("adamw-16"), parse("adamw-8"), parse("sgd")])
    array([[2359296, 1198080,       0]])
    """
    return np.array(
        [[sum(c.state_bytes(shape) for shape in block.values()) for c in configurations] for block in blocks],
        dtype=np.int64,
    ).reshape(len(blocks), len(configurations))


def shape_class(shape: Shape) -> Shape:
    """The shape that a tensor is timed as: few shapes stand for all, none larger than what fills caches.

    >>> shape_class((50257, 768)), shape_class((768,)), shape_class((320, 320, 3, 3)), shape_class((60, 60))
    ((170, 768), (1024,), (45, 320, 3, 3), (63, 63))
    """
    numel = math.prod(shape)
    if numel == 0:
        return (0,)
    side = 2 ** math.ceil(math.log(numel, 4) - 1e-9)
    if len(shape) < 2:  # only the size matters
        return (min(side * side, SMALL_NUMEL - 1 if numel < SMALL_NUMEL else _LARGEST_TIMED),)
    if numel < SMALL_NUMEL:  # all fp32, but a matrix may be factored
        side = min(side, math.isqrt(SMALL_NUMEL - 1))
        return (side, side)
    row = math.prod(shape[1:])
    return (max(1, -(-SMALL_NUMEL // row), min(shape[0], _LARGEST_TIMED // row)), *shape[1:])


Form = tuple[object, tuple[StoredSlot, ...]]
"""What decides about time: the update rule, and how its slots are really stored. Decay is all but free."""


def _form(shape: Shape, configuration: Configuration) -> Form:
    return type(configuration.mechanism).direction, configuration.layout(shape).slots


_MEASURED: dict[tuple[torch.device, str], dict[tuple[Shape, Form], float]] = {}


class TimeModel:
    """Update times of configurations relative to AdamW16's (Sec. 3.1), measured once per shape class and kept."""

    def __init__(self, device: torch.device | str = "cpu", kernel: str = "auto", repeats: int = REPEATS) -> None:
        self.device = torch.device(device)
        self._kernel = kernels.choose(kernel, self.device).kernel
        self._repeats = repeats
        # shared by all models of time for one device and kernel: in one process the same plan comes out every time
        self._seconds = _MEASURED.setdefault((self.device, self._kernel.name), {})

    def ratios(
        self, blocks: Sequence[Mapping[str, Shape]], configurations: Sequence[Configuration]
    ) -> NDArray[np.float64]:
        """Time ratio of every block under every configuration: (blocks, configurations)."""
        wanted = list(dict.fromkeys((*configurations, REFERENCE)))
        for shape in sorted({shape_class(shape) for block in blocks for shape in block.values()}):
            self._measure(shape, wanted)
        rows = []
        for block in blocks:
            seconds = {c: sum(self._seconds_for(shape, c) for shape in block.values()) for c in wanted}
            unit = seconds[REFERENCE]
            # an empty block costs what AdamW16 costs it: it must not make room for slower ones
            rows.append([round(seconds[c] / unit / _STEP) * _STEP if unit else 1.0 for c in configurations])
        return np.array(rows, dtype=np.float64).reshape(len(blocks), len(configurations))

    def _seconds_for(self, shape: Shape, configuration: Configuration) -> float:
        timed = shape_class(shape)
        if not math.prod(timed):
            return 0.0
        return self._seconds[timed, _form(timed, configuration)] * max(1.0, math.prod(shape) / math.prod(timed))

    def _measure(self, shape: Shape, configurations: Sequence[Configuration]) -> None:
        if not math.prod(shape):
            return
        forms = {_form(shape, c): c for c in reversed(configurations)}
        jobs = {form: self._job(shape, c) for form, c in forms.items() if (shape, form) not in self._seconds}
        samples: dict[Form, list[float]] = {form: [] for form in jobs}
        for repeat in range(self._repeats + 1):  # interleaved: a slow moment of the machine hits all alike
            for form, job in jobs.items():
                seconds = self._time(job)
                if repeat:  # the first warms up, or compiles
                    samples[form].append(seconds)
        # what disturbs a measurement only ever makes it longer
        self._seconds.update({(shape, form): min(values) for form, values in samples.items()})

    def _job(self, shape: Shape, configuration: Configuration) -> Job:
        layout, mechanism = configuration.layout(shape), configuration.mechanism
        state = migrate.new_state(layout, self.device)
        slots = layout.slots
        return Job(
            mechanism,
            slots,
            torch.ones(shape, device=self.device),
            torch.ones(shape, device=self.device),
            {stored.key(name): state[stored.key(name)] for stored in slots for name in stored.buffer_names},
            mechanism.scalars(Hyper(lr=1e-3), {stored.slot.name: 2 for stored in slots}),
            {stored.slot.name: rounding_phase(2, i) for i, stored in enumerate(slots)},
        )

    def _time(self, job: Job) -> float:
        start = time.perf_counter()
        with torch.no_grad():
            self._kernel.run([job])
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter() - start

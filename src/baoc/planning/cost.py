"""What a configuration costs a block: bytes from layouts, time measured with whatever runs the updates."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baoc.core.codecs import Format
from baoc.core.configuration import REFERENCE, Configuration
from baoc.core.spec import SMALL_NUMEL, Shape

REPEATS = 7
_LARGEST_TIMED = 1 << 17  # elements: beyond, time grows with size alike for all configurations
_STEP = 0.1  # ratios are rounded to this: noise below it must not decide between plans


def memory(blocks: Sequence[Mapping[str, Shape]], configurations: Sequence[Configuration]) -> NDArray[np.int64]:
    """Bytes of every block (a mapping name -> shape) under every configuration: (blocks, configurations).

    >>> from baoc.core.configuration import parse
    >>> memory([{"weight": (768, 768)}], [parse("adamw-16"), parse("adamw-8"), parse("sgd")])
    array([[2359296, 1184256,       0]])
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


Form = tuple[object, tuple[Format, ...]]
"""What decides about time: the update rule, and how its slots are really stored. Decay is all but free."""


def _form(shape: Shape, configuration: Configuration) -> Form:
    layout = configuration.layout(shape)
    rule = type(layout.mechanism)
    return (rule.direction, rule.finish), layout.formats


class Runner(Protocol):
    """What is timed: see :class:`baoc.optim.timing.StepRunner`."""

    @property
    def name(self) -> str:
        """What the times belong to: a kernel and a device."""

    def __call__(self, shape: Shape, configuration: Configuration) -> Callable[[], None]:
        """A function that makes one update of such a tensor and returns when it is done."""


_MEASURED: dict[str, dict[tuple[Shape, Form], float]] = {}


class TimeModel:
    """Update times of configurations relative to AdamW16's (Sec. 3.1), measured once per shape class and kept."""

    def __init__(self, runner: Runner, repeats: int = REPEATS) -> None:
        self._runner = runner
        self._repeats = repeats
        # shared by all models of time for one device and kernel: in one process the same plan comes out every time
        self._seconds = _MEASURED.setdefault(runner.name, {})

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
        updates = {form: self._runner(shape, c) for form, c in forms.items() if (shape, form) not in self._seconds}
        samples: dict[Form, list[float]] = {form: [] for form in updates}
        for repeat in range(self._repeats + 1):  # interleaved: a slow moment of the machine hits all alike
            for form, update in updates.items():
                seconds = self._time(update)
                if repeat:  # the first warms up, or compiles
                    samples[form].append(seconds)
        # what disturbs a measurement only ever makes it longer
        self._seconds.update({(shape, form): min(values) for form, values in samples.items()})

    def _time(self, update: Callable[[], None]) -> float:
        start = time.perf_counter()
        update()
        return time.perf_counter() - start

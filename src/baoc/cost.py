"""What a configuration costs a block: bytes from layouts, time measured on the target with the kernels that run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from baoc import kernels, migrate
from baoc.configuration import REFERENCE, Configuration
from baoc.kernels.update import Job
from baoc.spec import SMALL_NUMEL, Hyper, Shape, rounding_phase

REPEATS = 5
_LARGEST_TIMED = 1 << 18  # elements: beyond, time grows with size alike for all configurations
_STEP = 0.05  # ratios are rounded to this: noise below it must not decide between plans


def memory(blocks: Sequence[Mapping[str, Shape]], configurations: Sequence[Configuration]) -> NDArray[np.int64]:
    """Bytes of every block (a mapping name -> shape) under every configuration: (blocks, configurations).

    >>> from baoc.configuration import parse
    >>> memory([{"weight": (768, 768)}], [parse("adamw-16"), parse("adamw-8"), parse("sgd")])
    array([[2359296, 1198080,       0]])
    """
    return np.array(
        [[sum(c.state_bytes(shape) for shape in block.values()) for c in configurations] for block in blocks],
        dtype=np.int64,
    ).reshape(len(blocks), len(configurations))


@dataclass(frozen=True)
class ShapeClass:
    """Tensors that are timed as one: of one form, and of about the same size up to one that fills caches."""

    shape: Shape

    @classmethod
    def of(cls, shape: Shape) -> ShapeClass:
        """
        >>> ShapeClass.of((50257, 768)).shape, ShapeClass.of((768,)).shape, ShapeClass.of((320, 320, 3, 3)).shape
        ((341, 768), (1024,), (91, 320, 3, 3))
        """
        numel = math.prod(shape)
        if numel < SMALL_NUMEL or len(shape) < 2:  # formats are fp32 or shapeless: only the size matters
            return cls((min(1 << max(0, numel - 1).bit_length(), _LARGEST_TIMED),))
        row = math.prod(shape[1:])
        return cls((max(1, min(shape[0], _LARGEST_TIMED // row)), *shape[1:]))


class TimeModel:
    """Update times of configurations relative to AdamW16's (Sec. 3.1), measured once per shape class and kept."""

    def __init__(self, device: torch.device | str = "cpu", kernel: str = "auto", repeats: int = REPEATS) -> None:
        self.device = torch.device(device)
        self._kernel = kernels.choose(kernel, self.device).kernel
        self._repeats = repeats
        self._seconds: dict[tuple[Shape, Configuration], float] = {}

    def ratios(
        self, blocks: Sequence[Mapping[str, Shape]], configurations: Sequence[Configuration]
    ) -> NDArray[np.float64]:
        """R of every block under every configuration: (blocks, configurations)."""
        wanted = list(dict.fromkeys((*configurations, REFERENCE)))
        self._measure({ShapeClass.of(shape).shape for block in blocks for shape in block.values()}, wanted)
        rows = []
        for block in blocks:
            seconds = {c: sum(self._seconds_for(shape, c) for shape in block.values()) for c in wanted}
            unit = seconds[REFERENCE] or 1.0
            rows.append([round(seconds[c] / unit / _STEP) * _STEP for c in configurations])
        return np.array(rows, dtype=np.float64).reshape(len(blocks), len(configurations))

    def _seconds_for(self, shape: Shape, configuration: Configuration) -> float:
        timed = ShapeClass.of(shape).shape
        scale = max(1.0, math.prod(shape) / max(1, math.prod(timed)))
        return self._seconds[timed, configuration] * scale if math.prod(shape) else 0.0

    def _measure(self, shapes: Iterable[Shape], configurations: Sequence[Configuration]) -> None:
        for shape in sorted(shapes):
            missing = [c for c in configurations if (shape, c) not in self._seconds]
            if not missing or not math.prod(shape):
                continue
            jobs = {c: self._job(shape, c) for c in missing}
            samples: dict[Configuration, list[float]] = {c: [] for c in missing}
            for repeat in range(self._repeats + 1):  # interleaved: a slow moment of the machine hits all alike
                for configuration, job in jobs.items():
                    seconds = self._time(job)
                    if repeat:  # the first warms up, or compiles
                        samples[configuration].append(seconds)
            for configuration, values in samples.items():
                self._seconds[shape, configuration] = statistics.median(values)

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

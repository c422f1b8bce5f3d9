"""What a kernel is given: one parameter's step."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from baoc.core.codecs import Format
from baoc.core.codecs.quantized import INT8_GROUP
from baoc.core.configuration import Layout
from baoc.core.roles import matrix_shape
from baoc.core.rounding import phase_at, rounding_phase
from baoc.core.sharding import WHOLE, Place, Slice
from baoc.core.spec import Hyper, Reach, Scalar, Shape
from baoc.core.splits import Split
from baoc.optim.state import PLAIN, Memo, ParamState, set_age

Numbers = tuple[dict[str, float], dict[str, int], tuple[int, ...]]  # scalars, rounding phase and age of each slot


class Job(NamedTuple):
    """One parameter's step. Tensors are as the place shows them: real, with at least one dim."""

    layout: Layout
    param: Tensor
    grad: Tensor
    state: ParamState  # by the keys of the layout, as in optimizer.state; may hold more
    held: Mapping[str, Any]  # the same as the place shows it
    scalars: Mapping[str, Scalar]
    phases: Mapping[str, int | Tensor]
    ages: tuple[int, ...]  # of the slots, this step included
    maximize: bool = False
    place: Place = WHOLE
    name: str = ""  # for errors
    offloaded: bool = False  # its state is in host memory, and its parameter is not
    memo: Memo | None = None  # of the tensors, if they are those of the optimizer
    split: Split | None = None  # how its matrices are cut into those that are finished

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
        memo: Memo | None = None,
        split: Split | None = None,
    ) -> Job:
        """Make a job.

        ``param`` and ``grad`` are as the place shows them. The ages in ``state`` are those before the step; see
        :func:`advance_ages`. ``known`` collects the numbers of a step: parameters of one group, update rule,
        learning-rate multiplier and age share them.
        """
        shared = id(hyper), layout.mechanism, lr_scale, _reader(layout)(state)
        numbers = None if known is None else known.get(shared)
        if numbers is None:
            numbers = _numbers(layout, dataclasses.replace(hyper, lr_scale=lr_scale or hyper.lr_scale), state)
            if known is not None:
                known[shared] = numbers
        scalars, phases, ages = numbers
        held = state if place is WHOLE else place.held(state)
        about = maximize, place, name, offloaded, memo, split
        return cls(layout, param, grad, state, held, scalars, phases, ages, *about)

    def refuse_freed(self) -> None:
        """Raise if the memory of a tensor was freed, as some sharding frameworks do between steps."""
        buffers = {f"its {key!r}": self.held[key] for stored in self.layout.formats for _, key in stored.keys}
        for what, tensor in {"it": self.param, "its gradient": self.grad, **buffers}.items():
            # a subclass may have its numbers elsewhere
            if type(tensor) in PLAIN and not tensor.data_ptr() and tensor.numel():
                raise RuntimeError(
                    f"parameter {self.name!r} cannot be updated: the memory of {what} was freed. Is it sharded by a "
                    "framework that gathers it for the forward pass only?"
                )


def rows_of(job: Job, rows: slice) -> Job:
    """Return some rows of a job, as a shard with these rows would have them."""
    height = rows.stop - rows.start
    if height == job.param.shape[0]:
        return job
    layout = job.layout.configuration.layout(job.layout.shape, rows=height)
    buffers = ((stored.key(buffer.name), buffer) for stored in layout.formats for buffer in stored.buffers)
    held = {key: job.held[key][rows] if buffer.by_rows else job.held[key] for key, buffer in buffers}
    place = Slice(job.place.first_row + rows.start, height)
    return job._replace(layout=layout, param=job.param[rows], grad=job.grad[rows], held=held, place=place, memo=None)


Cut = Callable[[Tensor], Tensor]
"""Returns the part of a tensor in the shape of a parameter that is the parameter of a smaller job."""


def stretches_of(job: Job, most: int) -> Iterator[tuple[Job, Cut]]:
    """Cut a job whose rows of dim 0 are longer than ``most`` elements into jobs with shorter rows.

    The rows of a stack are matrices, and a tile is one row at least. The parts have the slots that advance element by
    element, and what a step makes of them is bitwise the same.

    Args:
        job: a job.
        most: elements of a row.

    Yields:
        Each part, and what cuts other tensors likewise. The job itself if its rows are short, or cannot be cut.
    """
    numel = math.prod(job.param.shape[1:])
    stored = [each for each in job.layout.formats if each.reach is Reach.ROWS]
    tensors = [job.param, job.grad, *(job.held[key] for each in stored for _, key in each.keys)]
    has_sums = any(each.slot.is_average for each in job.layout.formats if each not in stored)
    if numel <= most or has_sums or not all(tensor.is_contiguous() for tensor in tensors):
        yield job, whole
        return
    width = max(1, most // INT8_GROUP) * INT8_GROUP  # ends with a group of every format
    rest = numel % width
    rest += width if 0 < rest < INT8_GROUP else 0  # a format may make groups of short rows smaller
    shapes = [shape for shape in ((numel // width - rest // width, width), (1, rest)) if math.prod(shape)]
    layouts = [_layout_as(job.layout, shape, stored) for shape in shapes]
    for row in range(job.param.shape[0]):
        start = 0
        ends = dict.fromkeys(layouts[0].buffers, 0)  # of the last part, in each buffer
        for shape, layout in zip(shapes, layouts):
            cut = functools.partial(_stretch, row=row, start=start, shape=shape)
            held = {}
            for key, buffer in layout.buffers.items():
                held[key] = _stretch(job.held[key], row, ends[key], buffer.shape)
                ends[key] += math.prod(buffer.shape)
            first = (job.place.first_row + row) * numel + start
            phases = {name: phase_at(int(phase), first) for name, phase in job.phases.items()}
            part = job._replace(layout=layout, param=cut(job.param), grad=cut(job.grad), held=held, phases=phases)
            yield part._replace(place=WHOLE, memo=None), cut
            start += math.prod(shape)


def whole(tensor: Tensor) -> Tensor:
    """Cut nothing."""
    return tensor


def _stretch(tensor: Tensor, row: int, start: int, shape: Shape) -> Tensor:
    return tensor[row].view(-1)[start : start + math.prod(shape)].view(shape)


def matrices_of(job: Job) -> Iterator[tuple[Job, Cut]]:
    """Cut a stack into its matrices, with the slots that average finished directions.

    Yields:
        Each matrix, and what cuts other tensors likewise.
    """
    shape = matrix_shape(job.layout.shape)[1:]
    layout = _layout_as(job.layout, shape, [each for each in job.layout.formats if each.slot.of_direction])
    for row in range(job.param.shape[0]):
        cut: Cut = operator.itemgetter(row)
        held = {key: cut(job.held[key]).view(buffer.shape) for key, buffer in layout.buffers.items()}
        part = job._replace(layout=layout, param=cut(job.param), grad=cut(job.grad), held=held)
        yield part._replace(place=WHOLE, memo=None), cut


def _layout_as(layout: Layout, shape: Shape, formats: Iterable[Format]) -> Layout:
    """Return the layout of a part, which has the same formats whatever its size."""
    formats = tuple(dataclasses.replace(each, shape=shape, rows=None) for each in formats)
    buffers = {each.key(buffer.name): buffer for each in formats for buffer in each.buffers}
    return Layout(layout.configuration, shape, formats, buffers)


def _numbers(layout: Layout, hyper: Hyper, state: ParamState) -> Numbers:
    ages = {stored.slot.name: int(state[stored.age_key]) + 1 for stored in layout.formats}
    phases = {name: rounding_phase(age, index) for index, (name, age) in enumerate(ages.items())}
    return layout.mechanism.scalars(hyper, ages), phases, tuple(ages.values())


@functools.cache
def _reader(layout: Layout) -> Callable[[ParamState], object]:
    """Return what reads the ages of a layout from a state, as something to compare."""
    if any(stored.slot.age_is_state for stored in layout.formats):  # then they are tensors
        return lambda state: tuple([int(state[key]) for key in layout.age_keys])
    return operator.itemgetter(*layout.age_keys) if layout.formats else lambda state: None


def advance_ages(jobs: Iterable[Job]) -> None:
    """Write the ages of a step into the state, after the kernel has returned."""
    for job in jobs:
        state = job.state
        for key, age in zip(job.layout.age_keys, job.ages):
            set_age(state, key, age)

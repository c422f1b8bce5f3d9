"""The same update through ``torch.compile``, on any device.

No fp32 copy of a whole state is made: Inductor is told to compute a value again rather than to keep it. Where elements
need nothing of each other, or rows are made of whole groups, the update is one fused kernel; where a group ends in the
middle of a row, or sums over the tensor come first, it is several.

The number of compilations must not grow with steps, learning rates or tensors. So every number that changes between
steps enters as a tensor, sizes are dynamic, and a graph is made once per stored form, dtype and kind of shape: square
or not, rows of one group or several, the last group full or not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

from baoc.core.codecs.int8 import GROUP
from baoc.core.configuration import Layout
from baoc.core.spec import Reach
from baoc.optim.kernels.eager import EagerKernel
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.update import Update

# Beyond these many uses or operations, Inductor keeps a value in memory for others to read.
_NEVER_KEEP: dict[str, str | int | bool | Callable[..., Any]] = {
    "realize_reads_threshold": 1 << 20,
    "realize_opcount_threshold": 1 << 20,
    "realize_acc_reads_threshold": 1 << 20,
}


class CompiledKernel:
    name = "compiled"

    def __init__(self) -> None:
        self._eager = EagerKernel()

    def run(self, jobs: Iterable[Job]) -> None:
        left = []
        # Dynamo's limit is per function, and every configuration traces the same one: the bound is ours, and tested.
        with torch._dynamo.utils.disable_cache_limit():
            for job in jobs:
                if job.layout.reach is Reach.MATRIX:  # matrix products are no business of a fused pass
                    left.append(job)
                elif job.param.numel():
                    _run(job)
        self._eager.run(left)


def _run(job: Job) -> None:
    device = job.param.device
    scalars = torch.tensor(list(job.scalars.values()), dtype=torch.float32).to(device, non_blocking=True)
    phases = torch.tensor([int(each) for each in job.phases.values()], dtype=torch.int64).to(device, non_blocking=True)
    keys = tuple(key for stored in job.layout.formats for _, key in stored.keys)
    step = _compiled_step(_Form(job.layout), tuple(job.scalars), tuple(job.phases), keys, job.maximize)
    param, grad = job.param.detach().contiguous(), job.grad.detach().contiguous()
    view = _simplest_view(job.layout, param[0].numel())
    state = [view(tensor) for stored in job.layout.formats for tensor in stored.held_in(job.state).values()]
    step(view(param), view(grad), state, scalars, phases)
    if param.data_ptr() != job.param.data_ptr():
        job.param.copy_(param)


def _simplest_view(layout: Layout, row_numel: int) -> Callable[[Tensor], Tensor]:
    """The fewest dims that all formats can work on: fewer kinds of shapes, fewer graphs."""
    dims = [stored.view_dims for stored in layout.formats]
    if None in dims:
        return lambda tensor: tensor
    if 2 not in dims:
        return lambda tensor: tensor.view(-1)
    if row_numel % GROUP:
        return lambda tensor: tensor.view(tensor.shape[0], -1)
    groups = row_numel // GROUP
    return lambda tensor: _of_static_width(tensor.view(tensor.shape[0] * groups, -1))


def _of_static_width(tensor: Tensor) -> Tensor:
    """Rows that are whole groups: with their width known, finding a scale and using it becomes one kernel."""
    torch._dynamo.mark_static(tensor, 1)
    return tensor


class _Form:
    """A layout as far as a graph depends on it: those with equal keys share one."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._key: Hashable = (
            layout.mechanism.name,
            tuple((stored.slot, stored.graph_key()) for stored in layout.formats),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Form) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@functools.cache
def _compiled_step(
    form: _Form, scalar_names: tuple[str, ...], phase_names: tuple[str, ...], keys: tuple[str, ...], maximize: bool
) -> Callable[[Tensor, Tensor, list[Tensor], Tensor, Tensor], None]:
    layout = form.layout

    def step(param: Tensor, grad: Tensor, state: list[Tensor], scalars: Tensor, phases: Tensor) -> None:
        job = Job(
            layout,
            param,
            grad,
            dict(zip(keys, state)),
            dict(zip(scalar_names, scalars.unbind())),
            dict(zip(phase_names, phases.unbind())),
            maximize,
        )
        Update(job).run([slice(0, param.shape[0])])

    return torch.compile(step, fullgraph=True, dynamic=True, options=_NEVER_KEEP)

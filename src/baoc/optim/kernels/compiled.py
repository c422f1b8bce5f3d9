"""The same update through ``torch.compile``, on any device.

What an element's update needs of others decides how much is held: nothing but its own numbers, and it is one fused
pass; the scale of an int8 group, and Inductor makes two passes with fp32 values between them. So large parameters go in
pieces of rows, which bounds what is between; only sums over the whole tensor (factors, an RMS) need all of it at once.

The number of compilations must not grow with steps, learning rates or tensors. So every number that changes between
steps enters as a tensor, sizes are dynamic, and a graph is made once per stored form, dtype and kind of shape: square
or not, rows of one group or several, the last group full or not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor

from baoc.core.configuration import Layout
from baoc.core.rounding import phase_at
from baoc.core.spec import Reach
from baoc.optim.kernels.eager import EagerKernel
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.update import Update, row_tiles

PIECE_NUMEL = 1 << 22  # 16 MiB of fp32 per temporary: enough to keep a GPU busy


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
    param, grad = job.param.detach().contiguous(), job.grad.detach().contiguous()
    keys = tuple(key for stored in job.layout.formats for _, key in stored.keys)
    scalars = torch.tensor(list(job.scalars.values()), dtype=torch.float32).to(param.device, non_blocking=True)
    step = _compiled_step(_Form(job.layout), tuple(job.scalars), tuple(job.phases), keys, job.maximize)
    view = _simplest_view(job.layout)
    held = [tensor for stored in job.layout.formats for tensor in stored.held_in(job.state).values()]
    by_rows = job.layout.reach is Reach.ROWS and param.numel() > PIECE_NUMEL
    for rows in row_tiles(param.shape, PIECE_NUMEL) if by_rows else [slice(0, None)]:
        first = rows.start * (param.numel() // param.shape[0])
        phases = torch.tensor([phase_at(int(each), first) for each in job.phases.values()], dtype=torch.int64)
        state = [view(tensor[rows] if by_rows else tensor) for tensor in held]
        param_piece, grad_piece = (view(tensor[rows] if by_rows else tensor) for tensor in (param, grad))
        step(param_piece, grad_piece, state, scalars, phases.to(param.device, non_blocking=True))
    if param.data_ptr() != job.param.data_ptr():
        job.param.copy_(param)


def _simplest_view(layout: Layout) -> Callable[[Tensor], Tensor]:
    """The fewest dims that all formats can work on: fewer kinds of shapes, fewer graphs."""
    dims = [stored.view_dims for stored in layout.formats]
    if None in dims:
        return lambda tensor: tensor
    if 2 in dims:
        return lambda tensor: tensor.view(tensor.shape[0], -1)
    return lambda tensor: tensor.view(-1)


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

    return torch.compile(step, fullgraph=True, dynamic=True)

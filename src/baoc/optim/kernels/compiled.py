"""The same update through ``torch.compile``, on any device.

Where elements need nothing of each other, or rows are made of whole groups, the update is one fused kernel. Where a
group ends in the middle of a row, Inductor makes several passes with fp32 values between them: such parameters go in
pieces of rows, which bounds what is between. Sums over the tensor (factors, an RMS) need all of it at once, and have
one or two temporaries of its size. (Telling Inductor to keep nothing does away with those too, but takes minutes.)

The number of compilations must not grow with steps, learning rates or tensors. So every number that changes between
steps enters as a tensor, sizes are dynamic, and a graph is made once per stored form, dtype and kind of shape: square
or not, rows of one group or several, the last group full or not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from baoc.core.codecs.quantized import INT8_GROUP as GROUP
from baoc.core.configuration import Layout
from baoc.core.rounding import phase_at
from baoc.core.spec import Reach, Scalar
from baoc.optim.kernels.eager import EagerKernel, EagerRows
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.update import Update

PIECE_NUMEL = 1 << 22  # 16 MiB of fp32 per temporary: enough to keep a GPU busy
_ALIGNED_ROWS = 16  # a piece of so many rows starts where Inductor expects tensors to start, whatever their dtype


class CompiledKernel:
    name = "compiled"

    def __init__(self) -> None:
        self._eager = EagerKernel()

    def run(self, jobs: Iterable[Job]) -> bool:
        jobs, left = list(jobs), []
        for job in jobs:
            job.refuse_freed()
        copied: dict[tuple[int, int], Tensor] = {}
        # Dynamo's limit is per function, and every configuration traces the same one: the bound is ours, and tested.
        with torch._dynamo.utils.disable_cache_limit():
            for job in jobs:
                # matrix products and sums over ranks are no business of a fused pass
                if job.layout.reach is Reach.MATRIX or (job.layout.reach is Reach.SUMS and job.place.ranks):
                    left.append(job)
                elif job.param.numel():
                    _run(job, copied)
        self._eager.run(left)
        return True

    def rows(self, jobs: Sequence[Job], spiked: list[bool] | None = None) -> EagerRows:
        return self._eager.rows(jobs, spiked)


def _run(job: Job, copied: dict[tuple[int, int], Tensor]) -> None:
    """``copied``: the numbers of this step that are on the device already, which jobs of a group share."""
    param, grad = job.param.detach().contiguous(), job.grad.detach().contiguous()
    device, row_numel = param.device, param[0].numel()
    keys = tuple(key for stored in job.layout.formats for _, key in stored.keys)
    held = [tensor for stored in job.layout.formats for tensor in stored.held_in(job.held).values()]
    scalars = _copied(copied, job.scalars, 0, list(job.scalars.values()), torch.float32, device)
    step = _compiled_step(_Form(job.layout), tuple(job.scalars), tuple(job.phases), keys, job.maximize)
    view = _simplest_view(job.layout, row_numel)
    for rows in _pieces(job.layout, len(param), row_numel):
        first = (job.place.first_row + (0 if rows is None else rows.start)) * row_numel
        numbers = [phase_at(int(each), first) for each in job.phases.values()]
        phases = _copied(copied, job.phases, first, numbers, torch.int64, device)
        param_piece, grad_piece, *state = (view(each if rows is None else each[rows]) for each in (param, grad, *held))
        step(param_piece, grad_piece, state, scalars, phases)
    if param.data_ptr() != job.param.data_ptr():
        job.param.copy_(param)


def _copied(
    copied: dict[tuple[int, int], Tensor],
    source: object,  # whose numbers they are
    first: int,  # element from which on they count
    numbers: list[Scalar] | list[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    key = id(source), first  # jobs keep it alive for as long as the step takes
    if key not in copied:
        host = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")  # else it may wait
        copied[key] = host.to(device, non_blocking=True)
    return copied[key]


def _pieces(layout: Layout, rows: int, row_numel: int) -> list[slice | None]:
    """Rows to update at once; ``None``: all."""
    is_ragged = any(stored.view_dims == 2 for stored in layout.formats) and row_numel > GROUP and row_numel % GROUP
    height = max(1, PIECE_NUMEL // max(1, row_numel) // _ALIGNED_ROWS) * _ALIGNED_ROWS
    if layout.reach is not Reach.ROWS or not is_ragged or rows <= height:
        return [None]
    return [slice(start, min(start + height, rows)) for start in range(0, rows, height)]


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
            {},
            dict(zip(keys, state)),
            dict(zip(scalar_names, scalars.unbind())),
            dict(zip(phase_names, phases.unbind())),
            (),
            maximize,
        )
        Update(job).run([slice(0, param.shape[0])])

    return torch.compile(step, fullgraph=True, dynamic=True)

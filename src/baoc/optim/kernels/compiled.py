"""The same update through ``torch.compile``: one fused pass over each parameter, on any device.

The number of compilations must not grow with steps, learning rates or tensors. So every number that changes between
steps enters as a tensor, sizes are dynamic, and a graph is made once per stored form, dtype and kind of shape: square
or not, rows of one group or several, the last group full or not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from baoc.core.configuration import StoredSlot
from baoc.core.mechanisms import MECHANISMS
from baoc.optim.kernels.update import Job, update


class CompiledKernel:
    name = "compiled"

    def run(self, jobs: Iterable[Job]) -> None:
        # Dynamo's limit is per function, and every configuration traces the same one: the bound is ours, and tested.
        with torch._dynamo.utils.disable_cache_limit():
            for job in jobs:
                if job.param.numel():
                    _run(job)


def _run(job: Job) -> None:
    device = job.param.device
    scalars = torch.tensor(list(job.scalars.values()), dtype=torch.float32).to(device, non_blocking=True)
    phases = torch.tensor(list(job.phases.values()), dtype=torch.int64).to(device, non_blocking=True)
    keys = tuple(stored.key(name) for stored in job.slots for name in stored.buffer_names)
    step = _compiled_step(job.mechanism.name, job.slots, tuple(job.scalars), tuple(job.phases), keys, job.maximize)
    view = _simplest_view(job.slots)
    param = job.param.detach().contiguous()
    state = [view(job.state[key]) for key in keys]
    step(view(param), view(job.grad.detach().contiguous()), state, scalars, phases)
    if param.data_ptr() != job.param.data_ptr():
        job.param.copy_(param)


def _simplest_view(slots: tuple[StoredSlot, ...]) -> Callable[[Tensor], Tensor]:
    """The fewest dims that all codecs can work on: fewer kinds of shapes, fewer graphs."""
    dims = [stored.codec.view_dims for stored in slots]
    if None in dims:
        return lambda tensor: tensor
    if 2 in dims:
        return lambda tensor: tensor.view(tensor.shape[0], -1)
    return lambda tensor: tensor.view(-1)


@functools.cache
def _compiled_step(
    mechanism_name: str,
    slots: tuple[StoredSlot, ...],
    scalar_names: tuple[str, ...],
    phase_names: tuple[str, ...],
    state_names: tuple[str, ...],
    maximize: bool,
) -> Callable[[Tensor, Tensor, list[Tensor], Tensor, Tensor], None]:
    mechanism = MECHANISMS[mechanism_name]

    def step(param: Tensor, grad: Tensor, state: list[Tensor], scalars: Tensor, phases: Tensor) -> None:
        update(
            mechanism,
            slots,
            param,
            grad,
            dict(zip(state_names, state)),
            dict(zip(scalar_names, scalars.unbind())),
            dict(zip(phase_names, phases.unbind())),
            maximize,
            [slice(0, param.shape[0])],
        )

    return torch.compile(step, fullgraph=True, dynamic=True)

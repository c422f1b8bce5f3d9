"""What jobs looked like when their tables were written. While that stands, a step writes its numbers and launches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baoc.core.configuration import Layout
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.triton.families import Family, Form, Use, form_of
from baoc.optim.kernels.triton.tables import Numbers, Tables
from baoc.optim.place import Place

_KEPT = 256  # lineups, with their tables


class Seen(NamedTuple):
    """All of a job that its words depend on. No tensors: gradients must be free to go."""

    layout: Layout
    place: Place
    kinds: tuple[object, ...]
    form: Form | str
    keys: tuple[str, ...]  # of the buffers
    addresses: list[int]  # of the parameter, the gradient and the buffers
    direction: int  # its address, or 0

    @classmethod
    def of(cls, job: Job, use: Use, direction: Tensor | None, last: Seen | None) -> Seen:
        """``last``: what was in its place before. The form is looked up where that was of another kind."""
        address = 0 if direction is None else direction.data_ptr()
        if last is not None and last.is_like(job):
            return last._replace(addresses=_addresses(job, last.keys), direction=address)
        form = form_of(job, use)
        pairs = form.buffers if isinstance(form, Form) else [pair for each in job.layout.formats for pair in each.keys]
        keys = tuple(key for _, key in pairs)
        return cls(job.layout, job.place, _kinds(job, keys), form, keys, _addresses(job, keys), address)

    def is_like(self, job: Job) -> bool:
        """Whether a job has the same form, wherever it lies."""
        return job.layout is self.layout and job.place is self.place and _kinds(job, self.keys) == self.kinds

    def stands(self, job: Job) -> bool:
        """Whether a job, but for its direction and its numbers, is what it was."""
        return self.is_like(job) and _addresses(job, self.keys) == self.addresses


class Lineup(NamedTuple):
    """Jobs that are launched together, and what is launched for them."""

    seen: Sequence[Seen]
    rows: Sequence[int]  # of numbers
    served: Sequence[int]  # jobs that have elements to be updated
    left: Sequence[int]  # and those that there is no Triton code for
    launches: Sequence[tuple[Family, Tables]]

    def stands(self, jobs: Sequence[Job], rows: Sequence[int], directions: Sequence[Tensor]) -> bool:
        """Whether jobs are what they were, as many as there were."""
        return (
            rows == self.rows
            and all(seen.stands(job) for seen, job in zip(self.seen, jobs))
            and all(seen.direction == direction.data_ptr() for seen, direction in zip(self.seen, directions))
        )


class Memory:
    """What launches read on a device, and what is known of it on the host."""

    def __init__(self, device: torch.device, kept: int | None = _KEPT) -> None:
        self.numbers = Numbers(device)
        self.lineups: OrderedDict[tuple[Use, int, int], Lineup] = OrderedDict()
        self._kept = kept

    def keep(self, key: tuple[Use, int, int], lineup: Lineup) -> None:
        """Together with those of the last steps."""
        self.lineups[key] = lineup
        self.lineups.move_to_end(key)
        if self._kept is not None and len(self.lineups) > self._kept:
            self.lineups.popitem(last=False)

    def write_for_replay(self, jobs: Sequence[Job]) -> None:
        """The numbers of a step, where a graph will read them, and once what could not be copied in its capture."""
        self.numbers.write_again(jobs)
        for lineup in self.lineups.values():
            for _, tables in lineup.launches:
                tables.write_due()


def _addresses(job: Job, keys: Sequence[str]) -> list[int]:
    held = job.held
    return [job.param.data_ptr(), job.grad.data_ptr(), *[held[key].data_ptr() for key in keys]]


def _kinds(job: Job, keys: Sequence[str]) -> tuple[object, ...]:
    param, grad, held = job.param, job.grad, job.held
    return (
        type(param), param.dtype, param.is_contiguous(), param.is_neg(),
        type(grad), grad.dtype, grad.is_contiguous(), grad.is_neg(),
        *[held[key].is_contiguous() for key in keys],
    )  # fmt: skip

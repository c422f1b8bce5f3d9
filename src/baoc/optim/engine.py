"""The jobs of a step and the kernels of an optimizer: which one runs on which device, and why.

State in host memory goes by way of the host: gradients are copied to it in buckets, its kernel advances the state, and
the result is copied back. For most update rules the result is the parameter, which has to be copied down too. For rules
that work on matrices it is the direction before matrices are finished: their products run on the device, where they are
cheap, and the parameter stays there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from baoc.core.sharding import HOST, WHOLE
from baoc.core.spec import Reach
from baoc.core.text import human_bytes
from baoc.optim import groups, kernels
from baoc.optim.groups import Group
from baoc.optim.kernels import Choice, Kernel
from baoc.optim.kernels.eager import Rows, run_matrices
from baoc.optim.kernels.job import Job, Numbers
from baoc.optim.members import Member, checked_state
from baoc.optim.staging import BUFFERS, Staging, lane_to
from baoc.optim.state import ParamState, misfit

logger = logging.getLogger("baoc")


class Engine:
    """Chooses kernels, and holds the buffers through which offloaded state meets its gradients.

    Args:
        request: one of :data:`baoc.optim.kernels.REQUESTS`.
        bucket_bytes: the largest bucket in host memory; see :class:`~baoc.optim.staging.Staging`.
    """

    def __init__(self, request: str, bucket_bytes: int) -> None:
        kernels.check_request(request)
        self._request, self._bucket_bytes = request, bucket_bytes
        self._reset()

    def _reset(self) -> None:
        self._reported: set[str] = set()
        self._stagings: dict[torch.device, Staging] = {}

    @property
    def staging_bytes(self) -> int:
        """Bytes of host memory in all buffers."""
        return sum(staging.nbytes for staging in self._stagings.values())

    def kernel_for(self, device: torch.device, jobs: Sequence[Job]) -> Kernel:
        """Return what updates the parameters of a device; raise if the requested kernel cannot."""
        choice = kernels.choose(self._request, device)
        self._report(choice)
        if not any(job.offloaded for job in jobs):
            return choice.kernel
        host = self._on_host()
        self._report(host)
        if device not in self._stagings:
            self._stagings[device] = Staging(lane_to(device), self._bucket_bytes)
        return OffloadKernel(choice.kernel, host.kernel, self._stagings[device])

    def describe(self, members: Iterable[Member], state: Mapping[Tensor, ParamState]) -> str:
        """Describe the kernel of every device, what it leaves to torch operations, and what goes by way of the host."""
        by_device: dict[torch.device, list[Job]] = {}
        for member in sorted(members, key=lambda member: str(member.param.device)):
            own, place, param = state.get(member.param, {}), member.place, member.param.detach()
            held, grad = place.held(own), param if member.param.grad is None else member.param.grad
            if misfit(member.layout, held, member.state_device) is None:  # else it is frozen, or did not step yet
                tensors = place.local(param), place.local(grad), own, held
                about = place, member.name, member.is_offloaded
                job = Job(member.layout, *tensors, {}, {}, (), False, *about)
                by_device.setdefault(job.param.device, []).append(job)
        lines = []
        for device, here in by_device.items():
            choice = kernels.choose(self._request, device)
            lines.append(str(choice) + kernels.left_out(choice.kernel, here))
            offloaded = [job for job in here if job.offloaded]
            if offloaded:
                host, size = self._on_host(), human_bytes(self._bucket_bytes)
                lines.append(
                    f"{host}{kernels.left_out(host.kernel, offloaded)}, for {len(offloaded)} of {len(here)} parameters "
                    f"on {device} with state in host memory, by way of {BUFFERS} buffers of {size}"
                )
        return "; ".join(lines)

    def _on_host(self) -> Choice:
        """Return the host's kernel: a kernel that was requested by name may exist on the device only."""
        return kernels.choose(self._request if self._request in ("native", "eager") else "auto", HOST)

    def _report(self, choice: Choice) -> None:
        if choice.device not in self._reported:
            self._reported.add(choice.device)
            logger.info("kernel %s", choice)

    def __getstate__(self) -> dict[str, Any]:
        return {"_request": self._request, "_bucket_bytes": self._bucket_bytes}  # buffers are made anew

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


def collect_jobs(
    members: Iterable[Member], param_groups: Sequence[Group], states: dict[Any, ParamState]
) -> dict[torch.device, list[Job]]:
    """Return a job for every parameter that has a gradient, by device. Gradients and state are checked here.

    Only what may change between steps is read: gradients, addresses, state tensors, ages and hyper-parameters.
    """
    known: dict[object, Numbers] = {}  # shared by parameters of one group, rule, learning-rate multiplier and age
    jobs: dict[torch.device, list[Job]] = {}
    hypers = {id(group): groups.hyper(group, f"param group {i}") for i, group in enumerate(param_groups)}
    group: Group | None = None
    for member in members:
        param, place, block, memo = member.param, member.place, member.block, member.memo
        grad = param.grad
        if grad is None:
            continue
        if grad.shape != member.param_shape or grad.layout is not torch.strided:
            member.refuse_gradient(grad)
        state = states.get(param)
        if member.needs_view:
            param, grad = place.local(param), place.local(grad)
        if state is None or not memo.knows(param, state if place is WHOLE else place.held(state)):
            state = checked_state(member, states)
            memo.learn(param, place.held(state), member.layout)
        if group is not member.group:
            group = member.group
            hyper, maximize = hypers[id(group)], bool(group["maximize"])
        layout, scale, offloaded = member.layout, block.lr_scale, block.host and member.is_offloaded
        job = Job.of(
            layout, param, grad, state, hyper, scale, maximize, place, member.name, known, offloaded, memo, member.split
        )  # fmt: skip
        if memo.device in jobs:
            jobs[memo.device].append(job)
        else:
            jobs[memo.device] = [job]
    return jobs


class OffloadKernel:
    """Runs jobs whose state is in host memory by way of the host, and the others on the device.

    Args:
        device: the kernel of the parameters' device.
        host: the kernel of the host.
        staging: between the two.
    """

    def __init__(self, device: Kernel, host: Kernel, staging: Staging) -> None:
        self.name = f"{device.name}, {host.name} on the host"
        self._device, self._host, self._staging = device, host, staging

    def run(self, jobs: Iterable[Job]) -> bool:
        own: list[Job] = []
        whole: list[Job] = []
        matrices: list[Job] = []
        for job in jobs:
            if not job.offloaded:
                own.append(job)
                continue
            job.refuse_freed()
            if job.param.numel():
                (matrices if _goes_up_as_direction(job) else whole).append(job)
        self._staging.begin()
        spiked = [self._device.run(own)] if own else []  # first: a GPU works on it while the host does the rest
        if matrices:  # likewise
            run_matrices(matrices, self._rows(matrices, spiked))
        self._staging.run(whole, lambda staged: spiked.append(self._host.run(staged)))
        self._staging.lane.end()
        return any(spiked)

    def rows(self, jobs: Sequence[Job], spiked: list[bool] | None = None) -> Rows:
        return self._rows(jobs, [] if spiked is None else spiked)

    def _rows(self, jobs: Sequence[Job], spiked: list[bool]) -> Rows:
        return _OffloadedRows(self._device.rows(jobs), self._host.rows(jobs, spiked), self._staging)


class _OffloadedRows:
    """The rows of matrices: momentum on the host, everything after it on the device."""

    def __init__(self, device: Rows, host: Rows, staging: Staging) -> None:
        self._device, self._host, self._staging = device, host, staging

    def directions(self, jobs: Sequence[Job], out: Sequence[Tensor]) -> None:
        def work(staged: Sequence[Job]) -> None:
            self._host.directions(staged, [job.param for job in staged])

        self._staging.run([job._replace(param=each, memo=None) for job, each in zip(jobs, out)], work, fresh=True)
        self._staging.lane.end()

    def adapt(self, jobs: Sequence[Job], finished: Sequence[Tensor], squares: Sequence[Tensor]) -> list[Tensor]:
        """Advance the slots of whole matrices, a number for each row or matrix, on the device, and copy them back."""
        formats = (stored for stored in jobs[0].layout.formats if stored.slot.is_of_matrix)
        keys = [key for stored in formats for _, key in stored.keys]
        if not keys:
            return list(finished)
        raised = [{key: job.held[key].to(job.param.device) for key in keys} for job in jobs]
        adapted = self._device.adapt(
            [job._replace(held={**job.held, **up}, memo=None) for job, up in zip(jobs, raised)], finished, squares
        )
        for job, up in zip(jobs, raised):
            for key in keys:
                job.held[key].copy_(up[key])
        return adapted

    def move(self, jobs: Sequence[Job], directions: Sequence[Tensor]) -> None:
        """Move parameters on the device, which needs the low bits of their weights there for a moment."""
        keys = [[key for each in job.layout.formats if each.slot.of_weight for _, key in each.keys] for job in jobs]
        raised = [{key: job.held[key].to(job.param.device) for key in mine} for job, mine in zip(jobs, keys)]
        self._device.move(
            [job._replace(held={**job.held, **up}, memo=None) if up else job for job, up in zip(jobs, raised)],
            directions,
        )
        for job, up in zip(jobs, raised):
            for key, tensor in up.items():
                job.held[key].copy_(tensor)


def _goes_up_as_direction(job: Job) -> bool:
    """Return whether only a direction is copied up. With coupled decay it depends on the parameter, which comes too."""
    return job.layout.reach is Reach.MATRIX and job.layout.mechanism.decoupled

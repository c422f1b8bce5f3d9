"""The kernels of one optimizer: which one runs on which device, and why."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from baoc.core.text import human_bytes
from baoc.optim import kernels
from baoc.optim.groups import Member
from baoc.optim.kernels import Choice, Kernel
from baoc.optim.offload import OffloadKernel
from baoc.optim.offload.lanes import lane_to
from baoc.optim.offload.staging import BUFFERS, Staging
from baoc.optim.place import HOST

logger = logging.getLogger("baoc")


class Engine:
    """Chooses kernels, and has the memory through which offloaded state meets its gradients.

    Args:
        request: one of :data:`baoc.optim.kernels.REQUESTS`.
        bucket_bytes: of host memory that a bucket takes at most: see :class:`~baoc.optim.offload.staging.Staging`.
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
        """Host memory of all buffers."""
        return sum(staging.nbytes for staging in self._stagings.values())

    def kernel_for(self, device: torch.device, members: Sequence[Member]) -> Kernel:
        """What updates parameters of a device; an error if nothing can that was asked for."""
        choice = kernels.choose(self._request, device)
        self._report(choice)
        if not any(member.is_offloaded for member in members):
            return choice.kernel
        host = self._on_host()
        self._report(host)
        if device not in self._stagings:
            self._stagings[device] = Staging(lane_to(device), self._bucket_bytes)
        return OffloadKernel(choice.kernel, host.kernel, self._stagings[device])

    def describe(self, members: Sequence[Member]) -> str:
        """Every device's kernel, what it leaves to torch operations, and what goes by way of the host."""
        by_device: dict[torch.device, list[Member]] = {}
        for member in sorted(members, key=lambda member: str(member.param.device)):
            by_device.setdefault(member.param.device, []).append(member)
        lines = []
        for device, here in by_device.items():
            choice = kernels.choose(self._request, device)
            lines.append(str(choice) + kernels.left_out(choice.kernel, here))
            offloaded = [member for member in here if member.is_offloaded]
            if offloaded:
                host, size = self._on_host(), human_bytes(self._bucket_bytes)
                lines.append(
                    f"{host}{kernels.left_out(host.kernel, offloaded)}, for {len(offloaded)} of {len(here)} parameters "
                    f"on {device} with state in host memory, by way of {BUFFERS} buffers of {size}"
                )
        return "; ".join(lines)

    def _on_host(self) -> Choice:
        """A kernel that was asked for by name may be one of the device's own."""
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

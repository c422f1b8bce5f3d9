"""Ways between a device and host memory. Copies of a lane run in order, beside what device and host compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # (on the host, on the device)
Ticket = Any  # stands for copies that were asked for; None for none


class Lane(Protocol):
    """What overlaps is up to a lane; what must have happened before what is said here."""

    def buffer(self, nbytes: int) -> Tensor:
        """Bytes of host memory, to copy from and to."""

    def begin(self) -> None:
        """A step begins: its copies come after all that the device was asked for so far."""

    def down(self, pairs: Sequence[Pair], after: Ticket) -> Ticket:
        """To the host, once ``after`` is done."""

    def wait(self, ticket: Ticket) -> None:
        """The host waits until copies are done."""

    def up(self, pairs: Sequence[Pair], *, in_turn: bool) -> Ticket:
        """To the device; ``in_turn``: after all that the device was asked for since the step began, too."""

    def end(self) -> None:
        """What the device is asked for from now on comes after all copies to it."""


class PlainLane:
    """Copies when it is asked, and waits: right on any device."""

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def begin(self) -> None:
        pass

    def down(self, pairs: Sequence[Pair], after: Ticket) -> Ticket:
        for host, device in pairs:
            host.copy_(device)

    def wait(self, ticket: Ticket) -> None:
        pass

    def up(self, pairs: Sequence[Pair], *, in_turn: bool) -> Ticket:
        for host, device in pairs:
            device.copy_(host)

    def end(self) -> None:
        pass


class CudaLane:
    """Two streams, one for each way, and pinned memory. The host waits for what it reads, and for nothing else.

    Gradients need no ``record_stream``: when a step returns, the host has waited for every copy of one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def begin(self) -> None:
        for stream in (self._down, self._up):
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def down(self, pairs: Sequence[Pair], after: Ticket) -> Ticket:
        if after is not None:
            self._down.wait_event(after)
        with torch.cuda.stream(self._down):
            for host, device in pairs:
                host.copy_(device, non_blocking=True)
        return self._down.record_event()

    def wait(self, ticket: Ticket) -> None:
        ticket.synchronize()

    def up(self, pairs: Sequence[Pair], *, in_turn: bool) -> Ticket:
        if in_turn:
            self._up.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._up):
            for host, device in pairs:
                device.copy_(host, non_blocking=True)
        return self._up.record_event()

    def end(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._up)


def lane_to(device: torch.device) -> Lane:
    """The best lane that there is."""
    return CudaLane(device) if device.type == "cuda" else PlainLane()

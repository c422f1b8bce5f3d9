"""One update of a made-up parameter, for whoever wants to time it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from baoc.core.configuration import Configuration
from baoc.core.spec import Hyper, Shape
from baoc.optim import kernels
from baoc.optim.kernels.job import Job
from baoc.optim.state import new_state


class StepRunner:
    """Makes updates of tensors of ones, run by the kernel that serves a device.

    >>> update = StepRunner()((64, 64), Configuration("sgd", ()))
    >>> update()
    """

    def __init__(self, device: torch.device | str = "cpu", kernel: str = "auto") -> None:
        self.device = torch.device(device)
        self._kernel = kernels.choose(kernel, self.device).kernel

    @property
    def name(self) -> str:
        """What the times belong to."""
        return f"{self._kernel.name} on {self.device}"

    def __call__(self, shape: Shape, configuration: Configuration) -> Callable[[], None]:
        """A function that makes one update and returns when it is done."""
        layout = configuration.layout(shape)
        state = new_state(layout, self.device)
        param, grad = torch.ones(shape, device=self.device), torch.ones(shape, device=self.device)
        job = Job.of(layout, param, grad, state, Hyper(lr=1e-3))

        def update() -> None:
            with torch.no_grad():
                self._kernel.run([job])
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)

        return update

"""The same update in several ways. ``choose`` says which one runs on a device, and why."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baoc.optim.kernels import graphs, native, triton
from baoc.optim.kernels.eager import EagerKernel, Rows
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.native import words

logger = logging.getLogger("baoc")

REQUESTS = ("auto", "native", "triton", "compiled", "eager")


class Kernel(Protocol):
    """Runs one optimizer step over many parameters."""

    name: str

    def run(self, jobs: Iterable[Job]) -> bool:
        """Whether some gradient may be no number: what reads them all anyway may know that none is."""

    def rows(self, jobs: Sequence[Job], spiked: list[bool] | None = None) -> Rows:
        """What goes row by row of jobs with matrices; ``spiked`` is told whether some gradient may be no number."""


@dataclass(frozen=True)
class Choice:
    """Which kernel serves a device, and why.

    >>> choose("eager", torch.device("cpu")).name
    'eager'
    """

    kernel: Kernel
    device: str
    reason: str

    @property
    def name(self) -> str:
        return self.kernel.name

    def __str__(self) -> str:
        return f"{self.name} on {self.device}: {self.reason}"


def reads_flag(kernels: Collection[Kernel]) -> bool:
    """Whether a step is of one kernel, which can be told on the device to change nothing."""
    return len(kernels) == 1 and all(isinstance(kernel, triton.TritonKernel) for kernel in kernels)


def run(kernel: Kernel, jobs: Iterable[Job], flag: Tensor | None) -> bool:
    """Run a kernel, but for what a ``flag`` on the device says: see :attr:`baoc.optim.guard.Guard.flag`."""
    if graphs.is_replaying():
        return _graph_kernel(kernel).run(jobs)
    return kernel.run(jobs, flag) if isinstance(kernel, triton.TritonKernel) else kernel.run(jobs)


def record(kernel: Kernel, jobs: Iterable[Job]) -> None:
    """Launch a step while a CUDA graph is captured: nothing is run, and nothing is changed."""
    _graph_kernel(kernel).run(jobs)


def _graph_kernel(kernel: Kernel) -> triton.TritonKernel:
    if not isinstance(kernel, triton.TritonKernel):
        raise RuntimeError(
            f"a step of kernel={kernel.name!r} cannot be in a CUDA graph: it would repeat the numbers of the step that "
            "was captured. Use kernel='triton', or capture forward and backward passes only, and step after each "
            "replay."
        )
    return kernel


def left_out(kernel: Kernel, jobs: Iterable[Job]) -> str:
    """Return which jobs a kernel leaves to torch operations, and why, as the rest of a sentence."""
    if isinstance(kernel, triton.TritonKernel):
        return kernel.left_out
    if not isinstance(kernel, native.NativeKernel):
        return ""
    by_reason: dict[str, list[str]] = {}
    for job in jobs:
        reason = words.shortfall(job)
        if reason is not None:
            by_reason.setdefault(reason, []).append(job.name)
    if not by_reason:
        return ""
    told = [f"{reason} ({len(names)}, such as {names[0]!r})" for reason, names in by_reason.items()]
    return f", but in torch operations, several times slower, where {'; '.join(told)}"


def check_request(request: str) -> None:
    if request not in REQUESTS:
        raise ValueError(f"unknown kernel {request!r}. Choose one of {', '.join(map(repr, REQUESTS))}.")


@functools.cache
def choose(request: str, device: torch.device) -> Choice:
    """Pick the kernel for a device; raise if a kernel was asked for by name and cannot run here."""
    check_request(request)
    if request == "eager":
        return Choice(EagerKernel(), str(device), "asked for by name")
    if request == "native" or (request == "auto" and device.type == "cpu"):
        return _native(request, device)
    without_triton = triton.obstacle(device)
    if request == "triton" and without_triton:
        raise RuntimeError(f"kernel='triton' cannot run on {device}: {without_triton}. Use kernel='auto'.")
    if request == "triton" or (request == "auto" and not without_triton):
        return _triton(request, device)
    obstacle = _obstacle_to_compiling(device)
    if request == "compiled":
        if obstacle:
            raise RuntimeError(f"kernel='compiled' cannot run on {device}: {obstacle}. Use kernel='eager' or 'auto'.")
        return Choice(_compiled(), str(device), "asked for by name")
    if obstacle:
        return Choice(EagerKernel(), str(device), f"torch.compile cannot run here: {obstacle}")
    return Choice(_compiled(), str(device), "one fused pass over memory")


def _native(request: str, device: torch.device) -> Choice:
    obstacle = words.obstacle() if device.type == "cpu" else "it runs on CPUs only"
    if obstacle is None:
        kernel = native.NativeKernel()
        reason = "asked for by name" if request == "native" else "one pass over memory"
        return Choice(kernel, str(device), f"{reason}, {kernel.isa}")
    if request == "native":
        raise RuntimeError(f"kernel='native' cannot run on {device}: {obstacle}. Use kernel='auto'.")
    # compiling would take longer than it saves in a short run
    logger.warning("optimizer steps will be several times slower on %s: %s", device, obstacle)
    return Choice(EagerKernel(), str(device), obstacle)


def _triton(request: str, device: torch.device) -> Choice:
    reason = "asked for by name" if request == "triton" else "one launch for all tensors of a kind"
    verifier = triton.Verifier(device, strict=request == "triton")
    kernel = triton.TritonKernel(device, lambda: _without_triton(device), verifier=verifier)
    return Choice(kernel, str(device), reason)


def _without_triton(device: torch.device) -> Kernel:
    """Make the kernel for what has no Triton code, or none that matches the eager update."""
    return EagerKernel() if device.type == "cpu" or _obstacle_to_compiling(device) else _compiled()


def _compiled() -> Kernel:
    from baoc.optim.kernels.compiled import CompiledKernel  # pulls in torch's compiler, which is slow to import

    return CompiledKernel()


def _obstacle_to_compiling(device: torch.device) -> str | None:
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        return None if shutil.which(compiler) or shutil.which("clang++") else f"no C++ compiler ({compiler}) was found"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None

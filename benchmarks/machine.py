"""What a benchmark runs on: its description, its memory bandwidth, and the memory that an action takes."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.timing import timed
from experiments import process

_CPUINFO = Path("/proc/cpuinfo")
_STAT = Path("/proc/stat")


def describe(packages: Sequence[str] = ()) -> dict[str, object]:
    """Processor, cores, threads and versions. Nothing that tells whose machine it is."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {name: _version(name) for name in packages},
    }


class Bandwidth:
    """Measures memory bandwidth with ``a += x * b`` on two fp32 buffers, and remembers the best it saw.

    The update writes where it has read, as an optimizer does. STREAM's triad ``a = b + x * c`` would look slower than
    memory is: a processor reads ``a`` too before it overwrites it, and STREAM does not count that. Buffers should be as
    large as what an optimizer goes through, not only larger than the cache: address translation costs time as well.
    """

    def __init__(self, numel: int) -> None:
        self._a, self._b = torch.ones(numel), torch.ones(numel)
        self._best = math.inf

    def measure(self, repeats: int = 10) -> float:
        """Bytes per second, the best of these runs and of all before."""
        self._best = min(self._best, *(timed(self._update) for _ in range(repeats)))
        return 3 * self._a.nbytes / self._best

    def _update(self) -> None:
        self._a.add_(self._b, alpha=1e-6)


def warm_up(seconds: float = 2.0) -> None:
    """Keep torch's threads busy until the kernel has given each a core of its own; in the first second it may not."""
    buffer = torch.ones(1 << 22)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        buffer.mul_(1.0)


class OtherLoad:
    """How much of the processors other processes use from now on. A comparison is worth little beside a busy one."""

    def __init__(self) -> None:
        self._busy, self._own, self._began = _busy_seconds(), _own_seconds(), time.perf_counter()

    def share(self) -> float | None:
        """As a share of all processors' time since the start; ``None`` where the kernel does not tell."""
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return None
        others = (busy - self._busy) - (_own_seconds() - self._own)
        return max(0.0, others / ((time.perf_counter() - self._began) * (os.cpu_count() or 1)))


def extra_peak(action: Callable[[], object]) -> int | None:
    """Bytes by which the process grew while the action ran; ``None`` where the kernel does not tell.

    This sees every allocation, torch's and C's. Memory that an allocator kept from before would hide some, so it is
    given back first. What it cannot see are pages that were mapped already: thread stacks, and free parts of pages in
    use.
    """
    try:
        _trim()
        process.forget_peak()
        before = process.resident_bytes()
        action()
        return max(0, process.peak_bytes() - before)
    except OSError:
        return None


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_seconds() -> float | None:
    try:
        fields = _STAT.read_text().splitlines()[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl and macOS do not
    if trim is not None:
        trim(0)


def _processor() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

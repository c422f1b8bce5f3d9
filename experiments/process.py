"""What the kernel tells a process of its own memory, on Linux. Elsewhere each function raises an ``OSError``."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): sets VmHWM back to what is resident now


def resident_bytes() -> int:
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """The most that was resident, since the start or since :func:`forget_peak`."""
    return _status_bytes("VmHWM")


def forget_peak() -> None:
    _CLEAR.write_text(_RESET_PEAK)


def return_freed() -> None:
    """Give memory that nothing uses any more back to the system. With another C library than glibc nothing happens."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_STATUS} has no {key}")

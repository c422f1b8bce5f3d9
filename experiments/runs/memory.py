"""The most memory that a run held: of the GPU where there is one, else of the whole process."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5): sets VmHWM back to what is resident now


def start(device: torch.device) -> None:
    """Forget the peaks of earlier runs."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        try:
            _CLEAR.write_text(_RESET_PEAK)
        except OSError:  # some containers forbid it; the peak is then that of all runs so far
            return


def peak(device: torch.device) -> int | None:
    """Bytes, if this machine can tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    found = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE) if _STATUS.exists() else None
    return int(found[1]) * 1024 if found else None


def kind(device: torch.device) -> str | None:
    """What :func:`peak` counts."""
    if device.type == "cuda":
        return "torch.cuda.max_memory_allocated"
    return "VmHWM of the process" if _STATUS.exists() else None

"""The most memory that a run held: of the GPU where there is one, else of the whole process."""

from __future__ import annotations

from contextlib import suppress

import torch

from experiments import process


def start(device: torch.device) -> None:
    """Forget the peaks of earlier runs."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # some containers forbid it; the peak is then that of all runs so far
        process.forget_peak()


def peak(device: torch.device) -> int | None:
    """Bytes, if this machine can tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return process.peak_bytes()
    except OSError:
        return None


def kind(device: torch.device) -> str | None:
    """What :func:`peak` counts."""
    if device.type == "cuda":
        return "torch.cuda.max_memory_allocated"
    return None if peak(device) is None else "VmHWM of the process"

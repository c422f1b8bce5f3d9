"""Time steps of our configurations and of other installed optimizers: first step, later steps, and peak memory."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from baoc.optim.optimizer import BlockOptimizer
from baoc.optim.state import state_bytes

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
_STEPS = 20
_PEERS = {
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit"),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit"),
}


@dataclass(frozen=True)
class Timing:
    """The times of one optimizer on all parameters of a model."""

    optimizer: str
    first_seconds: float | None = None  # includes compilation
    seconds: float | None = None  # median
    state_bytes: int | None = None
    peak_bytes: int | None = None  # of a step, without parameters, gradients and state; GPUs only
    problem: str | None = None
    failed: bool = False  # the problem is ours


def time_steps(configurations: Sequence[str], device: torch.device, tiny: bool) -> list[Timing]:
    """Time torch's fused AdamW, our configurations, and other optimizers.

    Args:
        configurations: The configurations to time.
        device: The device of all parameters.
        tiny: Use small tensors and few steps.

    Returns:
        One result per optimizer; its ``problem`` says why it could not be timed, such as a missing package.
    """
    makers: dict[str, Make | str] = {
        "torch AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
        **{name: _ours(name, device) for name in configurations},
        **{name: _peer(*where) for name, where in _PEERS.items() if device.type == "cuda"},
    }
    shapes = _shapes(16, 1) if tiny else _shapes(1024, 12)
    return [_timed(name, make, shapes, device, 2 if tiny else _STEPS) for name, make in makers.items()]


def _ours(configuration: str, device: torch.device) -> Make:
    return lambda params: BlockOptimizer(params, lr=1e-4, plan=f"{configuration} else adamw-32", kernel="triton")


def _peer(module: str, name: str) -> Make | str:
    try:
        optimizer = getattr(importlib.import_module(module), name)
    except ImportError as error:
        return f"not installed ({error})"
    return lambda params: optimizer(params, lr=1e-4)


def _shapes(width: int, depth: int) -> list[tuple[int, ...]]:
    """Return the shapes of a transformer: width 1,024 and depth 12 have 184M parameters in 146 tensors."""
    layer = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), *[(width,)] * 8]
    return [(32 * width, width), *layer * depth, (width,)]


def _timed(name: str, make: Make | str, shapes: Sequence[tuple[int, ...]], device: torch.device, steps: int) -> Timing:
    if isinstance(make, str):
        return Timing(name, problem=make)
    params = [nn.Parameter(torch.full(shape, 0.1, device=device)) for shape in shapes]
    for param in params:
        param.grad = torch.full_like(param, 0.01)
    try:
        optimizer = make(params)
        first = _seconds(optimizer.step, device)
        seconds = sorted(_seconds(optimizer.step, device) for _ in range(steps))[steps // 2]
        return Timing(name, first, seconds, state_bytes(optimizer), _peak(optimizer.step, device))
    except Exception as error:
        return Timing(name, problem=first_line(error), failed=name not in _PEERS)


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _seconds(step: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - start


def _peak(step: Callable[[], Any], device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    _wait(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Parameters that share memory. They are refused, or every run with two threads ends like one with a single thread.

Two threads that update overlapping elements at once would make results differ from run to run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from baoc import BlockOptimizer
from benchmarks.torture.trials import tried

CONFIGURATIONS = ("adamw-32", "adamw-16", "adamw-8", "lion-16", "sgdwm-32", "muon-8 else adamw-8")
_PARAMS, _REPEATS, _STEPS, _THREADS = 8, 4, 4, 2

Overlap = Callable[[Tensor, random.Random], list[Tensor]]


def _same(base: Tensor, draw: random.Random) -> list[Tensor]:
    return [base.view(base.shape) for _ in range(_PARAMS)]


def _rows(base: Tensor, draw: random.Random) -> list[Tensor]:
    height = draw.randrange(len(base) // 2 + 1, len(base))
    starts = [draw.randrange(len(base) - height + 1) for _ in range(_PARAMS)]
    return [base[start : start + height] for start in starts]


def _flat(base: Tensor, draw: random.Random) -> list[Tensor]:
    start = draw.randrange(base.numel() // 4)
    return [base, base.view(-1)[start : start + base.numel() // 2]] * (_PARAMS // 2)


def _transposed(base: Tensor, draw: random.Random) -> list[Tensor]:
    return [base, base.t()] * (_PARAMS // 2)


def _apart(base: Tensor, draw: random.Random) -> list[Tensor]:
    """One storage, but no common element: must not be refused."""
    return list(base.chunk(_PARAMS))


OVERLAPS: dict[str, Overlap] = {
    "same": _same,
    "rows": _rows,
    "flat": _flat,
    "transposed": _transposed,
    "apart": _apart,
}


def _train(overlap: str, seed: str, configuration: str, threads: int) -> bytes | None:
    """Return the weights after a few steps, or None if the parameters are refused."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    base = torch.randn(16 * draw.randrange(4, 8), 512, generator=generator)  # a span of the kernel or less
    params = [nn.Parameter(part) for part in OVERLAPS[overlap](base, draw)]
    gradients = [[torch.randn(param.shape, generator=generator) for param in params] for _ in range(_STEPS)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        optimizer = BlockOptimizer(params, lr=1e-2, plan=configuration)
        for step in gradients:
            for param, gradient in zip(params, step):
                param.grad = gradient
            optimizer.step()
    except (ValueError, NotImplementedError) as error:
        if "memory" not in str(error):
            raise
        return None
    finally:
        torch.set_num_threads(before)
    return base.numpy().tobytes()


def attempt(overlap: str, draw: random.Random) -> str:
    """Train with one thread and then several times with two."""
    configuration, seed = draw.choice(CONFIGURATIONS), str(draw.random())
    expected = _train(overlap, seed, configuration, threads=1)
    if expected is None:
        assert overlap != "apart", "parameters without a common element are refused"
        return "refused"
    for _ in range(_REPEATS):
        found = _train(overlap, seed, configuration, _THREADS)
        assert found == expected, f"{configuration}: two threads end with other weights than one"
    return "equal"


def run(times: int, seed: int = 0, names: list[str] | None = None) -> dict[str, Any]:
    """Try ``times`` pairs of parameters."""
    return tried(times, seed, names or list(OVERLAPS), attempt)

"""Processes that train together, as torchrun would start them, on a CPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# what takes seconds to import is imported once, by the process that the ranks are forked from
multiprocessing.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "baoc"]
)

PATIENCE = timedelta(minutes=2)
"""How long a rank waits for another: a deadlock is an error, not a test that never ends."""


def together(target: Callable[..., Any], ranks: int, folder: Path, *args: Any) -> list[Any]:
    """``target(rank, *args)`` on every rank; what each of them returned, if ``torch.save`` can write it."""
    folder.mkdir(parents=True, exist_ok=True)
    mp.start_processes(_run, (ranks, str(folder), target, args), nprocs=ranks, start_method="forkserver")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


def _run(rank: int, ranks: int, folder: str, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks, timeout=PATIENCE
    )
    torch.save(target(rank, *args), Path(folder, f"rank{rank}.pt"))
    dist.destroy_process_group()

"""Several processes that train one model, as ``torchrun`` starts them. Without it there is one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process prints and writes."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Join the other processes, if there are any."""
    if world() == 1 or dist.is_initialized():
        yield
        return
    if device.startswith("cuda"):
        torch.cuda.set_device(local(device))
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def local(device: str) -> torch.device:
    """Return this process's own device."""
    if world() > 1 and device == "cuda":
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device(device)


def averaging(model: nn.Module, device: torch.device) -> nn.Module:
    """Return the model to call in training, whose gradients are the mean over processes."""
    if not dist.is_initialized():
        return model
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def part_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this process's examples of a batch."""
    if not dist.is_initialized():
        return batch
    return {name: value[dist.get_rank() :: dist.get_world_size()] for name, value in batch.items()}


def mean(loss: Tensor) -> float:
    """Return the mean loss of all processes, so that all of them see it when it is not finite."""
    if not dist.is_initialized():
        return loss.item()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def agreed(value: T) -> T:
    """Return the first process's value: scores may differ in their last bits, and what follows depends on them."""
    if not dist.is_initialized():
        return value
    values: list[Any] = [value]
    dist.broadcast_object_list(values)
    return values[0]  # type: ignore[no-any-return]

"""Two ranks that see different data make one plan, and keep the same weights to the bit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from baoc import BAOC

RANKS, STEPS, WARMUP = 2, 8, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2)
        )
        self.head = nn.Linear(64, 100)

    def forward(self, words):
        x = self.embed(words)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def train(rank: int, folder: str, settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    model = DistributedDataParallel(Net())
    optimizer = BAOC(model.module, lr=3e-3, warmup=WARMUP, **settings)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        words = torch.randint(100, (4 + 4 * rank, 16), generator=generator)  # of different sizes too
        nn.functional.cross_entropy(model(words).flatten(0, 1), (3 * words % 100).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
    Path(folder, f"plan{rank}").write_text(optimizer.plan.to_json())
    Path(folder, f"weights{rank}").write_text(hashlib.sha256(weights).hexdigest())
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "settings",
    [{"memory": 0.13}, {"memory": 0.5, "replan_every": 2}, {"memory": 0.5, "space": "paper"}],
    ids=["measured", "replanned", "paper"],
)
def test_ranks_agree(settings: dict[str, Any], tmp_path: Path) -> None:
    mp.spawn(train, (str(tmp_path), settings), nprocs=RANKS)
    for what in ("plan", "weights"):
        first, *others = [Path(tmp_path, f"{what}{rank}").read_text() for rank in range(RANKS)]
        assert others == [first] * len(others), what

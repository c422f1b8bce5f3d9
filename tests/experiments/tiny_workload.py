"""A workload file that trains in a moment, and requests for runs of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments import workloads
from experiments.runs import Cell, Request, Row, Store
from experiments.runs.training import workload_of

WORKLOAD = """
import torch
from torch import nn
from experiments.workloads import LOSS, Workload

class Tiny(Workload):
    name, description, metric = "tiny", "an MLP", LOSS
    steps, batch_size, lr = 30, 8, 3e-3
    bad_step, bad_loss, seen, final = None, None, 0, None

    def build(self, *, seed, device="cpu", pretrained=None):
        torch.manual_seed(seed)
        layers = nn.Linear(64, 192), nn.ReLU(), nn.Dropout(0.1), nn.Linear(192, 64)
        return nn.Sequential(*layers).to(device)

    def train_batches(self, *, seed, start=0):
        while True:
            generator = torch.Generator().manual_seed(1000 * seed + start)
            yield {"x": torch.randn(self.batch_size, 64, generator=generator)}
            start += 1

    def loss(self, model, batch):
        loss = (model(batch["x"]) - batch["x"].roll(1, dims=-1)).square().mean()
        if model.training:
            Tiny.seen += 1
            if Tiny.seen == Tiny.bad_step:
                if Tiny.bad_loss is None:
                    raise RuntimeError("killed")
                return Tiny.bad_loss * loss
        return loss

    @torch.no_grad()
    def evaluate(self, model, split, max_batches=None):
        Tiny.final = {name: value.clone() for name, value in model.state_dict().items()}
        batch = next(self.train_batches(seed=77 + (split == "test")))
        try:
            return {"loss": self.loss(model.eval(), batch).item()}
        finally:
            model.train()
"""
STEPS = 30


def class_of(workload: str) -> Any:
    return type(workload_of(workload, workloads.Options()))


def request_for(tiny: str, tmp_path: Path, **changes: Any) -> Request:
    asked = {"workloads": (tiny,), "methods": ("adamw32", "baoc@0.5"), "seeds": 1, "tuning": False}
    return Request("exp1", output=tmp_path / "out", **{**asked, **changes})


def cell_for(tiny: str, method: str, variant: str = "") -> Cell:
    return Cell(tiny, method, seed=0, lr_factor=1.0, steps=STEPS, variant=variant)


def rows_in(request: Request) -> list[Row]:
    return Store(request.folder).rows

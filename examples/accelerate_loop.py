"""Accelerate: prepare as usual, and read the plan through its wrapper.

pip install accelerate
accelerate launch examples/accelerate_loop.py
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn

import baoc
from baoc.integrations import unwrap_accelerate


def main(arguments: list[str] | None = None) -> tuple[list[float], torch.optim.Optimizer]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 256))
    optimizer = baoc.BAOC(model, lr=3e-3, weight_decay=0.1, memory=0.25)
    letters = torch.randint(256, (options.steps * 2, 64))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(letters), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    unwrap_accelerate(optimizer)  # the wrapper now has plan, metrics and replan

    losses = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), (batch * 7 + 1).flatten() % 256)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.print(optimizer.plan)
    return losses, optimizer


if __name__ == "__main__":
    main()

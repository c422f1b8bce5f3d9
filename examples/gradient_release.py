"""Gradient release: each parameter is updated within backward(), so the gradients never exist all at once.

python examples/gradient_release.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import baoc


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 256))
    optimizer = baoc.BAOC(model, lr=3e-3, weight_decay=0.1, memory=0.25)
    baoc.release_gradients(optimizer, max_norm=1.0)
    losses = []
    for _ in range(options.steps):
        letters = torch.randint(256, (64,))
        loss = nn.functional.cross_entropy(model(letters), (letters * 7 + 1) % 256)
        loss.backward()  # also updates the parameters
        optimizer.step()  # finishes the step
        losses.append(loss.item())
    print(optimizer.plan)
    return losses


if __name__ == "__main__":
    main()

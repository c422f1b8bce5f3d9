"""Plain PyTorch: accumulation, clipping, mixed precision and a compiled model. Only the optimizer's line changes.

python examples/plain.py                     # bf16 autocast
python examples/plain.py --precision fp16    # with a GradScaler, where the device has fp16 (a CPU takes bf16)
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import baoc


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--precision", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--compile", action="store_true", help="run the model through torch.compile")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Embedding(256, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 256)).to(device)
    # pass the model itself, not the compiled one, so that tokens per step can be counted
    optimizer = baoc.BAOC(model, lr=3e-3, weight_decay=0.1, memory=0.25, on_nonfinite="skip")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    dtype = torch.float16 if options.precision == "fp16" and device == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device, enabled=options.precision == "fp16")
    forward = torch.compile(model) if options.compile else model

    losses = []
    for step in range(options.steps):
        for _ in range(2):  # accumulate the gradients of two batches
            letters = torch.randint(256, (64,), device=device)
            with torch.autocast(device, dtype=dtype):
                loss = nn.functional.cross_entropy(forward(letters), (letters * 7 + 1) % 256)
            scaler.scale(loss / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 20 == 0:
            skipped = optimizer.metrics()["skipped_steps"]
            print(f"step {step + 1}: loss {loss.item():.3f}, {skipped:.0f} steps skipped")
    print(optimizer.plan)
    return losses


if __name__ == "__main__":
    main()

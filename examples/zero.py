"""DeepSpeed ZeRO: one element-wise configuration for the flat partitions that it hands to optimizers.

pip install deepspeed
deepspeed examples/zero.py        # for FSDP2, which keeps the rows of matrices, and with them every plan: fsdp2.py
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from torch import nn

from baoc.integrations import for_zero


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stage", type=int, choices=[1, 2], default=2)
    parser.add_argument("--local_rank", type=int, default=0, help="the launcher's")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 256))
    optimizer = for_zero(model, "adamw-16", lr=3e-3, weight_decay=0.1)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 64,
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": options.stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1_000_000,
        },
    )
    losses = []
    for _ in range(options.steps):
        letters = torch.randint(256, (64,), device=engine.device)
        loss = nn.functional.cross_entropy(engine(letters).float(), (letters * 7 + 1) % 256)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    print(optimizer.plan)
    return losses


if __name__ == "__main__":
    main()

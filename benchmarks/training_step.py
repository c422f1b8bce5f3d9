"""What an update is a share of: the forward and backward pass of a small batch."""

from __future__ import annotations

import torch

from baoc.tools.models import MODELS, ModelError
from benchmarks.timing import Spread, spread, timed

BATCH, LENGTH = 4, 128
REPEATS, QUICK_REPEATS = 5, 1


def forward_and_backward(quick: bool = False) -> Spread | None:
    """Seconds of one pass of GPT2-small over 4 x 128 tokens; ``None`` if its package is not installed."""
    try:
        model = MODELS["gpt2-small"]()
    except ModelError:
        return None
    tokens = torch.randint(0, 50_000, (1, 8) if quick else (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))

    def run() -> None:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()

    run()
    return spread([timed(run) for _ in range(QUICK_REPEATS if quick else REPEATS)])

"""Steps in CUDA graphs: launches are recorded once; before each replay the host writes the numbers of its step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_REPLAYING = ContextVar("replaying", default=False)


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now is recorded and not run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_replaying() -> bool:
    return _REPLAYING.get()


@contextmanager
def replaying() -> Iterator[None]:
    """Within it ``optimizer.step()`` writes its numbers and counts, but launches nothing: ``graph.replay()`` is next.

    ::

        with torch.cuda.graph(graph):          # after some usual steps
            loss = compute_loss(static_batch)
            loss.backward()
            optimizer.step()

        for batch in loader:
            static_batch.copy_(batch)
            with replaying():
                optimizer.step()
            graph.replay()
    """
    token = _REPLAYING.set(True)
    try:
        yield
    finally:
        _REPLAYING.reset(token)

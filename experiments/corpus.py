"""Text that every Python installation has: the language reference behind ``help()``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Corpus:
    """Characters as integers, the last tenth held out."""

    train: Tensor  # (tokens,)
    test: Tensor  # (tokens,)
    vocabulary: str

    def batch(self, size: int, context: int, generator: torch.Generator) -> Tensor:
        """Random windows of the training text: (size, context + 1)."""
        starts = torch.randint(len(self.train) - context, (size,), generator=generator)
        return torch.stack([self.train[start : start + context + 1] for start in starts.tolist()])

    def test_windows(self, context: int) -> Tensor:
        """The whole test text in windows that overlap by one character: (windows, context + 1)."""
        return self.test.unfold(0, context + 1, context)


def load() -> Corpus:
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics))
    vocabulary = "".join(sorted(set(text)))
    index = {character: i for i, character in enumerate(vocabulary)}
    tokens = torch.tensor([index[character] for character in text])
    cut = len(tokens) * 9 // 10
    return Corpus(tokens[:cut], tokens[cut:], vocabulary)

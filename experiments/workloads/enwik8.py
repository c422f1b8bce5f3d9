"""Llamas of one family on the bytes of enwik8, the first 100 MB of a dump of the English Wikipedia."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.packages import need
from experiments.workloads.base import LOSS, Batch, Options, Split, WorkloadError
from experiments.workloads.family import FamilyWorkload, Size
from experiments.workloads.sources import folder_of, missing

BYTES = 100_000_000
HELD_OUT = 5_000_000
"""Bytes of validation and of test, as is usual: 90, 5 and 5 MB."""
LENGTH = 128
"""Bytes in a sequence."""
LAYERS = 4
WIDTHS = {"0.05m": 32, "0.2m": 64, "0.8m": 128, "3m": 256}
"""By the number of non-embedding parameters: 12 x layers x width^2."""


def hidden_parameters(width: int) -> int:
    """Return the number of parameters without embeddings, head and vectors.

    >>> [hidden_parameters(width) for width in WIDTHS.values()]
    [49152, 196608, 786432, 3145728]
    """
    return 12 * LAYERS * width**2


def all_parameters(width: int) -> int:
    """Return the number of all parameters: those of transformers, whose MLPs have a whole number of rows."""
    return LAYERS * (4 * width**2 + 3 * width * (width * 8 // 3)) + (2 * LAYERS + 1) * width + 2 * 256 * width


class LlamaOnBytes(FamilyWorkload):
    """Predict every next byte of windows of one length."""

    family, metric = "Llama", LOSS
    tasks = {"enwik8": "predicting the bytes of Wikipedia"}

    def __init__(self, name: str, size: Size, dataset: str, options: Options | None = None) -> None:
        super().__init__(name, size, dataset, options)
        self.length = self.options.length or LENGTH

    def make(self, pretrained: str | None) -> nn.Module:
        if pretrained:
            raise WorkloadError(f"{self.name} is trained from scratch: leave out --pretrained.")
        model = self.size.build()
        model.config.use_cache = False  # type: ignore[union-attr, assignment]
        return model

    def checkpoint(self, model: nn.Module) -> None:
        model.gradient_checkpointing_enable()  # type: ignore[operator]

    def count(self, split: Split) -> int:
        return (len(self._bytes(split)) - 1) // self.length

    def collate(self, split: Split, indices: Sequence[int], generator: torch.Generator) -> Batch:
        text = self._bytes(split)
        starts = [index * self.length for index in indices]
        windows = torch.stack([text[start : start + self.length + 1] for start in starts]).long()
        return {"input_ids": windows[:, :-1], "labels": windows[:, 1:]}

    def sums(self, model: nn.Module, batch: Batch) -> Batch:
        logits = model(input_ids=batch["input_ids"]).logits  # (examples, length, 256)
        labels = batch["labels"].flatten()
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels, reduction="sum")
        return {"loss": loss, "count": torch.tensor(len(labels))}

    def _bytes(self, split: Split) -> Tensor:
        return load(self.options)[split]


def load(options: Options) -> dict[Split, Tensor]:
    """Return the splits as bytes, (bytes,) each.

    Raises:
        WorkloadError: there is no data folder with enwik8, or its file is not complete.
    """
    folder = folder_of("enwik8", options)
    if folder is None:
        raise missing("enwik8", "no data folder was given, and it is not read from the hub")
    return _load(folder)


@lru_cache(maxsize=1)
def _load(folder: Path) -> dict[Split, Tensor]:
    plain, packed = folder / "enwik8", folder / "enwik8.gz"
    if plain.is_file():
        content = plain.read_bytes()
    elif packed.is_file():
        content = gzip.decompress(packed.read_bytes())
    else:
        raise missing("enwik8", f"there is neither {plain.name} nor {packed.name} in {str(folder)!r}")
    if len(content) < 3 * HELD_OUT:
        raise WorkloadError(f"enwik8 in {str(folder)!r} has {len(content)} bytes, not {BYTES}: fetch it again.")
    text = torch.from_numpy(np.frombuffer(bytearray(content[:BYTES]), dtype=np.uint8))
    train, validation, test = text.split([len(text) - 2 * HELD_OUT, HELD_OUT, HELD_OUT])
    return {"train": train, "validation": validation, "test": test}


def llama_on_bytes(width: int) -> nn.Module:
    """A Llama with heads of 32, and a head that is not tied."""
    transformers: Any = need("transformers", "a Llama on bytes")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=LAYERS,
        num_attention_heads=width // 32, max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


SIZES = {
    f"llama-{name}": Size(
        build=partial(llama_on_bytes, width),
        parameters=all_parameters(width),
        description=f"a Llama of {LAYERS} layers and width {width}",
        batch_size=16,
        steps=20 * hidden_parameters(width) // (16 * LENGTH),
        lr=4e-3,
    )
    for name, width in WIDTHS.items()
}

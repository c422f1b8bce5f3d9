"""From text to token ids: a pretrained tokenizer, or a byte-level BPE trained on the training split and kept."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baoc.tools.models.resolve import explained
from experiments.packages import need
from experiments.workloads.base import WorkloadError

TRAINED_SIZE = 1024  # few, so that little of a small model is embeddings
PAD, END = "<pad>", "<end>"
_FILES = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")


@dataclass(frozen=True)
class Tokenizer:
    """What the workloads need of one, with the same face for both kinds."""

    encode: Callable[[list[str]], list[list[int]]]
    end: int
    """Ends a response."""
    pad: int


def pretrained(source: str) -> Tokenizer | None:
    """The tokenizer beside pretrained weights; None if these are a folder without one, such as our own checkpoints."""
    folder = Path(source)
    if folder.exists() and not any((folder / name).is_file() for name in _FILES):
        return None
    transformers = need("transformers", "a pretrained tokenizer")
    with explained(f"the tokenizer of {source!r} cannot be loaded"):
        found = transformers.AutoTokenizer.from_pretrained(source)
    if found.eos_token_id is None:
        raise WorkloadError(f"the tokenizer of {source!r} has no end-of-text token.")
    # Padding is never attended to nor learned, so where there is no token of its own any token does.
    pad = found.eos_token_id if found.pad_token_id is None else found.pad_token_id

    def encode(texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = found(texts, add_special_tokens=False)["input_ids"]
        return ids

    return Tokenizer(encode, found.eos_token_id, pad)


def trained(texts: Sequence[str], cache: Path) -> Tokenizer:
    """A BPE of at most 1,024 tokens, trained on these texts, or found in the cache if it was before."""
    tokenizers = need("tokenizers", "a language workload without a pretrained tokenizer")
    digest = hashlib.blake2b(digest_size=12)
    for text in texts:
        digest.update(text.encode() + b"\0")
    path = cache / f"bpe-{TRAINED_SIZE}-{digest.hexdigest()}.json"
    if not path.is_file():
        _save(_train(tokenizers, texts), path)
    bpe = tokenizers.Tokenizer.from_file(str(path))

    def encode(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in bpe.encode_batch(texts)]

    return Tokenizer(encode, bpe.token_to_id(END), bpe.token_to_id(PAD))


def _train(tokenizers: Any, texts: Sequence[str]) -> Any:
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()  # all bytes, so that no text is unknown
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=TRAINED_SIZE, special_tokens=[PAD, END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def _save(bpe: Any, path: Path) -> None:
    """At once or not at all: the runs of a sweep may get here together."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    os.close(handle)
    bpe.save(temporary)
    os.replace(temporary, path)

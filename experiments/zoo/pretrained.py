"""Fine-tuning of real pretrained weights, from folders as ``transformers`` saves them below ``$BAOC_MODELS``."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.packages import need
from experiments.workloads import Options, text
from experiments.workloads.base import Split
from experiments.workloads.sources import presence
from experiments.zoo.task import Problem, Task, fitted, rows, task

FOLDER = "BAOC_MODELS"
"""The environment variable, so that every process knows."""
LENGTH = 48  # tokens

INTENTS = {
    "balance": ("what is the balance of my {} account", "how much money is left in {}", "show my {} funds"),
    "transfer": ("send money to my {} account", "move fifty dollars to {}", "please wire the rent from {}"),
    "card lost": ("i lost my {} card", "block the stolen {} card", "my {} card is gone, what now"),
    "hours": ("when does the {} branch open", "is the {} office open on sunday", "opening times of {}"),
    "loan": ("can i get a loan for a {}", "what are the rates to borrow for a {}", "apply for credit, a {}"),
    "travel": ("i will be in {} next week", "tell the bank about my trip to {}", "can i pay in {} abroad"),
    "weather": ("will it rain in {} tomorrow", "how hot is it in {}", "forecast for {} please"),
    "music": ("play some {} songs", "turn up the {} playlist", "skip this {} track"),
    "alarm": ("wake me at seven for {}", "set a timer for the {}", "remind me of {} tonight"),
    "recipe": ("how do i cook {}", "what goes into {} soup", "ingredients of {} please"),
}
"""Sentences with a gap, by what the speaker wants."""
FILLERS = (
    "savings",
    "london",
    "family",
    "old",
    "chicken",
    "summer",
    "house",
    "downtown",
    "visa",
    "jazz",
    "paris",
    "car",
)


def missing(chosen: Task) -> bool:
    """Return whether a task needs weights that are not there."""
    folder = os.environ.get(FOLDER)
    return chosen.model is not None and not (folder and (Path(folder) / chosen.model / "config.json").exists())


def folder(name: str) -> str:
    """Return the folder of a model's weights."""
    return str(Path(os.environ[FOLDER]) / name)


class Classifier(nn.Module):
    """An encoder, the mean of its tokens, and a new head."""

    def __init__(self, encoder: nn.Module, classes: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(encoder.config.hidden_size, classes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        return self.head((hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True))


def classifier(classes: int) -> Classifier:
    """Return MiniLM with a new head."""
    return Classifier(need("transformers", "minilm").AutoModel.from_pretrained(folder("minilm")), classes)


def encoded(sentences: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of sentences for MiniLM, and their masks, (n, length)."""
    tokenizer = need("transformers", "minilm").AutoTokenizer.from_pretrained(folder("minilm"))
    settings = {"padding": "max_length", "truncation": True, "max_length": length, "return_tensors": "pt"}
    found = tokenizer(list(sentences), **settings)
    return found["input_ids"], found["attention_mask"]


def intents(patterns: slice, fillers: Sequence[str] = FILLERS) -> list[tuple[str, int]]:
    """Return sentences with what the speaker wants."""
    return [
        (pattern.format(filler), label)
        for label, sentences in enumerate(INTENTS.values())
        for pattern, filler in itertools.product(sentences[patterns], fillers)
    ]


@task(lr=1e-4, steps=30, schedule="cosine", model="minilm")
def minilm_intents(seed: int) -> Problem:
    """MiniLM with a new head tells 10 intents, a sentence pattern of each held out, batches of 8."""
    model = classifier(len(INTENTS))

    def examples(patterns: slice) -> tuple[Tensor, Tensor, Tensor]:
        sentences, labels = zip(*intents(patterns), strict=True)
        return *encoded(sentences, 16), torch.tensor(labels)

    return fitted(
        model,
        lambda tokens, mask, label: F.cross_entropy(model(tokens, mask), label),
        rows(*examples(slice(0, 2)), size=8),
        seed,
        test=examples(slice(2, 3)),
    )


@functools.cache
def windows(name: str, split: Split, length: int) -> Tensor:
    """Return windows (n, length) of a split in a model's tokens: GSM8K where there is data, else Python's docs."""
    options = Options()
    found = text.load("gsm8k" if presence("gsm8k", options) == "found" else "embedded", options)
    tokenizer = need("transformers", "language models").AutoTokenizer.from_pretrained(folder(name))
    joined = "\n".join(example.prompt + example.response for example in found[split][:600])
    ids = torch.tensor(tokenizer(joined)["input_ids"])
    return ids[: len(ids) // length * length].view(-1, length)


def spread(rows: Tensor, count: int) -> Tensor:
    """Return at most so many rows, from everywhere."""
    return rows[:: max(1, len(rows) // count)][:count]


def language_model(name: str) -> nn.Module:
    """Return a pretrained language model in fp32."""
    return need("transformers", name).AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32)


def _goes_on(name: str, seed: int, size: int) -> Problem:
    model, test = language_model(name), spread(windows(name, "test", LENGTH), 32)
    return fitted(
        model,
        lambda tokens: model(input_ids=tokens, labels=tokens).loss,
        rows(windows(name, "train", LENGTH), size=size),
        seed,
        test=[test],
    )


@task(lr=3e-4, steps=24, model="stories15m")
def stories15m(seed: int) -> Problem:
    """A language model of 15M parameters that was trained on stories goes on with other text, batches of 4 x 48."""
    return _goes_on("stories15m", seed, 4)


@task(lr=5e-5, steps=16, model="smollm2")
def smollm2(seed: int) -> Problem:
    """SmolLM2-135M goes on with other text, batches of 2 x 48; minutes, not seconds."""
    return _goes_on("smollm2", seed, 2)

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


def _folder(name: str) -> str:
    return str(Path(os.environ[FOLDER]) / name)


class IntentClassifier(nn.Module):
    """An encoder, the mean of its tokens, and a new head."""

    def __init__(self, encoder: nn.Module, classes: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(encoder.config.hidden_size, classes)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
        return self.head((hidden * mask[..., None]).sum(dim=1) / mask.sum(dim=1, keepdim=True))


@task(lr=1e-4, steps=30, schedule="cosine", model="minilm")
def minilm_intents(seed: int) -> Problem:
    """MiniLM with a new head tells 10 intents, a sentence pattern of each held out, batches of 8."""
    transformers = need("transformers", "minilm-intents")
    model = IntentClassifier(transformers.AutoModel.from_pretrained(_folder("minilm")), len(INTENTS))
    tokenizer = transformers.AutoTokenizer.from_pretrained(_folder("minilm"))

    def encoded(patterns: slice) -> tuple[Tensor, Tensor, Tensor]:
        said = [
            (pattern.format(filler), label)
            for label, sentences in enumerate(INTENTS.values())
            for pattern, filler in itertools.product(sentences[patterns], FILLERS)
        ]
        found = tokenizer([sentence for sentence, _ in said], padding="max_length", max_length=16, return_tensors="pt")
        return found["input_ids"], found["attention_mask"], torch.tensor([label for _, label in said])

    return fitted(
        model,
        lambda tokens, mask, label: F.cross_entropy(model(tokens, mask), label),
        rows(*encoded(slice(0, 2)), size=8),
        seed,
        test=encoded(slice(2, 3)),
    )


@functools.cache
def _tokens(folder: str) -> tuple[Tensor, Tensor]:
    """Return windows (n, LENGTH) to train on and 32 to test with: GSM8K where there is data, else Python's docs."""
    options = Options()
    found = text.load("gsm8k" if presence("gsm8k", options) == "found" else "embedded", options)
    tokenizer = need("transformers", "language models").AutoTokenizer.from_pretrained(folder)

    def windows(examples: Sequence[text.Example]) -> Tensor:
        joined = "\n".join(example.prompt + example.response for example in examples[:600])
        ids = torch.tensor(tokenizer(joined)["input_ids"])
        return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)

    test = windows(found["test"])
    return windows(found["train"]), test[:: max(1, len(test) // 32)][:32]


def _language_model(name: str, seed: int, size: int) -> Problem:
    transformers = need("transformers", name)
    model = transformers.AutoModelForCausalLM.from_pretrained(_folder(name), dtype=torch.float32)
    train, test = _tokens(_folder(name))
    return fitted(
        model, lambda tokens: model(input_ids=tokens, labels=tokens).loss, rows(train, size=size), seed, test=[test]
    )


@task(lr=3e-4, steps=24, model="stories15m")
def stories15m(seed: int) -> Problem:
    """A language model of 15M parameters that was trained on stories goes on with other text, batches of 4 x 48."""
    return _language_model("stories15m", seed, 4)


@task(lr=5e-5, steps=16, model="smollm2")
def smollm2(seed: int) -> Problem:
    """SmolLM2-135M goes on with other text, batches of 2 x 48; minutes, not seconds."""
    return _language_model("smollm2", seed, 2)

"""What all language workloads share: texts to batches, the loss on responses, perplexity."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from baoc.tools.models.resolve import explained
from experiments.packages import need
from experiments.workloads import text, tokens
from experiments.workloads.base import PERPLEXITY, Batch, Options, Split, WorkloadError
from experiments.workloads.family import FamilyWorkload, Size

IGNORED = -100  # the label of what is not learned; cross_entropy's default


@dataclass(frozen=True, kw_only=True)
class LanguageSize(Size):
    """One size of a family of language models."""

    length: int
    """Tokens in a sequence."""
    longest: int | None = None
    """The most tokens that the model has positions for."""
    learns_prompts: bool = False
    """For small models, which start from nothing: every token teaches them something."""


class LanguageWorkload(FamilyWorkload):
    """Write the response to a prompt. Loss and perplexity are of the response's tokens; some sizes learn prompts too.

    Sequences have one fixed length. Where a prompt and its response do not fit, the prompt loses its beginning, but
    keeps at least half of the length, and the response loses its end.
    """

    metric = PERPLEXITY

    model_class: ClassVar[str]
    """In transformers, for pretrained weights."""
    tasks = {
        "alpaca": "following Alpaca's instructions",
        "gsm8k": "solving GSM8K's problems",
        "embedded": "continuing Python's language reference",
    }

    size: LanguageSize

    def __init__(self, name: str, size: LanguageSize, dataset: str, options: Options | None = None) -> None:
        super().__init__(name, size, dataset, options)
        self.length = self.options.length or size.length
        if size.longest is not None and self.length > size.longest:
            raise WorkloadError(f"{name}: length is {self.length}; the model has {size.longest} positions.")

    @abstractmethod
    def arrange(self, prompts: list[list[int]], responses: list[list[int]]) -> Batch:
        """The model's keyword arguments, and ``labels`` of the shape of its predictions."""

    @cached_property
    def examples(self) -> text.Splits:
        return text.load(self.dataset, self.options)

    @cached_property
    def tokenizer(self) -> tokens.Tokenizer:
        found = tokens.pretrained(self.options.pretrained) if self.options.pretrained else None
        if found is None:
            texts = [part for example in self.examples["train"] for part in (example.prompt, example.response)]
            found = tokens.trained(texts, self.options.cache_folder)
        return found

    def make(self, pretrained: str | None) -> nn.Module:
        if pretrained != self.options.pretrained:
            raise WorkloadError(
                f"{self.name}: the weights of {pretrained!r} need their own tokenizer too. Make the workload with "
                f"Options(pretrained={pretrained!r})."
            )
        if pretrained:
            model_class = getattr(need("transformers", self.name), self.model_class)
            with explained(f"the pretrained model {pretrained!r} cannot be loaded"):
                model = model_class.from_pretrained(pretrained)
        else:
            model = self.size.build()
        model.tie_weights()  # on the meta device too, where transformers leaves it undone
        model.config.use_cache = False  # it is for generation, and cannot be had with checkpointing
        made: nn.Module = model
        return made

    def checkpoint(self, model: nn.Module) -> None:
        model.gradient_checkpointing_enable()  # type: ignore[operator]

    def count(self, split: Split) -> int:
        return len(self.examples[split])

    def collate(self, split: Split, indices: Sequence[int], generator: torch.Generator) -> Batch:
        chosen = [self.examples[split][index] for index in indices]
        prompts = self.tokenizer.encode([example.prompt for example in chosen])
        responses = self.tokenizer.encode([example.response for example in chosen])
        return self.arrange(prompts, [[*response, self.tokenizer.end] for response in responses])

    def sums(self, model: nn.Module, batch: Batch) -> Batch:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        labels = batch["labels"]  # (examples, length)
        logits = model(**inputs).logits  # (examples, length, vocabulary)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return {"loss": loss, "count": (labels != IGNORED).sum()}

    def padded(self, sequences: list[list[int]], value: int) -> Tensor:
        """(sequences, length), with what is too long cut off."""
        rows = [sequence[: self.length] + [value] * (self.length - len(sequence)) for sequence in sequences]
        return torch.tensor(rows)


class CausalWorkload(LanguageWorkload):
    """Prompt and response in one sequence. There is no mask: nothing that counts comes after the padding."""

    def arrange(self, prompts: list[list[int]], responses: list[list[int]]) -> Batch:
        whole, labels = [], []
        for prompt, response in zip(prompts, responses):
            room = max(self.length + 1 - len(response), self.length // 2, 1)
            prompt = prompt[-room:] or [self.tokenizer.end]
            whole.append(prompt + response)
            labels.append((prompt[1:] if self.size.learns_prompts else [IGNORED] * (len(prompt) - 1)) + response)
        # Every token but the last is read, and the one after it is to be predicted.
        inputs = self.padded([ids[:-1] for ids in whole], self.tokenizer.pad)
        return {"input_ids": inputs, "labels": self.padded(labels, IGNORED)}

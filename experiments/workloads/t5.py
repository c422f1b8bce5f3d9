"""T5: the paper's T5-base, and a small sibling of the same class."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from baoc.tools.models import MODELS
from experiments.packages import need
from experiments.workloads.base import Batch
from experiments.workloads.language import IGNORED, LanguageSize, LanguageWorkload
from experiments.workloads.tokens import TRAINED_SIZE


class T5Workload(LanguageWorkload):
    """The prompt goes into the encoder, the response comes out of the decoder; each has the workload's length."""

    family, model_class = "T5", "T5ForConditionalGeneration"

    def arrange(self, prompts: list[list[int]], responses: list[list[int]]) -> Batch:
        prompts = [prompt[-self.length :] for prompt in prompts]
        outputs = self.padded(responses, self.tokenizer.pad)
        return {
            "input_ids": self.padded(prompts, self.tokenizer.pad),
            "attention_mask": self.padded([[1] * len(prompt) for prompt in prompts], 0),
            "decoder_input_ids": F.pad(outputs[:, :-1], (1, 0), value=self.tokenizer.pad),  # T5 starts with padding
            "labels": self.padded(responses, IGNORED),
        }


def t5_small() -> nn.Module:
    """Much smaller than the published checkpoint of that name."""
    transformers = need("transformers", "t5-small")
    config = transformers.T5Config(
        vocab_size=TRAINED_SIZE, d_model=128, d_kv=32, d_ff=512, num_layers=3, num_heads=4, dropout_rate=0.0
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    return model


SIZES = {
    "t5-base": LanguageSize(
        build=MODELS["t5-base"],
        parameters=222_903_552,
        description="T5-base",
        weights="google-t5/t5-base",
        length=256,
        batch_size=16,
        steps=3000,
        lr=3e-4,
    ),
    "t5-small": LanguageSize(
        build=t5_small,
        parameters=1_509_760,
        description="a T5 of 3 + 3 layers and width 128",
        length=128,
        batch_size=8,
        steps=400,
        lr=4e-3,
    ),
}

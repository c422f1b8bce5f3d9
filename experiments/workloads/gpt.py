"""GPT-2: the paper's GPT2-small, and a small sibling of the same class."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from baoc.tools.models import MODELS
from experiments.packages import need
from experiments.workloads.language import CausalWorkload, LanguageSize
from experiments.workloads.tokens import TRAINED_SIZE


class GPTWorkload(CausalWorkload):
    family, model_class = "GPT-2", "GPT2LMHeadModel"


def gpt_small(tied: bool = True) -> nn.Module:
    transformers = need("transformers", "gpt-small")
    config = transformers.GPT2Config(
        vocab_size=TRAINED_SIZE, n_positions=256, n_embd=128, n_layer=4, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


SIZES = {
    "gpt2": LanguageSize(
        build=MODELS["gpt2-small"],
        parameters=124_439_808,
        description="GPT2-small",
        weights="openai-community/gpt2",
        length=512,
        longest=1024,
        batch_size=16,
        steps=3000,
        lr=3e-4,
    ),
    "gpt-small": LanguageSize(
        build=gpt_small,
        parameters=957_184,
        description="a GPT-2 of 4 layers and width 128",
        length=128,
        longest=256,
        batch_size=8,
        steps=400,
        lr=3e-3,
        learns_prompts=True,
    ),
}
SIZES["gpt-small-untied"] = replace(
    SIZES["gpt-small"],
    build=partial(gpt_small, tied=False),
    parameters=1_088_256,
    description="a GPT-2 of 4 layers and width 128 with a head of its own",
)

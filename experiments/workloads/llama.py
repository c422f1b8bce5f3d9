"""Llama: the paper's Llama-3.2-1B and -3B, and a small sibling of the same class."""

from __future__ import annotations

from torch import nn

from baoc.tools.models import MODELS
from experiments.packages import need
from experiments.workloads.language import CausalWorkload, LanguageSize
from experiments.workloads.tokens import TRAINED_SIZE


class LlamaWorkload(CausalWorkload):
    family, model_class = "Llama", "LlamaForCausalLM"


def llama_small() -> nn.Module:
    """Grouped-query attention and a tied head, as in the large ones."""
    transformers = need("transformers", "llama-small")
    config = transformers.LlamaConfig(
        vocab_size=TRAINED_SIZE, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


SIZES = {
    "llama3.2-1b": LanguageSize(
        build=MODELS["llama-3.2-1b"],
        parameters=1_235_814_400,
        description="Llama-3.2-1B",
        weights="meta-llama/Llama-3.2-1B",
        length=512,
        batch_size=16,
        steps=3000,
        lr=1e-4,
    ),
    "llama3.2-3b": LanguageSize(
        build=MODELS["llama-3.2-3b"],
        parameters=3_212_749_824,
        description="Llama-3.2-3B",
        weights="meta-llama/Llama-3.2-3B",
        length=512,
        batch_size=16,
        steps=3000,
        lr=1e-4,
    ),
    "llama-small": LanguageSize(
        build=llama_small,
        parameters=918_656,
        description="a Llama of 4 layers and width 128",
        length=128,
        batch_size=8,
        steps=400,
        lr=4e-3,
        learns_prompts=True,
    ),
}

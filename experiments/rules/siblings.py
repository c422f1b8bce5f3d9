"""The models of these experiments: small siblings of GPT-2, Llama and the ViT, of less than a million parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from torch import nn

from baoc.tools.models import ViT
from experiments.packages import need
from experiments.workloads import Options, Workload
from experiments.workloads.gpt import GPTWorkload
from experiments.workloads.language import LanguageSize
from experiments.workloads.llama import LlamaWorkload
from experiments.workloads.tokens import TRAINED_SIZE
from experiments.workloads.vit import ViTSize, ViTWorkload

WIDTH, DEPTH, HEADS, LENGTH = 64, 3, 4, 64


def gpt() -> nn.Module:
    """A GPT-2 with a head of its own, so that the head's learning rate can differ from the embedding's."""
    transformers = need("transformers", "gpt")
    config = transformers.GPT2Config(
        vocab_size=TRAINED_SIZE, n_positions=LENGTH, n_embd=WIDTH, n_layer=DEPTH, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def llama() -> nn.Module:
    """Grouped-query attention, gated MLPs and an untied head."""
    transformers = need("transformers", "llama")
    config = transformers.LlamaConfig(
        vocab_size=TRAINED_SIZE, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=DEPTH,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, max_position_embeddings=LENGTH,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def vit() -> nn.Module:
    return ViT(image=32, patch=8, classes=10, dim=WIDTH, depth=DEPTH, heads=HEADS)


@dataclass(frozen=True)
class Sibling:
    """A model with its data."""

    name: str
    build: Callable[[], nn.Module]
    dataset: str
    batch: int
    lr: float
    """The best for AdamW32, of a grid of factors of two."""

    @property
    def parameters(self) -> int:
        return sum(param.numel() for param in self.build().parameters())

    def workload(self, options: Options) -> Workload:
        """Return the data and the loss."""
        common = {
            "build": self.build, "parameters": self.parameters, "description": self.name,
            "batch_size": self.batch, "steps": 1000, "lr": self.lr,
        }  # fmt: skip
        if self.dataset == "cifar10":
            images = ViTSize(**common, side=32, for_folder=_no_folder)
            return ViTWorkload(self.name, images, self.dataset, options)
        family = GPTWorkload if self.build is gpt else LlamaWorkload
        text = LanguageSize(**common, length=LENGTH, learns_prompts=True)
        return family(self.name, text, self.dataset, options)


def _no_folder(classes: int) -> nn.Module:
    raise NotImplementedError("these images are not in a folder")


SIBLINGS = {
    each.name: each
    for each in (
        Sibling("gpt", gpt, "alpaca", batch=8, lr=3e-3),
        Sibling("llama", llama, "gsm8k", batch=8, lr=3e-3),
        Sibling("vit", vit, "cifar10", batch=32, lr=1e-3),
    )
}


@cache
def workload_of(name: str, options: Options) -> Workload:
    """Return a sibling's workload; its data is read once per process."""
    return SIBLINGS[name].workload(options)

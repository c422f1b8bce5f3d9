"""LoRA with PEFT: frozen weights have no state, so the budget is for the adapters alone.

pip install 'baoc[models]' peft
python examples/lora.py
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import baoc


def main(arguments: list[str] | None = None) -> tuple[list[float], baoc.BAOC]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=200, n_positions=32, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    model: nn.Module = get_peft_model(
        GPT2LMHeadModel(config), LoraConfig(r=16, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    )
    # this example has no pretrained weights, from which BAOC would see that it is fine-tuning
    optimizer = baoc.BAOC(model, lr=3e-3, memory=0.5, planner=baoc.EffectPlanner(regime="finetune"))
    losses = []
    for _ in range(options.steps):
        start = torch.randint(200, (8, 1))
        tokens = (start + torch.arange(32)) % 200
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(optimizer.plan)
    return losses, optimizer


if __name__ == "__main__":
    main()

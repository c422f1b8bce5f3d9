"""Hugging Face Trainer: a factory that keeps the names of parameters, a resumed run, and metrics in the Trainer's log.

pip install 'baoc[models]' accelerate
python examples/trainer.py --output out        # again: goes on from the last checkpoint in out
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from baoc.integrations import ForTrainer, log_metrics, unwrap


class Counting(torch.utils.data.Dataset):
    """Texts that go on as they began: each token is the one before it plus a step."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + torch.arange(32) * (1 + index % 5)) % 200
        return {"input_ids": tokens, "labels": tokens}


def main(arguments: list[str] | None = None) -> Trainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/trainer"))
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)

    config = GPT2Config(vocab_size=200, n_positions=32, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            str(options.output),
            max_steps=options.steps,
            per_device_train_batch_size=8,
            logging_steps=5,
            save_steps=20,
            report_to="none",  # or "tensorboard", "wandb": they show optimizer.metrics() too
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Counting(),
        optimizer_cls_and_kwargs=(ForTrainer, {"lr": 3e-3, "weight_decay": 0.1, "memory": 0.25}),
    )
    log_metrics(trainer)
    trainer.train(resume_from_checkpoint=any(options.output.glob("checkpoint-*")))
    print(unwrap(trainer.optimizer).plan)
    return trainer


if __name__ == "__main__":
    main()

"""Lightning: one line in configure_optimizers, and a callback that logs optimizer.metrics().

pip install lightning
python examples/lightning_module.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn

import baoc
from baoc.integrations import lightning_callback


class Letters(lightning.LightningModule):
    def __init__(self, memory: float = 0.25) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(256, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 256))
        self.memory = memory

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(batch[0]), (batch[0] * 7 + 1) % 256)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return baoc.BAOC(self.model, lr=3e-3, weight_decay=0.1, memory=self.memory)


def main(arguments: list[str] | None = None) -> lightning.Trainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/lightning"))
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)

    lightning.seed_everything(0, verbose=False)
    letters = torch.randint(256, (64 * options.steps,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(letters), batch_size=64)
    last = options.output / "last.ckpt"
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="auto",
        logger=False,  # any of Lightning's loggers shows the metrics
        log_every_n_steps=5,
        gradient_clip_val=1.0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[lightning_callback()],
    )
    module = Letters()
    trainer.fit(module, loader, ckpt_path=str(last) if last.exists() else None)
    trainer.save_checkpoint(last)
    print(trainer.optimizers[0].plan)
    return trainer


if __name__ == "__main__":
    main()

"""Shuffling, resuming, autocast and evaluation, once for every workload whose data fits in memory."""

from __future__ import annotations

import hashlib
import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from experiments.workloads.base import Batch, HeldOut, Split, Workload, WorkloadError


class DatasetWorkload(Workload):
    """A workload that can make a batch of any examples. A subclass gives the five methods without a body."""

    @abstractmethod
    def make(self, pretrained: str | None) -> nn.Module:
        """The model on torch's default device; random weights come from torch's default generator."""

    @abstractmethod
    def checkpoint(self, model: nn.Module) -> None:
        """Switch on gradient checkpointing."""

    @abstractmethod
    def count(self, split: Split) -> int:
        """How many examples a split has."""

    @abstractmethod
    def collate(self, split: Split, indices: Sequence[int], generator: torch.Generator) -> Batch:
        """These examples as a batch. All randomness (noise, flips) comes from the generator."""

    @abstractmethod
    def sums(self, model: nn.Module, batch: Batch) -> Batch:
        """Of a batch on the model's device: the sum of the ``loss``, the ``count`` it is averaged over, and more."""

    def build(self, *, seed: int, device: str = "cpu", pretrained: str | None = None) -> nn.Module:
        with torch.random.fork_rng(devices=[]), torch.device("meta" if device == "meta" else "cpu"):
            torch.default_generator.manual_seed(seed)
            model = self.make(pretrained or self.options.pretrained)
        if self.options.checkpointing:
            self.checkpoint(model)
        return model.to(device).train()

    def train_batches(self, *, seed: int, start: int = 0) -> Iterator[Batch]:
        batches = shuffled(self._count("train"), self.batch_size, seed=seed, start=start)
        for step, indices in zip(itertools.count(start), batches):
            yield self.collate("train", indices, generator("batch", seed, step))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        sums = self._sums(model, batch)
        return sums["loss"] / sums["count"]

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: HeldOut, max_batches: int | None = None) -> dict[str, float]:
        if max_batches is not None and max_batches < 1:
            raise WorkloadError(f"max_batches is {max_batches}; it must be at least 1, or None for all of them.")
        # Shuffled, so that the first few batches stand for the whole split even if the file is sorted.
        order = torch.randperm(self._count(split), generator=generator("order", split))
        was_training = model.training
        model.eval()
        totals: dict[str, float] = {}
        try:
            for step, indices in enumerate(order.split(self.batch_size)[:max_batches]):
                batch = self.collate(split, indices.tolist(), generator(split, step))
                for name, value in self._sums(model, batch).items():
                    totals[name] = totals.get(name, 0.0) + value.item()
        finally:
            model.train(was_training)
        count = totals.pop("count")
        means = {name: total / count for name, total in totals.items()}
        if self.metric.name == "perplexity":
            means["perplexity"] = math.exp(min(means["loss"], 700))  # a diverged run is huge, not an OverflowError
        return means

    def _sums(self, model: nn.Module, batch: Batch) -> Batch:
        device = next(model.parameters()).device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.options.bf16):
            return self.sums(model, {name: value.to(device) for name, value in batch.items()})

    def _count(self, split: Split) -> int:
        if not (count := self.count(split)):
            raise WorkloadError(f"{self.name}: the {split} split has no examples; the dataset is too small.")
        return count


def generator(*key: object) -> torch.Generator:
    """A CPU generator of its own for every key, the same in every process.

    >>> generator("noise", 3).initial_seed() == generator("noise", 3).initial_seed() != generator("noise", 4).initial_seed()
    True
    """  # noqa: E501
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def shuffled(count: int, size: int, *, seed: int, start: int = 0) -> Iterator[list[int]]:
    """Endless batches of indices below ``count``: each once per epoch, in an order of the epoch's own.

    >>> batches = shuffled(6, 4, seed=0)
    >>> seen = [next(batches) for _ in range(3)]
    >>> sorted(sum(seen, [])[:6]), sorted(sum(seen, [])[6:])
    ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    >>> next(shuffled(6, 4, seed=0, start=2)) == seen[2]
    True
    """
    if start < 0:
        raise WorkloadError(f"start is {start}; it counts the batches to skip.")
    epoch, order, position = -1, [], start * size
    while True:
        batch: list[int] = []
        while len(batch) < size:
            if position // count != epoch:
                epoch = position // count
                order = torch.randperm(count, generator=generator("epoch", seed, epoch)).tolist()
            taken = order[position % count :][: size - len(batch)]
            batch += taken
            position += len(taken)
        yield batch

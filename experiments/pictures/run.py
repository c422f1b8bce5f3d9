"""Loss and state over time: one run within a budget that shrinks during training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import baoc
from baoc.core.text import human_bytes
from experiments import corpus as corpora
from experiments.corpus import Corpus
from experiments.demo.picture import smoothed
from experiments.demo.training import DECAY, LR
from experiments.pictures.style import INK, MUTED, PLAIN, bare, colours, figure
from experiments.tiny_gpt import train

STEPS, SHRUNK = 300, 150
BUDGET, LATER = 0.25, 0.05
_KIB = 1024


@dataclass
class Log:
    """Losses and bytes of a run, step by step."""

    losses: list[float] = field(default_factory=list)
    held: list[dict[str, int]] = field(default_factory=list)  # bytes by configuration
    configurations: dict[str, baoc.Configuration] = field(default_factory=dict)
    reference: int = 0  # bytes of AdamW16's state
    parameters: int = 0

    def add(self, loss: float, optimizer: baoc.BAOC) -> None:
        """Add a step, with the bytes that the optimizer holds after it."""
        held: dict[str, int] = {}
        for block in optimizer.plan.blocks:
            alias = block.configuration.alias
            self.configurations[alias] = block.configuration
            held[alias] = held.get(alias, 0) + block.state_bytes
        assert baoc.state_bytes(optimizer) == sum(held.values())
        self.losses.append(loss)
        self.held.append(held)
        self.reference = optimizer.plan.reference_bytes
        self.parameters = sum(block.numel for block in optimizer.plan.blocks)


def draw(path: Path, steps: int = STEPS) -> None:
    """Train twice, then draw. Tests pass fewer ``steps``."""
    torch.set_num_threads(1)  # small products: more threads only wait for each other
    corpus = corpora.load()
    plain = [loss for _, loss, _, _ in train(corpus, _adamw32, seed=0, steps=steps)]
    _picture(plain, _budgeted(corpus, steps), path)


def _adamw32(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)


def _budgeted(corpus: Corpus, steps: int) -> Log:
    def ours(model: torch.nn.Module) -> torch.optim.Optimizer:
        return baoc.BAOC(model, lr=LR, weight_decay=DECAY, memory=BUDGET, verbose=False)

    log = Log()
    for step, loss, _, optimizer in train(corpus, ours, seed=0, steps=steps):
        assert isinstance(optimizer, baoc.BAOC)
        log.add(loss, optimizer)
        if step == _at(SHRUNK, steps):
            optimizer.replan(memory=LATER)
    return log


def _at(step: int, steps: int) -> int:
    """Return the corresponding step of a shorter run."""
    return max(1, step * steps // STEPS)


def _picture(plain: Sequence[float], log: Log, path: Path) -> None:
    steps = len(plain)
    with figure(9.5, 5.6, path) as made:
        above, below = made.subplots(2, 1, sharex=True, height_ratios=(1.15, 1))
        _losses(above, plain, log)
        _state(below, log)
        for axes in (above, below):
            bare(axes)
            axes.grid(visible=False, axis="x")
            axes.set_xlim(1, steps)
            axes.axvline(_at(SHRUNK, steps), color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
        top = above.get_ylim()[1]
        text = f"replan(memory={LATER:g}):\nstate is migrated"
        above.text(_at(SHRUNK, steps) + steps / 100, top, text, va="top", size=9.5)
        below.set_xlabel("step")


def _losses(axes: Any, plain: Sequence[float], log: Log) -> None:
    steps = range(1, len(plain) + 1)
    orange = "#D55E00"
    for losses, colour, name in ((plain, PLAIN, "AdamW32"), (log.losses, orange, f"BAOC, memory={BUDGET:g}")):
        axes.plot(steps, losses, color=colour, linewidth=0.7, alpha=0.35)
        axes.plot(steps, smoothed(losses), color=colour, linewidth=2, label=name)
    axes.set_ylabel("training loss")
    axes.set_title(f"A GPT of {log.parameters / 1e6:.2f}M parameters, one seed, the same learning rate and batches")
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.86))


def _state(axes: Any, log: Log) -> None:
    steps = range(1, len(log.losses) + 1)
    ranked = sorted(log.configurations.values(), key=lambda each: (each.mechanism_name, -each.state_bytes((512, 512))))
    colour = colours(ranked)
    names = list(colour)
    curves = [[held.get(name, 0) / _KIB for held in log.held] for name in names]
    labels = [name if any(curve) else f"{name}, no state" for name, curve in zip(names, curves)]
    axes.stackplot(steps, curves, labels=labels, colors=[colour[name] for name in names], step="post", linewidth=0)
    budget = [BUDGET if step <= _at(SHRUNK, len(steps)) else LATER for step in steps]
    axes.plot(
        steps,
        [share * log.reference / _KIB for share in budget],
        color=INK,
        linewidth=1.3,
        drawstyle="steps-post",
        label="the budget",
    )
    axes.set_ylabel("state held, KiB")
    axes.set_ylim(0, 1.3 * BUDGET * log.reference / _KIB)
    plain = human_bytes(8 * log.parameters)
    axes.text(
        len(steps) * 0.99,
        1.22 * BUDGET * log.reference / _KIB,
        f"AdamW32 holds {plain}, far above",
        ha="right",
        va="center",
        size=9,
        color=MUTED,
    )
    axes.legend(loc="center right", fontsize=9, bbox_to_anchor=(1.0, 0.56), reverse=True)

"""Which int8 format keeps AdamW's quality: maps and roundings, for m and for v, against fp32.

Two measurements. *Fidelity* replays the gradients of fp32 runs through every format and compares the updates: the same
gradients for all, so it has no training noise. *Training* trains the small GPT with each format and compares the test
loss with fp32's of the same seed.

    python -m experiments.int8_formats --output docs/results/int8_formats.md
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import baoc
from baoc.core.codecs import Format, Held, Int8Format
from baoc.core.codecs.quantized import INT8_GROUP, Grid, Int8, from_groups, to_groups
from baoc.core.rounding import NOISE_ONE, Rounding
from baoc.core.spec import FP32_TINY, Buffer, Shape, Slot
from experiments import corpus as corpora
from experiments.tiny_gpt import test_loss, train

DECAY = 0.1
ROUNDINGS = {"nearest": NOISE_ONE // 2, "down": 0, "up": NOISE_ONE - 1, "dithered": None}
M_MAPS = ("linear", "companded", "logarithmic", "dynamic")
V_MAPS = ("linear", "sqrt", "companded", "logarithmic", "dynamic")
M_MANTISSAS = (3, 4, 5)
V_MANTISSAS = (2, 3, 4)

TRAINED = (
    "adamw[m=bf16,v=bf16]",
    "adamw[m=int8,v=int8]",
    "adamw[m=int8,v=factored]",
    "adamw[m=float5,v=float3]",
    "adamw[m=float4,v=float4]",
    "adamw[m=companded-dithered,v=companded-dithered]",
)


def curve(name: str, signed: bool) -> Tensor:
    """A map as the values of its codes, from 0 to 1, as shares of the group's scale."""
    unit = torch.linspace(0, 1, 128 if signed else 256, dtype=torch.float64)
    if name == "linear":
        return unit
    if name == "sqrt":
        return unit**2
    if name == "companded":
        return unit**2 if signed else unit**4
    if name == "logarithmic":
        octaves = 14 if signed else 28
        return torch.where(unit > 0, 2.0 ** (octaves * (unit - 1)), 0.0)
    # dynamic: seven decades, each with twice as many codes as the one below it
    decades = [10.0 ** (i - 6) * torch.linspace(0.1, 1, 2 ** (i + 1 - signed) + 1)[1:].double() for i in range(7)]
    return torch.cat([torch.zeros(1, dtype=torch.float64), *decades])


@dataclass(frozen=True)
class MappedInt8Format(Format):
    """Int8 groups with an fp32 scale, any map and any rounding. Slow: it searches a table."""

    map_name: str = "linear"
    rounding_name: str = "nearest"

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        shape = self.held_shape
        groups = -(-math.prod(shape[1:]) // INT8_GROUP)
        return (
            Buffer("codes", shape, torch.int8 if self.slot.signed else torch.uint8),
            Buffer("scales", (shape[0], groups), torch.float32),
        )

    @functools.cached_property
    def values(self) -> Tensor:
        return curve(self.map_name, self.slot.signed).float()

    def decode(self, held: Held, rows: slice) -> Tensor:
        codes = held["codes"][rows]
        values = self.values[codes.int().abs()] * codes.sign()
        return from_groups(to_groups(values) * held["scales"][rows].unsqueeze(-1), codes.shape)

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        codes, values, signed = held["codes"][rows], self.values, self.slot.signed
        grouped = to_groups(value)
        scales = grouped.abs().amax(-1, keepdim=True)
        ratio = grouped.abs() / scales.clamp(min=FP32_TINY)
        below = (torch.bucketize(ratio, values, right=True) - 1).clamp(0, len(values) - 2)
        fraction = (ratio - values[below]) / (values[below + 1] - values[below])
        constant = ROUNDINGS[self.rounding_name]
        noise: int | Tensor = constant or 0
        if constant is None:
            noise = to_groups(rounding.noise(rows.start, tuple(value.shape), value.device))
        code = below + (fraction * NOISE_ONE + noise >= NOISE_ONE)
        code = code * grouped.sign().long() if signed else torch.where(ratio > 0, code.clamp(min=1), code)
        codes.copy_(from_groups(code, codes.shape))
        held["scales"][rows].copy_(scales.squeeze(-1))


@dataclass(frozen=True)
class FloatInt8Format(Int8Format):
    """What ``int8`` is, with another number of mantissa bits."""

    mantissa: int = 3

    @property
    def grid(self) -> Grid:
        return Grid(self.mantissa, super().grid.count)


class TriedInt8(Int8):
    """A codec that stores what int8 would in another format."""

    def __init__(self, name: str, make: Callable[[Slot, Shape, int | None], Format]) -> None:
        self.name = name  # type: ignore[misc]
        self._make = make

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TriedInt8) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        stored = super().at(shape, slot, rows)
        return self._make(slot, shape, rows) if type(stored) is Int8Format else stored


def register_formats() -> None:
    """Make every map with every rounding a codec, like ``companded-nearest``, and floats, like ``float4``."""
    for name in V_MAPS:
        for rounding in ROUNDINGS:
            make = functools.partial(MappedInt8Format, map_name=name, rounding_name=rounding)
            baoc.register_codec(TriedInt8(f"{name}-{rounding}", make))
    for mantissa in {*M_MANTISSAS, *V_MANTISSAS}:
        make = functools.partial(FloatInt8Format, mantissa=mantissa)
        baoc.register_codec(TriedInt8(f"float{mantissa}", make))


def fidelity(corpus: corpora.Corpus, seeds: Iterable[int], steps: int, lr: float) -> dict[str, list[float]]:
    """Relative error of each format's update against exact AdamW's, over the second half of fp32 runs; one per seed."""
    kinds = [baoc.parse(f"adamw[m={name}-{r},v=fp32]") for name in M_MAPS for r in ("nearest", "down", "dithered")]
    kinds += [baoc.parse(f"adamw[m=float{mantissa},v=fp32]") for mantissa in M_MANTISSAS]
    kinds += [baoc.parse(f"adamw[m=fp32,v={name}-{r}]") for name in V_MAPS for r in ("nearest", "up", "dithered")]
    kinds += [baoc.parse(f"adamw[m=fp32,v=float{mantissa}]") for mantissa in V_MANTISSAS]
    kinds += [baoc.parse("adamw[m=companded-dithered,v=companded-dithered]")]
    kinds += [baoc.parse(name) for name in ("adamw-16", "adamw-8", "adamw[m=int8,v=factored]")]
    errors: dict[str, list[float]] = {str(kind): [] for kind in kinds}
    for seed in seeds:
        sums = dict.fromkeys(errors, 0.0)
        shadows: dict[str, tuple[list[nn.Parameter], baoc.BlockOptimizer]] = {}
        runs = train(
            corpus, lambda model: baoc.BlockOptimizer(model, lr=lr, weight_decay=DECAY), seed=seed, steps=steps
        )
        for step, _, model, _ in runs:
            large = [param for param in model.parameters() if param.numel() >= 4096]
            if not shadows:
                for kind in ("adamw-32", *kinds):
                    copies = [nn.Parameter(torch.zeros_like(param)) for param in large]
                    shadows[str(kind)] = copies, baoc.BlockOptimizer(copies, lr=1.0, weight_decay=0.0, plan=kind)
            updates = {}
            for kind, (copies, optimizer) in shadows.items():
                for param, copy in zip(large, copies):
                    copy.data.zero_()
                    copy.grad = param.grad
                optimizer.step()
                updates[kind] = torch.cat([copy.detach().flatten() for copy in copies])
            if step > steps // 2:
                exact = updates["adamw-32"]
                for kind in sums:
                    sums[kind] += ((updates[kind] - exact).norm() / exact.norm()).item()
        for kind, total in sums.items():
            errors[kind].append(total / (steps - steps // 2))
        print(f"fidelity, seed {seed}: done", file=sys.stderr)
    return errors


def training(corpus: corpora.Corpus, seeds: Sequence[int], steps: int, lr: float) -> dict[str, list[float]]:
    """Test losses of fp32 and of the formats in ``TRAINED``; one per seed."""
    losses: dict[str, list[float]] = {}
    for kind in ("adamw[m=fp32,v=fp32]", *TRAINED):
        for seed in seeds:
            plan = baoc.parse(kind)
            make = lambda model, plan=plan: baoc.BlockOptimizer(model, lr=lr, weight_decay=DECAY, plan=plan)  # noqa: E731
            *_, (_, _, model, _) = train(corpus, make, seed=seed, steps=steps)
            losses.setdefault(kind, []).append(test_loss(corpus, model))
            print(f"training, {kind}, seed {seed}: test loss {losses[kind][-1]:.4f}", file=sys.stderr)
    return losses


def report(errors: Mapping[str, Sequence[float]], losses: Mapping[str, Sequence[float]], command: str) -> str:
    lines = [
        "# Which int8 format AdamW's moments are stored in",
        "",
        f"Made by `{command}`.",
        "",
        "## Fidelity: relative error of the update on recorded gradients, mean over seeds (and spread)",
        "",
        "The gradients of fp32 runs of the small GPT are replayed through every format; the error is that of the",
        "second half of the run, over all tensors that are not small. One of the two moments is quantized at a time,",
        "except in the last rows.",
        "",
        "| m | v | error of the update |",
        "|---|---|---|",
    ]
    for kind, values in errors.items():
        m, v = baoc.parse(kind).codec_names
        lines.append(f"| {m[1]} | {v[1]} | {statistics.mean(values):.3%} ({min(values):.3%} to {max(values):.3%}) |")
    exact = losses["adamw[m=fp32,v=fp32]"]
    lines += [
        "",
        "## Training: test loss of the small GPT against fp32's of the same seed",
        "",
        "| m | v | test loss | against fp32, mean (each seed) |",
        "|---|---|---|---|",
    ]
    for kind, values in losses.items():
        m, v = baoc.parse(kind).codec_names
        changes = [value / base - 1 for value, base in zip(values, exact)]
        each = ", ".join(f"{change:+.2%}" for change in changes)
        loss = (
            f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}" if len(values) > 1 else f"{values[0]:.4f}"
        )
        lines.append(f"| {m[1]} | {v[1]} | {loss} | {statistics.mean(changes):+.2%} ({each}) |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3, help="tuned for AdamW32 over 5e-4, 1e-3, 2e-3, 3e-3, 6e-3")
    parser.add_argument("--fidelity-steps", type=int, default=200)
    parser.add_argument("--output", type=Path, help="a Markdown file; standard output if left out")
    arguments = parser.parse_args()
    register_formats()
    corpus, seeds = corpora.load(), range(arguments.seeds)
    errors = fidelity(corpus, seeds, arguments.fidelity_steps, arguments.lr)
    losses = training(corpus, seeds, arguments.steps, arguments.lr)
    text = report(errors, losses, " ".join(["python -m experiments.int8_formats", *sys.argv[1:]]))
    if arguments.output:
        arguments.output.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()

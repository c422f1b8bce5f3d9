"""Codecs, an update rule and a planner outside of the package. `docs/extending.md` shows some of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

import baoc
from baoc import register_codec, register_mechanism
from baoc.core.codecs import CODECS, Codec, Format, FP32Format, Held, Int8Format
from baoc.core.codecs.quantized import fits
from baoc.core.mechanisms import MECHANISMS, Evidence, Mechanism
from baoc.core.roles import Role
from baoc.core.rounding import NOISE_ONE, Rounding
from baoc.core.spec import SMALL_NUMEL, Buffer, Hyper, Reach, Scalars, Setting, Shape, Slot
from baoc.planners.effects import EffectSession

GROUP = 32


@dataclass(frozen=True)
class NibbleFormat(Format):
    """Two linear codes in [-7, 7] per byte, one scale for each group of 32."""

    @property
    def row(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        rows, groups = self.held_shape[0], -(-self.row // GROUP)
        packed = Buffer("packed", (rows, groups * GROUP // 2), torch.uint8)
        return packed, Buffer("scales", (rows, groups), torch.float32)

    def decode(self, held: Held, rows: slice) -> Tensor:
        packed = held["packed"][rows]
        codes = torch.stack((packed & 15, packed >> 4), -1).view(len(packed), -1, GROUP).float() - 8.0
        value = codes * (held["scales"][rows].unsqueeze(-1) / 7.0)
        return value.view(len(packed), -1)[:, : self.row].view(len(packed), *self.shape[1:])

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        height = value.shape[0]
        padding = -self.row % GROUP

        def grouped(x: Tensor) -> Tensor:
            return F.pad(x.reshape(height, -1), (0, padding)).view(height, -1, GROUP)

        x, noise = grouped(value), grouped(rounding.noise(rows.start, tuple(value.shape), value.device))
        scales = x.abs().amax(-1, keepdim=True)
        level = x.abs() * (7.0 / torch.where(scales > 0, scales, 1.0))
        code = (level.floor() + ((level - level.floor()) * NOISE_ONE + noise >= NOISE_ONE)).clamp(max=7)
        code = (torch.where(x < 0, -code, code) + 8).to(torch.uint8).view(height, -1, 2)
        held["packed"][rows].copy_(code[..., 0] | code[..., 1] << 4)
        held["scales"][rows].copy_(scales.squeeze(-1))


class Nibble(Codec):
    name = "nibble"
    bits = 4

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        small = math.prod(shape) < SMALL_NUMEL or not fits(shape)
        return (FP32Format if small else NibbleFormat)(slot, shape, rows)

    def refusal(self, slot: Slot) -> str | None:
        return None if slot.signed else f"it is linear, and {slot.name!r} spans too many orders of magnitude"


@dataclass(frozen=True)
class HalvedFormat(Int8Format):
    """Buffers like int8's, but half as many exponents. C code that took it for int8 would overrun them."""

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        codes, exponents = super().buffers
        return codes, Buffer("exponents", (-(-exponents.shape[0] // 2), exponents.shape[1]), torch.uint8)

    def _wide(self, held: Held) -> dict[str, Tensor]:
        codes, exponents = held["codes"], held["exponents"]
        return {"codes": codes, "exponents": exponents.repeat_interleave(2, 0)[: codes.shape[0]]}

    def decode(self, held: Held, rows: slice) -> Tensor:
        return super().decode(self._wide(held), rows)

    def encode(self, held: Held, rows: slice, value: Tensor, rounding: Rounding) -> None:
        wide = self._wide(held)
        super().encode(wide, rows, value, rounding)
        held["exponents"].copy_(wide["exponents"][::2])


class Halved(Codec):
    name = "halved"
    bits = 8

    def at(self, shape: Shape, slot: Slot, rows: int | None = None) -> Format:
        return HalvedFormat(slot, shape, rows) if fits(shape) else FP32Format(slot, shape, rows)


STEPS = Setting("polar_steps", 6, "a whole number >= 1", lambda x: int(x) == x >= 1, "iterations")
TARGET_RMS = 0.2


class Polar(Mechanism):
    """Momentum with all singular values set to one: a Muon, by plain Newton-Schulz."""

    name = "polar"
    slots = (Slot("m", signed=True),)
    adaptive = momentum = decoupled = True
    reach = Reach.MATRIX
    settings = (STEPS,)

    def suits(self, shape: Shape, role: Role) -> bool:
        return role in (Role.MATRIX, Role.STACK, Role.CONVOLUTION)

    def scalars(self, hyper: Hyper, ages: Mapping[str, int]) -> dict[str, float]:
        numbers = {"m.keep": hyper.beta1, "m.add": 1.0 - hyper.beta1, "iterations": float(STEPS.of(hyper))}
        return super().scalars(hyper, ages) | numbers

    def observe(self, slot: str, grad: Tensor) -> Tensor:
        return grad

    def direction(self, grad: Tensor, slots: Mapping[str, Tensor], scalars: Scalars) -> Tensor:
        return slots["m"]

    def finish(self, stacked: Tensor, scalars: Scalars) -> Tensor:
        x = stacked / stacked.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-30)
        for _ in range(int(scalars["iterations"])):
            gram = x @ x.mT
            x = 1.5 * x - 0.5 * gram @ x if x.shape[-2] <= x.shape[-1] else 1.5 * x - 0.5 * x @ (x.mT @ x)
        rms = x.square().mean(dim=(-2, -1), keepdim=True).sqrt()
        return x * (TARGET_RMS / rms.clamp(min=1e-30))

    def mass(self, slot: str, age: int, hyper: Hyper) -> float:
        return 1.0 - hyper.beta1**age

    def typical_rms(self, evidence: Evidence, hyper: Hyper) -> float | None:
        return TARGET_RMS


@dataclass(frozen=True)
class FirstThatFits:
    """The first of some configurations that fits the budget, for all parameters."""

    choices: tuple[str, ...] = ("adamw-8", "adamw[m=int8,v=factored]", "adamw[m=int4,v=factored]")
    replan_every: int | None = None
    reads_gradients: ClassVar[bool] = False
    counts_tokens: ClassVar[bool] = False

    def initial_plan(self, model: baoc.ModelFacts, budget: baoc.Budget) -> baoc.Plan:
        limit = budget.device_bytes(model.reference_bytes())
        roles = {name: model.role(name) for name in model.shapes}
        for choice in self.choices:
            plan = baoc.Plan.uniform(baoc.parse(choice), model.shapes, roles)
            if limit is None or plan.state_bytes <= limit:
                return plan
        raise baoc.PlanError(f"no plan fits memory={budget.memory!r}: the smallest needs {plan.state_bytes} B.")

    def start(self, params: Mapping[str, Tensor], model: baoc.ModelFacts) -> EffectSession:
        return EffectSession(self)


_CODECS, _MECHANISM = (Nibble(), Halved()), Polar()  # one object of each: layouts are cached with it


@contextmanager
def registered() -> Iterator[None]:
    """Register the codecs and the update rule for a test."""
    for codec in _CODECS:
        register_codec(codec)
    register_mechanism(_MECHANISM)
    try:
        yield
    finally:
        for codec in _CODECS:
            del CODECS[codec.name]
        del MECHANISMS[_MECHANISM.name]

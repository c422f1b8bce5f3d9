"""Laws of the stored formats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from baoc.core.codecs import CODECS, Codec, FactoredFormat, Format, MeanFormat
from baoc.core.rounding import IDLE_SHIFT, NEAREST, Rounding, rounding_phase
from baoc.core.spec import Reach, Slot
from tests.cases import SHAPES

SLOTS = {"m": Slot("m", signed=True), "v": Slot("v", signed=False), "torch's v": Slot("v", False, torch_dims=True)}
SLOTS["s"] = Slot("s", signed=False, sets_length=True, codecs=("mean",))
PAIRS = {
    f"{codec.name}-{name}": (codec, slot)
    for codec in CODECS.values()
    for name, slot in SLOTS.items()
    if codec.refusal(slot) is None and (codec.factored or not slot.torch_dims) and codec.name in (slot.codecs or CODECS)
}
CODE = {"factored-bf16": 2.0**-7, "factored-int8": 2.0**-3}
"""The distance between neighbouring codes of a rounded factor, relative to the smaller one."""


def by(condition=lambda codec, slot: True):
    """Parametrize over the pairs of codec and slot that a law is about."""
    chosen = {name: pair for name, pair in PAIRS.items() if condition(*pair)}
    return pytest.mark.parametrize(("codec", "slot"), list(chosen.values()), ids=list(chosen))


def allocate(codec: Codec, slot: Slot, shape: tuple[int, ...]) -> tuple[Format, dict[str, Tensor]]:
    stored = codec.at(shape, slot)
    return stored, {b.name: torch.zeros(b.shape or (1,), dtype=b.dtype) for b in stored.buffers}


def values(slot: Slot, shape: tuple[int, ...]) -> Tensor:
    """Numbers over twelve orders of magnitude, some exactly zero."""
    x = torch.randn(shape or (1,)) * 10.0 ** torch.empty(shape or (1,)).uniform_(-6, 6)
    x = x.masked_fill(torch.rand(x.shape) < 0.05, 0.0)
    return x if slot.signed else x.square()


@by()
@pytest.mark.parametrize("shape", [shape for shape in SHAPES.values() if math.prod(shape)], ids=str)
@pytest.mark.parametrize("age", [None, 1, 12345])
def test_storing_what_was_read(codec, slot, shape, age):
    """Formats by rows keep every byte, fp32 means all but the last bits, and rounded factors their rows and a code."""
    stored, held = allocate(codec, slot, shape)
    rows = slice(0, (shape or (1,))[0])
    stored.encode(held, rows, values(slot, shape), NEAREST)
    before = {name: tensor.clone() for name, tensor in held.items()}
    decoded = stored.decode(held, rows).clone()
    stored.encode(held, rows, decoded, NEAREST if age is None else Rounding(rounding_phase(age, 0)))
    if stored.reach is Reach.ROWS:
        assert all(torch.equal(held[name], before[name]) for name in held)
    elif isinstance(stored, MeanFormat) or not stored.row.rounds:
        for name in held:
            torch.testing.assert_close(held[name], before[name], rtol=1e-6, atol=0)
    else:
        assert all(torch.equal(held[name], before[name]) for name in held if name.startswith("row"))
        # one code for the column and one for the mean of the columns; below the smallest code, all of it
        most = 2 * CODE[codec.name] / (1 - CODE[codec.name])
        smallest = 2.0**-30 * float(decoded.max())
        torch.testing.assert_close(stored.decode(held, rows), decoded, rtol=most, atol=smallest)


def test_every_law_of_storing_has_a_case():
    """None of the three cases above is empty."""
    found = [codec.at((64, 512), slot) for codec, slot in PAIRS.values()]
    assert {each.reach for each in found} == {Reach.ROWS, Reach.SUMS}
    assert any(isinstance(each, FactoredFormat) and each.row.rounds for each in found)


@by(lambda codec, slot: not slot.signed)
def test_a_positive_value_never_becomes_zero(codec, slot):
    stored, held = allocate(codec, slot, (64, 512))
    value = torch.rand(64, 512) * 1e-30
    value[:, ::97] = 1.0
    for age in range(5):
        stored.encode(held, slice(0, 64), value, Rounding(rounding_phase(age, 1)))
        assert (stored.decode(held, slice(0, 64)) > 0).all()


@by()
def test_zeros_are_stored_exactly(codec, slot):
    """Over other numbers, and as bytes that are zero or decode to zero."""
    stored, held = allocate(codec, slot, (64, 512))
    rows = slice(0, 64)
    stored.encode(held, rows, values(slot, (64, 512)), NEAREST)
    assert (stored.decode(held, rows) != 0).any()
    stored.encode(held, rows, torch.zeros(64, 512), Rounding(rounding_phase(3, 0)))
    assert (stored.decode(held, rows) == 0).all()


@by(lambda codec, slot: not codec.factored and codec.bits < 32)
def test_rounding_is_right_on_average(codec, slot):
    """Over 500 steps every element's mean is within 2% of a code, where one rounding is off by up to a whole one."""
    # so near to a code that 500 steps may not leave it; codes of fp8 are far apart where they are large
    # and so are powers of two
    rarely = 8e-3 if codec.name == "log4" else 2e-3 if codec.bits < 8 or codec.name == "fp8" else 1e-4
    stored, held = allocate(codec, slot, (16, 512))
    value = torch.randn(16, 512) if slot.signed else torch.randn(16, 512).square()
    rows = slice(0, 16)
    decoded = []
    for age in range(500):
        stored.encode(held, rows, value, Rounding(rounding_phase(age, 0)))
        decoded.append(stored.decode(held, rows))
    stack = torch.stack(decoded)
    step_between_codes = stack.amax(0) - stack.amin(0)
    error = (stack.mean(0) - value).abs()
    assert (error <= 0.02 * step_between_codes + 1e-3 * value.abs() + rarely * value.abs().clamp(min=1)).all()


@by(lambda codec, slot: slot.signed and codec.name != "fp8")  # whose codes stay on the average that they had
def test_idle_elements_grow_by_a_small_share_of_themselves(codec, slot):
    """So parameters with zero gradient do not drift (``tests/optim/test_dead_parameters.py``)."""
    stored, held = allocate(codec, slot, (16, 512))
    value = torch.randn(16, 512) * torch.logspace(-4, 0, 512)
    rows, idle = slice(0, 16), torch.rand(16, 512) < 0.5
    # above the lowest octave of a group, codes of int8 are up to 1/16 apart, and dithered in full
    top = value.abs().view(16, 2, 256).amax(-1).repeat_interleave(256, dim=1)
    for age in range(64):
        stored.encode(held, rows, value, Rounding(rounding_phase(age, 0), idle))
        grew = stored.decode(held, rows).abs() > value.abs() * (1 + 2.0**-IDLE_SHIFT) * (1 + 1e-6)
        assert not grew[idle & (value.abs() < 2.0**-8 * top)].any()
    assert grew[~idle].any() == stored.groups, "others may grow to the smallest code"


def test_int8_groups_never_cross_rows():
    stored, held = allocate(CODECS["int8"], SLOTS["m"], (64, 300))
    assert tuple(held["exponents"].shape) == (64, 2)
    value = torch.ones(64, 300)
    value[0] = 2.0**20
    stored.encode(held, slice(0, 64), value, NEAREST)
    assert torch.equal(stored.decode(held, slice(0, 64)), value)


@by(lambda codec, slot: codec.name == "int8")
def test_int8_keeps_what_rounds_into_another_octave(codec, slot):
    """The largest number of a group, just below and just above a power of two, and all its neighbours."""
    stored, held = allocate(codec, slot, (64, 256))
    near = torch.linspace(0.9, 1.1, 64).view(-1, 1) * torch.logspace(-30, 0, 256, base=2.0)
    rows = slice(0, 64)
    for age in range(20):
        stored.encode(held, rows, near, Rounding(rounding_phase(age, 0)))
        before = {name: tensor.clone() for name, tensor in held.items()}
        decoded = stored.decode(held, rows).clone()
        assert ((decoded - near).abs().amax(-1) <= 0.13 * near.amax(-1)).all()
        for again in (NEAREST, Rounding(rounding_phase(age + 1, 1))):
            stored.encode(held, rows, decoded, again)
            assert all(torch.equal(held[name], before[name]) for name in before)


@by(lambda codec, slot: codec.name == "int8")
def test_int8_has_a_code_for_anything(codec, slot):
    stored, held = allocate(codec, slot, (16, 256))
    largest = torch.finfo(torch.float32).max
    value = torch.tensor([0.0, 1e-45, 1e-38, 1e-30, 1.0, 1e30, largest, math.inf]).repeat(16, 32)
    for age in range(5):
        stored.encode(held, slice(0, 16), value, Rounding(rounding_phase(age, 0)))
        decoded = stored.decode(held, slice(0, 16))
        assert stored.problem(held) is None and decoded.isfinite().all()
        assert (decoded[:, 6::8] >= 0.4 * largest).all() and (decoded[:, ::8] == 0).all()
        assert slot.signed or (decoded[:, 1::8] > 0).all()


@by(lambda codec, slot: codec.name in ("int8", "int4"))
def test_groups_that_lost_their_content_are_counted(codec, slot):
    stored, held = allocate(codec, slot, (64, 512))
    rows = slice(0, 64)
    spread = torch.randn(64, 512).abs() + 0.1
    for value, lost in (
        (spread, 0.0),
        (torch.zeros(64, 512), 0.0),
        (spread.index_fill(1, torch.arange(0, 512, 64), 1e15), 1.0),
    ):
        stored.encode(held, rows, value, NEAREST)
        found = stored.underflowed(held, rows)
        assert found.dtype == torch.bool and found.shape == held[stored.buffers[1].name].shape
        assert found.float().mean() == lost


@by(lambda codec, slot: not codec.factored)
def test_rows_are_encoded_alike_in_any_tile(codec, slot):
    """The same bytes, whether a tensor is written at once or in tiles of rows."""
    shape = (66, 300)
    _, tiled = allocate(codec, slot, shape)
    stored, whole = allocate(codec, slot, shape)
    value, rounding = values(slot, shape), Rounding(rounding_phase(5, 0))
    stored.encode(whole, slice(0, 66), value, rounding)
    for start in range(0, 66, 11):
        stored.encode(tiled, slice(start, start + 11), value[start : start + 11], rounding)
    assert all(torch.equal(whole[name], tiled[name]) for name in whole)

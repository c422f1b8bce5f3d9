"""Laws of the stored formats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from baoc.core.codecs import CODECS, Codec, Format
from baoc.core.rounding import NEAREST, Rounding, rounding_phase
from baoc.core.spec import Reach, Slot
from tests.cases import SHAPES

SLOTS = {"m": Slot("m", signed=True), "v": Slot("v", signed=False)}
PAIRS = [(c, s) for c in CODECS.values() for s in SLOTS.values() if c.refusal(s) is None]
by_codec_and_slot = pytest.mark.parametrize(("codec", "slot"), PAIRS, ids=[f"{c.name}-{s.name}" for c, s in PAIRS])


def allocate(codec: Codec, slot: Slot, shape: tuple[int, ...]) -> tuple[Format, dict[str, Tensor]]:
    stored = codec.at(shape, slot)
    return stored, {b.name: torch.zeros(b.shape or (1,), dtype=b.dtype) for b in stored.buffers}


def values(slot: Slot, shape: tuple[int, ...]) -> Tensor:
    """Numbers over twelve orders of magnitude, some exactly zero."""
    x = torch.randn(shape or (1,)) * 10.0 ** torch.empty(shape or (1,)).uniform_(-6, 6)
    x = x.masked_fill(torch.rand(x.shape) < 0.05, 0.0)
    return x if slot.signed else x.square()


@by_codec_and_slot
@pytest.mark.parametrize("shape", [shape for shape in SHAPES.values() if math.prod(shape)], ids=str)
@pytest.mark.parametrize("age", [None, 1, 12345])
def test_encode_after_decode_changes_nothing(codec, slot, shape, age):
    name = codec.name
    codec, buffers = allocate(codec, slot, shape)
    rows = slice(0, (shape or (1,))[0])
    codec.encode(buffers, rows, values(slot, shape), NEAREST)
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    rounding = NEAREST if age is None else Rounding(rounding_phase(age, 0))
    decoded = codec.decode(buffers, rows).clone()
    codec.encode(buffers, rows, decoded, rounding)
    for key, tensor in buffers.items():
        if codec.reach is Reach.ROWS:
            assert torch.equal(tensor, before[key]), key
        elif name == "factored":  # means of fp32 numbers are only right to their last bits
            torch.testing.assert_close(tensor, before[key], rtol=1e-6, atol=0)
    if codec.reach is not Reach.ROWS and name != "factored":  # those of two rounded factors, to a code of each
        lost = 1e-6 * float(decoded.max())  # what a factor cannot hold beside much larger ones
        torch.testing.assert_close(codec.decode(buffers, rows), decoded, rtol=0.3, atol=lost)


@by_codec_and_slot
def test_a_positive_value_never_becomes_zero(codec, slot):
    if slot.signed:
        pytest.skip("a momentum may become zero")
    codec, buffers = allocate(codec, slot, (64, 512))
    value = torch.rand(64, 512) * 1e-30
    value[:, ::97] = 1.0
    for age in range(5):
        codec.encode(buffers, slice(0, 64), value, Rounding(rounding_phase(age, 1)))
        assert (codec.decode(buffers, slice(0, 64)) > 0).all()


@by_codec_and_slot
def test_all_zero_stays_zero(codec, slot):
    codec, buffers = allocate(codec, slot, (64, 512))
    codec.encode(buffers, slice(0, 64), torch.zeros(64, 512), Rounding(rounding_phase(3, 0)))
    assert (codec.decode(buffers, slice(0, 64)) == 0).all()


@by_codec_and_slot
def test_rounding_is_right_on_average(codec, slot):
    """Over 500 steps every element's mean is within 2% of a code, where one rounding is off by up to a whole one."""
    if codec.factored or codec.bits == 32:
        pytest.skip("rounds nothing elementwise")
    rarely = 2e-3 if codec.bits < 8 else 1e-4  # so near to a code that 500 steps may not leave it
    codec, buffers = allocate(codec, slot, (16, 512))
    value = torch.randn(16, 512) if slot.signed else torch.randn(16, 512).square()
    rows = slice(0, 16)
    decoded = []
    for age in range(500):
        codec.encode(buffers, rows, value, Rounding(rounding_phase(age, 0)))
        decoded.append(codec.decode(buffers, rows))
    stack = torch.stack(decoded)
    step_between_codes = stack.amax(0) - stack.amin(0)
    error = (stack.mean(0) - value).abs()
    assert (error <= 0.02 * step_between_codes + 1e-3 * value.abs() + rarely).all()


@by_codec_and_slot
def test_a_mask_bounds_the_rounding(codec, slot):
    if codec.factored:
        pytest.skip("factors are not elementwise")
    codec, buffers = allocate(codec, slot, (16, 512))
    value = torch.randn(16, 512) if slot.signed else torch.randn(16, 512).square()
    every = torch.ones_like(value).bool()
    rows, phase = slice(0, 16), rounding_phase(7, 0)
    tiny = 3e-4 * value.abs()  # the margin that keeps representable values where they are
    codec.encode(buffers, rows, value, Rounding(phase, toward_zero=every))
    held = codec.decode(buffers, rows).abs()
    assert ((held <= value.abs() + tiny) | (not slot.signed)).all()


def test_int8_groups_never_cross_rows():
    codec, buffers = allocate(CODECS["int8"], SLOTS["m"], (64, 300))
    assert tuple(buffers["exponents"].shape) == (64, 2)
    value = torch.ones(64, 300)
    value[0] = 2.0**20
    codec.encode(buffers, slice(0, 64), value, NEAREST)
    assert torch.equal(codec.decode(buffers, slice(0, 64)), value)


@pytest.mark.parametrize("slot", SLOTS.values(), ids=SLOTS)
def test_int8_keeps_what_rounds_into_another_octave(slot):
    """The largest number of a group, just below and just above a power of two, and all its neighbours."""
    codec, buffers = allocate(CODECS["int8"], slot, (64, 256))
    near = torch.linspace(0.9, 1.1, 64).view(-1, 1) * torch.logspace(-30, 0, 256, base=2.0)
    rows = slice(0, 64)
    for age in range(20):
        codec.encode(buffers, rows, near, Rounding(rounding_phase(age, 0)))
        before = {name: tensor.clone() for name, tensor in buffers.items()}
        decoded = codec.decode(buffers, rows).clone()
        assert ((decoded - near).abs().amax(-1) <= 0.13 * near.amax(-1)).all()
        for again in (NEAREST, Rounding(rounding_phase(age + 1, 1))):
            codec.encode(buffers, rows, decoded, again)
            assert all(torch.equal(buffers[name], before[name]) for name in before)


@pytest.mark.parametrize("slot", SLOTS.values(), ids=SLOTS)
def test_int8_has_a_code_for_anything(slot):
    codec, buffers = allocate(CODECS["int8"], slot, (16, 256))
    largest = torch.finfo(torch.float32).max
    value = torch.tensor([0.0, 1e-45, 1e-38, 1e-30, 1.0, 1e30, largest, math.inf]).repeat(16, 32)
    for age in range(5):
        codec.encode(buffers, slice(0, 16), value, Rounding(rounding_phase(age, 0)))
        decoded = codec.decode(buffers, slice(0, 16))
        assert codec.problem(buffers) is None and decoded.isfinite().all()
        assert (decoded[:, 6::8] >= 0.4 * largest).all() and (decoded[:, ::8] == 0).all()
        assert slot.signed or (decoded[:, 1::8] > 0).all()


@by_codec_and_slot
def test_rows_are_encoded_alike_in_any_tile(codec, slot):
    """The same bytes, whether a tensor is written at once or in tiles of rows."""
    if codec.factored:
        pytest.skip("columns are sums over all rows")
    shape = (66, 300)
    _, tiled = allocate(codec, slot, shape)
    codec, whole = allocate(codec, slot, shape)
    value, rounding = values(slot, shape), Rounding(rounding_phase(5, 0))
    codec.encode(whole, slice(0, 66), value, rounding)
    for start in range(0, 66, 11):
        codec.encode(tiled, slice(start, start + 11), value[start : start + 11], rounding)
    assert all(torch.equal(whole[name], tiled[name]) for name in whole)

"""Laws of slot ``w``: the low bits of 16-bit parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baoc import ConfigurationError, Plan, PlanError, parse
from baoc.core.codecs import CODECS, WeightFormat
from baoc.core.codecs.weights import PARAM, low_bits_as
from baoc.core.rounding import NEAREST, Rounding, rounding_phase
from baoc.core.spec import WEIGHT
from tests.cases import CONFIGURATIONS, SHAPES, WEIGHTS, by_configuration

DTYPES = (torch.bfloat16, torch.float16)
by_weight = pytest.mark.parametrize("weight", WEIGHTS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ROWS = slice(0, 64)


def stored_as(weight: str, dtype: torch.dtype, value: Tensor, age: int | None = None):
    """Encode numbers, and return the format with what it holds."""
    stored = CODECS[weight].at(tuple(value.shape), WEIGHT)
    assert isinstance(stored, WeightFormat)
    held = {**stored.zeros(value.device), PARAM: torch.zeros(value.shape, dtype=dtype)}
    stored.encode(held, ROWS, value, NEAREST if age is None else Rounding(rounding_phase(age, 2)))
    return stored, held


def weights(dtype: torch.dtype) -> Tensor:
    """Numbers over the range of a dtype: for fp16 from 2^-17 on, where its remainder is exact."""
    least, most = (-37, 37) if dtype == torch.bfloat16 else (-5.1, 4.8)
    x = torch.randn(64, 512).sign() * 10.0 ** torch.empty(64, 512).uniform_(least, most)
    return x.masked_fill(torch.rand(x.shape) < 0.01, 0.0)


@by_dtype
def test_sixteen_bits_are_exact(dtype):
    value = weights(dtype)
    stored, held = stored_as("16", dtype, value, age=7)
    assert torch.equal(stored.decode(held, ROWS), value)


def test_small_numbers_of_fp16_are_multiples_of_a_fixed_unit():
    value = torch.randn(64, 512) * 2.0**-20
    stored, held = stored_as("16", torch.float16, value)
    assert (stored.decode(held, ROWS) - value).abs().max() <= 2.0**-41


@by_dtype
def test_eight_bits_have_the_promised_error(dtype):
    """To nearest within 2^-16 of the weight; in steps, which round either way, within twice of it."""
    value = weights(dtype).clamp(-6e4, 6e4)
    if dtype == torch.float16:
        value = value[value.abs() >= 2.0**-14].new_tensor(value.where(value.abs() >= 2.0**-14, torch.ones(())).tolist())
    for age, most in ((None, 2.0**-16), (3, 2.0**-15)):
        stored, held = stored_as("8", dtype, value, age)
        assert ((stored.decode(held, ROWS) - value).abs() <= most * value.abs()).all()


@by_weight
@by_dtype
@pytest.mark.parametrize("age", [None, 1, 12345])
def test_storing_what_was_read(weight, dtype, age):
    """No byte of the remainder changes, and none of the parameter."""
    stored, held = stored_as(weight, dtype, weights(dtype))
    before = {name: tensor.clone() for name, tensor in held.items()}
    rounding = NEAREST if age is None else Rounding(rounding_phase(age, 2))
    stored.encode(held, ROWS, stored.decode(held, ROWS), rounding)
    for name, tensor in before.items():
        assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("weight", ["8", "sr"])
@by_dtype
def test_rounding_is_right_on_average(weight, dtype):
    """Over 512 steps the mean of every element is within 1% of the distance between neighbors."""
    value = torch.empty(64, 64).uniform_(1.0, 2.0)
    mean = torch.zeros_like(value, dtype=torch.float64)
    for age in range(512):
        stored, held = stored_as(weight, dtype, value, age)
        mean += stored.decode(held, ROWS) / 512
    between = torch.finfo(dtype).eps * 2.0**-stored.remainder_bits
    assert ((mean - value).abs() <= 0.01 * between + 1e-7).all()


@pytest.mark.parametrize("weight", ["16", "8"])
@by_dtype
def test_the_parameter_is_the_rounded_weight(weight, dtype):
    value = weights(dtype)
    stored, held = stored_as(weight, dtype, value)
    joined, step = stored.decode(held, ROWS), torch.finfo(dtype).eps
    assert ((held[PARAM].float() - joined).abs() <= step / 2 * joined.abs() + 2.0**-25 * (dtype == torch.float16)).all()


@by_weight
@by_dtype
def test_infinities_and_nan_stay_what_they_are(weight, dtype):
    """All-ones bits would carry from the remainder into the sign of the parameter."""
    odd = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    value = torch.cat([odd, torch.tensor([torch.inf, -torch.inf, -0.0, 1e-45, 0.0])]).repeat(64, 1)
    for age in (None, 5):
        stored, held = stored_as(weight, dtype, value, age)
        joined = stored.decode(held, ROWS)
        assert torch.equal(joined.isnan(), value.isnan()) and torch.equal(held[PARAM].isnan(), value.isnan())
        assert torch.equal(joined.isinf(), value.isinf()) and torch.equal(
            joined.signbit()[:, 3:], value.signbit()[:, 3:]
        )


def test_remainders_of_other_widths_belong_to_the_same_parameter():
    value = weights(torch.bfloat16)
    exact, held = stored_as("16", torch.bfloat16, value)
    eight = CODECS["8"].at((64, 512), WEIGHT)
    narrow = eight.decode({"": low_bits_as(torch.int8, held[""]), PARAM: held[PARAM]}, ROWS)
    assert ((narrow - value).abs() <= 2.0**-15 * value.abs()).all()
    wide = {"": low_bits_as(torch.int16, low_bits_as(torch.int8, held[""])), PARAM: held[PARAM]}
    assert torch.equal(exact.decode(wide, ROWS), narrow)


@pytest.mark.parametrize(**by_configuration)
@by_weight
def test_spelling_and_bytes(configuration, weight):
    """Every configuration has the slot, and pays two, one or no bytes for each element."""
    spelled = configuration.with_weight(weight)
    assert parse(str(spelled)) == spelled and spelled.weight == weight and f"w={weight}" in str(spelled)
    assert spelled.with_weight(None) == configuration and spelled.switches == configuration.switches
    each = {"16": 2, "8": 1}.get(weight, 0)
    for shape in SHAPES.values():
        numel = torch.Size(shape).numel()
        assert spelled.state_bytes(shape) == configuration.state_bytes(shape) + each * numel


def test_fallbacks_keep_the_low_bits_too():
    fallback = parse("muon[m=int8,w=8]").layout((64,)).configuration
    assert fallback.mechanism_name == "adamw" and fallback.weight == "8"
    assert parse("muon[m=int8,w=8] else adamw[m=int8,v=int8,w=sr]").layout((64,)).configuration.weight == "sr"


@pytest.mark.parametrize("spelling", ["adamw[m=8]", "adamw[w=int8]", "sgd[w=fp32]", "adamw[v=sr]"])
def test_codecs_of_weights_store_weights_only(spelling):
    with pytest.raises(ConfigurationError, match="cannot store"):
        parse(spelling)


def test_a_uniform_plan_leaves_fp32_parameters_out():
    shapes, dtypes = {"a": (64, 64), "b": (64,)}, {"a": torch.bfloat16, "b": torch.float32}
    plan = Plan.uniform("adamw[m=int8,v=int8,w=8]", shapes, dtypes=dtypes)
    assert {name: block.configuration.weight for name, block in plan.by_parameter} == {"a": "8", "b": None}
    with pytest.raises(PlanError, match=r"no parameter is bf16 or fp16 \(dtypes: torch.float32\)"):
        Plan.uniform("adamw[w=8]", shapes, dtypes=dict.fromkeys(shapes, torch.float32))


def test_the_table_has_no_low_bits():
    """Tests of the table train fp32 parameters; those here add the slot to it."""
    assert not any(configuration.weight for configuration in CONFIGURATIONS)

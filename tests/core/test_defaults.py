"""Torch's default dtype and default device change nothing that core computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from baoc import CATALOG, EXTENDED
from baoc.core.mechanisms import Evidence
from baoc.core.rounding import NEAREST, Rounding, rounding_phase
from baoc.core.sharding import first_rows
from baoc.core.spec import Hyper, Reach

CPU = torch.device("cpu")
SHAPES = ((64, 300), (4, 32, 48))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "bf16": lambda: default_dtype(torch.bfloat16),
    "fp64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
}
by_default = pytest.mark.parametrize("default", DEFAULTS.values(), ids=list(DEFAULTS))


def assert_unchanged(compute: Callable[[], dict[str, Tensor]], default) -> None:
    expected = compute()
    with default():
        found = compute()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].device) == (tensor.dtype, CPU), name
        assert torch.equal(found[name], tensor), name


@by_default
@pytest.mark.parametrize("configuration", (*CATALOG, *EXTENDED), ids=str)
def test_formats_and_update_rules(configuration, default):
    for shape in SHAPES:
        grad = torch.randn(shape, dtype=torch.float32, device=CPU)
        layout, rows = configuration.layout(shape), slice(0, shape[0])
        rule = layout.mechanism

        def compute(grad=grad, layout=layout, rows=rows, rule=rule):
            scalars = rule.scalars(Hyper(lr=1e-3), {stored.slot.name: 3 for stored in layout.formats})
            result, slots = {}, {}
            for index, stored in enumerate(layout.formats):
                name, held = stored.slot.name, stored.zeros(CPU)
                mask = grad > 1 if stored.slot.signed else None
                for rounding in (NEAREST, Rounding(rounding_phase(3, index), mask)):
                    stored.encode(held, rows, rule.observe(name, grad), rounding)
                slots[name] = stored.decode(held, rows)
                result |= {stored.key(key): tensor for key, tensor in held.items()}
            direction = rule.direction(grad, slots, scalars)
            if rule.reach is Reach.MATRIX:
                stacked = direction.reshape(-1, *direction.shape[-2:]).clone()
                direction = rule.adapt(rule.finish(stacked, scalars).view(grad.shape), slots, scalars)
            rms = rule.typical_rms(Evidence(slots, dict.fromkeys(slots, 3), 0.1), Hyper(lr=1e-3))
            rms = torch.tensor(rms or 0.0, dtype=torch.float64, device=CPU)
            return {**result, **slots, "direction": direction, "rms": rms}

        assert_unchanged(compute, default)


@by_default
def test_the_corner_of_a_tensor(default):
    tensor = torch.arange(12, dtype=torch.float16, device=CPU).view(3, 4)
    assert_unchanged(lambda: {"corner": first_rows(tensor, 2, 3)}, default)

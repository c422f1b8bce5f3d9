"""One bad gradient costs its own element at most, as in torch, and never its neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from baoc import BlockOptimizer
from baoc.core.spec import Reach
from tests.cases import by_configuration, gradients

SHAPE = (64, 300)
AT = (3, 77)
SPIKES = {"its square overflows": 2e19, "two overflow a sum": 1.5e19, "infinite": math.inf, "no number": math.nan}


def run(configuration, kernel, spike: float | None, *, steps: int = 12, at: int = 5) -> nn.Parameter:
    param = nn.Parameter(torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)))
    optimizer = BlockOptimizer([param], lr=1e-2, plan=configuration, kernel=kernel)
    for step, grad in enumerate(gradients(SHAPE, steps)):
        if step == at:
            grad[AT] = 0.0 if spike is None else spike
            grad[AT[0], AT[1] + 1] = 0.0 if spike is None else -spike
        param.grad = grad
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("kernel", ["native", "eager"])
@pytest.mark.parametrize("spike", SPIKES)
@pytest.mark.parametrize(**by_configuration)
def test_a_spike_stays_where_it_is(configuration, spike, kernel):
    hit = torch.zeros(SHAPE, dtype=torch.bool)
    hit[AT[0], AT[1] : AT[1] + 2] = True
    spared, struck = run(configuration, kernel, None), run(configuration, kernel, SPIKES[spike])
    layout = configuration.layout(SHAPE)
    if layout.reach is Reach.SUMS:  # two lost elements are missing in the parameter's RMS, or in means of v
        torch.testing.assert_close(struck[~hit], spared[~hit], rtol=1e-2, atol=1e-3)
    elif layout.shares:  # the state of all is as if those two had no gradient in that step
        torch.testing.assert_close(struck[~hit], spared[~hit], rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(struck[~hit], spared[~hit])
    if not math.isfinite(SPIKES[spike]):
        assert not struck[hit].isfinite().any(), "a broken gradient must show"
    elif layout.shares:
        assert struck.isfinite().all()


@pytest.mark.parametrize("kernel", ["native", "eager"])
def test_a_lost_element_does_not_take_a_norm_with_it(kernel):
    """Adafactor's steps are relative to the parameter's RMS, which must not become NaN with one of its elements."""
    param = nn.Parameter(torch.ones(SHAPE))
    with torch.no_grad():
        param[AT] = math.nan
    optimizer = BlockOptimizer([param], lr=1e-2, plan="adafactor", kernel=kernel)
    for grad in gradients(SHAPE, 3):
        param.grad = grad
        optimizer.step()
    assert (~param.isfinite()).sum() == 1

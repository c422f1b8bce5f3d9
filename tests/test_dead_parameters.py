"""An element whose gradient becomes zero never moves further than exact AdamW would take it from the same state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from baoc import BlockOptimizer, to_torch
from tests.cases import CONFIGURATIONS, gradients, train

ADAM_LIKE = [c for c in CONFIGURATIONS if c.mechanism_name in ("adam", "adamw")]
SHAPE = (32, 512)
ALIVE_STEPS, DEAD_STEPS = 40, 200


@pytest.mark.parametrize("configuration", ADAM_LIKE, ids=str)
def test_dead_elements_move_no_further_than_with_exact_state(configuration):
    param = nn.Parameter(torch.zeros(SHAPE))
    optimizer = BlockOptimizer([param], lr=1e-2, weight_decay=0.0, plan=configuration)
    train(optimizer, param, gradients(SHAPE, ALIVE_STEPS))
    exact_param = nn.Parameter(param.detach().clone())
    exact = torch.optim.AdamW([exact_param], weight_decay=0.0)
    exact.load_state_dict(copy.deepcopy(to_torch(optimizer)))

    dead = torch.rand(SHAPE) < 0.3
    dead[3] = True  # a whole row, and with it its groups' scales
    start = param.detach().clone()
    for grad in gradients(SHAPE, DEAD_STEPS, seed=1):
        param.grad = exact_param.grad = grad.masked_fill(dead, 0.0)
        previous, exact_previous = param.detach().clone(), exact_param.detach().clone()
        optimizer.step()
        exact.step()
        if configuration.switches.factored:
            continue  # the other elements of a row and column go on feeding v, as they should
        step, exact_step = (param - previous).abs(), (exact_param - exact_previous).abs()
        assert (step[dead] <= exact_step[dead] * 1.002 + 1e-6).all()
    moved, exact_moved = (param - start).abs(), (exact_param - start).abs()
    slack = 1.5 if configuration.switches.factored else 1.002
    assert moved[dead].max() <= slack * exact_moved[dead].max() + 1e-5


def test_momentum_does_not_outlive_its_second_moment():
    """The failure that this guards against: m stuck on a code while v decays to nothing."""
    param = nn.Parameter(torch.zeros(SHAPE))
    optimizer = BlockOptimizer([param], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, plan="adamw-8")
    train(optimizer, param, gradients(SHAPE, ALIVE_STEPS))
    dead = torch.zeros(SHAPE, dtype=torch.bool)
    dead[:, ::7] = True
    for grad in gradients(SHAPE, 500, seed=1):
        param.grad = grad.masked_fill(dead, 0.0)
        previous = param.detach().clone()
        optimizer.step()
    assert (param == previous)[dead].all()

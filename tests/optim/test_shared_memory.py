"""Parameters that share memory are refused by name; disjoint views of one buffer train as parameters of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from baoc import BAOC, BlockOptimizer

BUFFER = 4096 * 4


def overlapping() -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    buffer, array = torch.zeros(BUFFER), np.zeros(BUFFER, dtype=np.float32)
    grid = buffer.view(64, -1)
    return {
        "one range": (nn.Parameter(buffer[0:100]), nn.Parameter(buffer[50:150])),
        "all of it": (nn.Parameter(buffer), nn.Parameter(buffer)),
        "inside": (nn.Parameter(buffer), nn.Parameter(buffer[50:60])),
        "columns": (nn.Parameter(grid[:, 0:5]), nn.Parameter(grid[:, 4:9])),
        "transposed": (nn.Parameter(grid), nn.Parameter(grid.t())),
        "of other storages": (nn.Parameter(torch.from_numpy(array[0:100])), nn.Parameter(torch.from_numpy(array[50:]))),
        "of another dtype": (nn.Parameter(buffer), nn.Parameter(buffer.view(torch.bfloat16)[20:30])),
    }


def disjoint() -> dict[str, list[torch.Tensor]]:
    buffer = torch.randn(BUFFER, generator=torch.Generator().manual_seed(0))
    grid = buffer.view(64, -1)
    return {
        "slices": list(buffer.split(1000)),
        "columns": [grid[:, :100], grid[:, 100:]],
        "interleaved": [buffer[0::2], buffer[1::2]],
        "rows in turns": [grid[0::2], grid[1::2]],
    }


@pytest.mark.parametrize("case", overlapping())
@pytest.mark.parametrize("build", [BlockOptimizer, BAOC])
def test_overlapping_parameters_are_refused_by_name(case, build):
    one, other = overlapping()[case]
    with pytest.raises(ValueError, match=r"'(one|other)' and '(one|other)' share memory.*use one nn\.Parameter"):
        build([("one", one), ("apart", nn.Parameter(torch.zeros(3))), ("other", other)])


def test_a_group_that_overlaps_another_one_is_not_added():
    buffer = torch.zeros(150)
    optimizer = BlockOptimizer([("a", nn.Parameter(buffer[0:100]))])
    with pytest.raises(ValueError, match="'a' and 'b' share memory"):
        optimizer.add_param_group({"params": [("b", nn.Parameter(buffer[50:150]))]})
    assert len(optimizer.param_groups) == 1


def test_the_same_parameter_in_two_modules_is_one_parameter():
    model = nn.ModuleDict({"wte": nn.Embedding(32, 16), "head": nn.Linear(16, 32, bias=False)})
    model["head"].weight = model["wte"].weight
    assert len(BlockOptimizer(model).members()) == 1


@pytest.mark.parametrize("case", disjoint())
@pytest.mark.parametrize("configuration", ["adamw-32", "adamw-8"])
def test_disjoint_views_train_as_parameters_of_their_own(configuration, case):
    views = [nn.Parameter(view) for view in disjoint()[case]]
    copies = [nn.Parameter(view.detach().clone()) for view in views]
    for params in (views, copies):
        optimizer = BlockOptimizer(params, plan=configuration, kernel="eager")
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()
    assert all(map(torch.equal, views, copies))

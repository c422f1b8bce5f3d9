"""``baoc.state_bytes`` counts what is held, however an optimizer keeps it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from baoc import state_bytes


def holding(**state: Any) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight].update(state)
    return optimizer


class Projector:
    def __init__(self, basis: Tensor) -> None:
        self.rank = 2
        self.basis = basis
        self.itself = self


def test_tensors_in_dicts_and_lists() -> None:
    assert state_bytes(holding(step=3, m=torch.zeros(10), more={"rows": [torch.zeros(5, dtype=torch.int8)]})) == 45


def test_one_storage_counts_once() -> None:
    m = torch.zeros(10)
    assert state_bytes(holding(m=m, same=m, flat=m.view(2, 5))) == 40


def test_a_view_counts_with_what_it_keeps_alive() -> None:
    assert state_bytes(holding(basis=torch.zeros(10, 10)[:, :2])) == 400


def test_tensors_inside_of_tensor_subclasses() -> None:
    assert state_bytes(holding(v=TwoTensor(torch.zeros(10), torch.ones(10)))) == 80


def test_tensors_inside_of_objects() -> None:
    assert state_bytes(holding(projector=Projector(torch.zeros(6)))) == 24


def test_values_without_tensors_count_nothing() -> None:
    assert state_bytes(holding(step=1, name="adam", kind=Projector, nothing=None, rule=state_bytes)) == 0

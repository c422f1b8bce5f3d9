"""Gradient statistics of a short warm-up, and of a training loop with any optimizer."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from baoc import BlockOptimizer, StatisticsCollector, StatisticsError, collect_statistics


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8))


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def test_a_list_of_batches_is_cycled():
    seen: list[tuple[int, int]] = []
    found = collect_statistics(
        mlp(), square, [torch.randn(4, 32)] * 2, steps=5, on_step=lambda step, steps, loss: seen.append((step, steps))
    )
    assert found.steps == 5 and seen == [(i, 5) for i in range(1, 6)]
    assert list(found.records) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_a_short_iterator_ends_the_warm_up_with_a_warning(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "baoc"):
        found = collect_statistics(mlp(), square, iter([torch.randn(4, 32)] * 3), steps=9)
    assert found.steps == 3
    assert "ended after 3 of 9 steps" in caplog.text


def test_records_have_canonical_names_and_only_trainable_parameters():
    model = mlp()
    model[0].requires_grad_(False)
    wrapped = nn.ModuleDict({"_orig_mod": model})
    found = collect_statistics(wrapped, lambda m, b: square(model, b), [torch.randn(4, 32)], steps=1)
    assert list(found.records) == ["2.weight", "2.bias"]


def test_a_step_with_infinite_gradients_is_skipped():
    batches = [torch.randn(4, 32), torch.full((4, 32), torch.inf), torch.randn(4, 32)]
    model = mlp()
    found = collect_statistics(model, square, batches, steps=3)
    assert (found.steps, found.skipped) == (2, 1)
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": []}, "no batches"),
        ({"batches": iter([])}, "no batches"),
        ({"steps": 0}, "at least one gradient"),
        ({"loss_fn": lambda model, batch: model(batch)}, "shape"),
        ({"loss_fn": lambda model, batch: 1.0}, "float"),
        ({"loss_fn": lambda model, batch: batch.mean()}, "does not depend"),
        ({"model": mlp().requires_grad_(False)}, "no parameter is trainable"),
    ],
)
def test_invalid_arguments_are_refused(change: dict[str, Any], message: str):
    with pytest.raises(StatisticsError, match=message):
        collect_statistics(**{"model": mlp(), "loss_fn": square, "batches": [torch.randn(4, 32)], **change})


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, BlockOptimizer])
def test_a_collector_sees_the_gradients_of_any_optimizer(kind: type[torch.optim.Optimizer]):
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.0)
    collector = StatisticsCollector(dict(model.named_parameters())).attach(optimizer)
    with pytest.raises(RuntimeError, match="detach"):
        collector.attach(optimizer)
    batches = [torch.randn(4, 32) for _ in range(4)]
    for index, batch in enumerate(batches):
        if index == 3:
            collector.detach()
        square(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert collector.steps == 3
    direct = collect_statistics(model, square, batches, steps=3, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    for name, record in collector.statistics().records.items():
        assert (record.second == direct.records[name].second).all()


def test_a_collector_without_steps_has_no_statistics():
    with pytest.raises(StatisticsError, match="no gradients"):
        StatisticsCollector(mlp()).statistics()

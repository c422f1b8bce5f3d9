"""The comparison of update lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import length
from experiments.paired import Setting
from experiments.runs import RunOptions, Store
from experiments.runs.batch import run_all


def test_lengths_are_compared_with_adamw_at_every_learning_rate(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(length, "FINE_TUNING", (tiny,))
    settings = [Setting(tiny, 2)]
    with Store(tmp_path / "length").writing("length") as store:
        run_all(length.jobs(settings, 1, RunOptions()), store)
        told = length.page(settings, store, 2, "some command").splitlines()
    assert len(store.rows) == (1 + len(length.METHODS)) * len(length.SHARES)
    losses = {(row["method"], row["lr_factor"]): row["test_loss"] for row in store.rows}
    for line, (factor, name) in zip(told[-3:], length.SHARES.items()):
        base = losses[length.BASELINE, factor]
        cells = [f"{100 * (losses[method, factor] / base - 1):+.2f}" for method in length.METHODS.values()]
        assert line == f"| {tiny} | 2 | {name} | {base:.3f} | {' | '.join(cells)} |"

"""Learning-rate multipliers by role: the experiment that compares them."""

from __future__ import annotations

from pathlib import Path

from experiments import rates
from experiments.runs import RunOptions, Store
from experiments.runs.batch import run_all


def test_factors_are_compared_with_none_seed_by_seed(tiny: str, tmp_path: Path) -> None:
    settings = [rates.Setting(tiny, 2)]
    with Store(tmp_path / "rates").writing("rates") as store:
        run_all(rates.jobs(settings, 2, RunOptions()), store)
        assert {row["method"] for row in store.rows} == {
            rates.method("muon-8", factors) for factors in ({}, *rates.FACTORS)
        }
        told = rates.page(settings, store, 3, "some command").splitlines()
    losses = {(row["method"], row["seed"]): row["test_loss"] for row in store.rows}
    without, with_factor = (
        [losses[rates.method("muon-8", factors), seed] for seed in range(2)] for factors in ({}, {"vector": 2.0})
    )
    mean = sum(100 * (ours / other - 1) for ours, other in zip(with_factor, without)) / 2
    assert f"| {mean:+.2f}" in told[-1], "two of three seeds are there"

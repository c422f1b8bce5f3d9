"""Low-precision state trains a real language model as well as fp32 state does."""

from __future__ import annotations

import statistics

import pytest

import baoc
from experiments import corpus as corpora
from experiments.tiny_gpt import test_loss as held_out_loss
from experiments.tiny_gpt import train

SEEDS = (0, 1, 2)
STEPS = 150


@pytest.fixture(scope="module")
def corpus():
    return corpora.load()


def losses(corpus, plan: str) -> list[float]:
    results = []
    for seed in SEEDS:
        *_, (_, _, model, _) = train(
            corpus,
            lambda model: baoc.BlockOptimizer(model, lr=1e-3, weight_decay=0.1, plan=plan),
            seed=seed,
            steps=STEPS,
        )
        results.append(held_out_loss(corpus, model))
    return results


@pytest.mark.xdist_group("training")
def test_low_precision_is_within_0_3_percent_of_fp32_over_3_seeds(corpus):
    exact = losses(corpus, "adamw-32")
    assert statistics.mean(exact) < 2.8  # it has learned: an untrained model is at 4.6
    for plan in ("adamw-16", "adamw-8"):
        change = statistics.mean(loss / base - 1 for loss, base in zip(losses(corpus, plan), exact))
        assert abs(change) <= 0.003, f"{plan}: {change:+.2%}"

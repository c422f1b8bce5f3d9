"""The ladder: rungs, searches and the page."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import methods
from experiments.commands import main
from experiments.ladder import page, running
from experiments.ladder.catalog import BETA2, DECAY, FIRST, LADDER, PLAIN, Climb, Recipe, Rung
from experiments.workloads import Options, WorkloadError, enwik8, get


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    monkeypatch.setattr(enwik8, "HELD_OUT", 5_000)
    folder = tmp_path / "data" / "enwik8"
    folder.mkdir(parents=True)
    (folder / "enwik8").write_bytes(bytes(range(256)) * 100)
    return Options(data=tmp_path / "data", batch_size=2)


def test_windows_predict_the_next_byte_and_splits_do_not_overlap(corpus: Options) -> None:
    workload = get("llama-0.05m/enwik8", corpus)
    batch = next(workload.train_batches(seed=0))
    assert batch["input_ids"].shape == (2, enwik8.LENGTH)
    assert torch.equal(batch["labels"], (batch["input_ids"] + 1) % 256)
    assert {split: len(text) for split, text in enwik8.load(corpus).items()} == {
        "train": 15_600,
        "validation": 5_000,
        "test": 5_000,
    }


def test_sizes_are_what_they_say(corpus: Options) -> None:
    for name, width in enwik8.WIDTHS.items():
        model = get(f"llama-{name}/enwik8", corpus).build(seed=0, device="meta")
        hidden = sum(p.numel() for n, p in model.named_parameters() if ".layers." in n and p.dim() == 2)
        assert hidden == pytest.approx(enwik8.hidden_parameters(width), rel=0.01)


def test_a_missing_corpus_is_refused_with_where_to_get_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ladder", "--data", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "enwik8.zip" in capsys.readouterr().err
    with pytest.raises(WorkloadError, match=r"enwik8\.zip"):
        enwik8.load(Options(data=tmp_path))


def test_decay_is_independent_of_the_learning_rate() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    recipe = Recipe("muon-8", multipliers=True, beta2=0.95, decay=0.5)
    for factor in (0.5, 1.0, 4.0):
        optimizer = methods.get(recipe.spelling(factor)).build(model, factor * 4e-3, methods.Settings())
        group = optimizer.param_groups[0]
        assert group["lr"] * group["weight_decay"] == pytest.approx(0.5 * 4e-3)
        assert group["betas"] == (0.9, 0.95)


class Known(running.Ladder):
    """A ladder whose losses are a function of the settings."""

    def __init__(self) -> None:
        super().__init__({}, Options())
        self.tried: list[tuple[Recipe, float]] = []

    def row(self, rung: Rung, recipe: Recipe, lr_factor: float, seed: int = 0) -> dict[str, Any]:
        self.tried.append((recipe, lr_factor))
        distance = abs(math.log2(lr_factor) - 3) + abs(recipe.beta2 - 0.98) + abs(recipe.decay - 0.5)
        loss = 2 + distance - 0.1 * recipe.multipliers
        return {"validation_loss": loss, "test_loss": loss}


def test_tuning_finds_the_best_settings_inside_the_grid() -> None:
    known = Known()
    best, lr = known.tuned()
    assert (best.beta2, best.decay, best.multipliers, lr) == (0.98, 0.5, True, 8.0)
    tried = {factor for recipe, factor in known.tried if recipe == PLAIN}
    assert {4.0, 8.0, 16.0} <= tried
    assert {r.beta2 for r, _ in known.tried} == set(BETA2) and {r.decay for r, _ in known.tried} == set(DECAY)


def test_every_climb_finds_its_recipes_and_starts_from_a_rung_with_as_many_steps() -> None:
    found = running.climbed(Known(), LADDER)
    for climb in LADDER:
        assert set(climb.recipes) <= set(found[climb.rung])
        assert all(factor == 8.0 for _, factor in found[climb.rung].values())


def test_a_search_tries_no_more_than_it_may() -> None:
    for tries in (1, 2, 3, 7):
        known = Known()
        known.best_lr(FIRST, PLAIN, 1.0, tries)
        assert len({factor for _, factor in known.tried}) <= tries


def test_page_of_one_run(corpus: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = Rung("0.05m", 2 * 256 / FIRST.parameters, 256)
    climbs = (Climb(short, ("AdamW32", "muon-8")),)
    monkeypatch.setattr(running, "LADDER", climbs)
    monkeypatch.setattr(page, "FIRST", short)
    monkeypatch.setattr(running, "FIRST", short)
    monkeypatch.setattr(page, "LADDER", climbs)
    with running.ExitStack() as stack:
        climbing = running.Ladder(running.opened(tmp_path / "out", stack), corpus, io.StringIO())
        assert math.isfinite(climbing.loss(short, PLAIN, 1.0))
    told = page.text(running.Ladder(running.opened(tmp_path / "out"), corpus), "a command")
    assert "AdamW32, plain" in told and "Not trained" in told

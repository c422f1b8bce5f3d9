"""The laws that carry effects to other scales: their shape, the file that ships, and what plans do with them."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from torch import nn

from baoc import EffectPlanner, ModelFacts, make_plan, parse
from baoc.core.roles import Role
from baoc.planners.base import Budget
from baoc.planners.effect_table import EffectTable
from baoc.planners.model_facts import REGIMES, SCRATCH
from baoc.planners.scaling import EffectsAtScale, Law, Laws, Scale, has_momentum
from experiments.commands import scaling as command
from experiments.scaling.data import Comparison, Lag, Point
from experiments.scaling.fit import no_momentum, saved_law, worth_law

SIZES = (10**4, 10**6, 10**8, 10**9, 10**10, 10**12)
RATIOS = (1.0, 20.0, 100.0, 10_000.0)
BATCH = 2**19
ROOT = Path(__file__).parents[2]


def scale(parameters: float, ratio: float, batch: int = BATCH) -> Scale:
    return Scale(parameters, ratio * parameters, ratio * parameters / batch)


def at(parameters: float, ratio: float = 20.0, regime: str = SCRATCH, batch: int = BATCH) -> EffectsAtScale:
    return EffectsAtScale(EffectTable.load(), regime, scale(parameters, ratio, batch))


# ---- laws ----


@pytest.mark.parametrize("ratio", RATIOS)
def test_gains_of_muon_and_of_formats_shrink_with_size(ratio):
    laws = Laws.load()
    gains = [laws.gain(scale(size, ratio))[0] for size in SIZES]
    assert gains == sorted(gains) and gains[-1] < 0
    left = [laws.carried(scale(size, ratio)) for size in SIZES]
    assert left == sorted(left, reverse=True) and 0 < left[-1] < left[0] <= 1


@pytest.mark.parametrize("size", SIZES)
def test_gains_shrink_with_length(size):
    gains = [Laws.load().gain(scale(size, ratio))[0] for ratio in RATIOS]
    assert gains == sorted(gains)


@pytest.mark.parametrize(("size", "ratio"), list(itertools.product(SIZES, RATIOS)))
def test_the_interval_contains_the_mean(size, ratio):
    mean, low, high = Laws.load().gain(scale(size, ratio))
    assert low < mean < high < 0
    effects = at(size, ratio)
    for role, known in EffectTable.load().effects[SCRATCH].items():
        for configuration in known:
            effect = effects.effect(role, configuration)
            assert effect is not None and effect.low <= effect.loss <= effect.high and effect.error >= 0


def test_the_interval_widens_away_from_what_was_trained():
    saved = Laws.load().saved
    spreads = [saved.spread(size, 20 * size) for size in (10**9, 10**10, 10**12)]
    assert spreads == sorted(spreads)


def test_rules_without_momentum_fall_behind_muon_as_runs_get_longer():
    for size in SIZES[1:]:
        lags = []
        for batch in (2**22, 2**19, 2**16):  # more steps for the same tokens
            effects = at(size, batch=batch)
            spectral, muon = (effects.effect(Role.MATRIX, parse(rule)) for rule in ("spectral", "muon-8"))
            assert spectral is not None and muon is not None
            lags.append(spectral.loss - muon.loss)
        assert lags == sorted(lags) and lags[0] > 0


def test_the_published_lag_is_met():
    """Muon without momentum took 8,225 steps where Muon took 3,325, with 162M parameters."""
    assert Laws.load().no_momentum[1] >= 0
    effects = EffectsAtScale(EffectTable.load(), SCRATCH, Scale(162e6, 4.3e9, 8225))
    assert effects.effect(Role.MATRIX, parse("spectral")).loss > 1.0


# ---- what they are fitted to ----


def test_the_file_that_ships_is_what_the_command_makes():
    _, laws, _ = command.made(ROOT / "docs" / "results")
    assert json.loads(command.to_json(laws)) == json.loads(
        (ROOT / "src" / "baoc" / "planners" / "scaling.json").read_text(encoding="utf-8")
    )
    assert Laws.from_plain(json.loads(command.to_json(laws))) == replace(Laws.load(), table=laws.table) == Laws.load()


@pytest.mark.parametrize("effect", [1.0, 1.5])
def test_the_fit_finds_a_law_again(effect):
    """Two studies, one of which finds more than the other, at all sizes."""
    worth, saved = Law(1.4, 0.2, 0.4), Law(-1.0, 0.5, 0.1, knee=10**7.5)
    places = [(study, size, ratio) for study in "ab" for size in (1e5, 1e7, 1e8, 1e9, 3e9) for ratio in (20, 80, 320)]
    points = [Point(study, size, size * ratio, worth.mean(size, size * ratio)) for study, size, ratio in places]
    assert asdict(worth_law(points)).items() >= {"knee": 0.0}.items()
    for name in ("constant", "size", "length"):
        assert getattr(worth_law(points), name) == pytest.approx(getattr(worth, name))
    rows = [
        Comparison(study, True, size, size * ratio, -percent * (effect if study == "b" else 1.0))
        for study, size, ratio in places
        for percent in [worth.mean(size, size * ratio) * saved.mean(size, size * ratio) * (1 + 0.01 * (ratio == 80))]
    ]
    fit = saved_law(rows, worth)
    for size in (1e6, 1e9, 1e10):
        assert fit.law.mean(size, 20 * size) == pytest.approx(saved.mean(size, 20 * size) * effect**0.5, rel=0.1)
    assert fit.offsets["b"] / fit.offsets["a"] == pytest.approx(effect, rel=0.02)


def test_studies_without_equal_tuning_do_not_move_the_law():
    worth = Law(1.0, 0.2, 0.4)
    found = [("a", 1e8, 20, 2.0), ("a", 1e9, 40, 0.8), ("a", 3e9, 20, 0.5), ("b", 1e8, 80, 1.8), ("b", 1e9, 20, 1.0)]
    tuned = [Comparison(study, True, size, ratio * size, -percent) for study, size, ratio, percent in found]
    alone = saved_law(tuned, worth)
    beside = saved_law([*tuned, Comparison("weak", False, 1e9, 2e10, -5.0)], worth)
    assert beside.law == alone.law and beside.offsets["weak"] > 3


def test_one_lag_makes_a_constant():
    assert no_momentum([Lag("one", 1000, 1e6, 2e7, log_ratio=0.5)], Law(0, 0, 0)) == (0.5, 0.0)


# ---- what plans do with them ----


@pytest.mark.parametrize("regime", REGIMES)
def test_only_training_from_scratch_with_the_table_that_ships_is_carried(regime):
    table = EffectTable.load()
    for effects in (at(10**10, regime=regime), EffectsAtScale(table, regime, scale(10**10, 20), is_own=True)):
        if regime != SCRATCH or "your own" in effects.source(1, uses_law=False):
            for role, known in table.effects[regime].items():
                assert all(effects.effect(role, each) == table.effect(regime, role, each) for each in known)
            assert effects.carried == 1


def test_formats_of_one_rule_keep_their_order_at_any_scale():
    table = EffectTable.load().effects[SCRATCH][Role.MATRIX]
    alike = [each for each in table if has_momentum(each)]
    for size in SIZES:
        effects = at(size)
        for one, other in itertools.combinations(alike, 2):
            if one.mechanism_name == other.mechanism_name and table[one].loss < table[other].loss:
                assert effects.effect(Role.MATRIX, one).loss < effects.effect(Role.MATRIX, other).loss


def net(width: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(512, width), *(nn.Linear(width, width) for _ in range(4)), nn.LayerNorm(width))


def test_a_longer_training_predicts_a_smaller_gain_and_the_plan_says_so():
    facts = ModelFacts.of(net(256))
    gains = []
    for steps in (2_000, 200_000, 20_000_000):
        plan = EffectPlanner(tokens=2**14, steps=steps, regime=SCRATCH).initial_plan(facts, Budget(0.6))
        assert plan == EffectPlanner(tokens=2**14, steps=steps, regime=SCRATCH).initial_plan(facts, Budget(0.6))
        assert plan.settings["planned_tokens"] == steps * 2**14
        assert plan.settings["expected_low"] <= plan.settings["expected_loss"] <= plan.settings["expected_high"]
        assert max(map(len, str(plan).splitlines())) <= 80
        gains.append(plan.settings["expected_loss"])
    assert gains == sorted(gains) and gains[0] < -1


def test_the_default_length_is_20_tokens_per_hidden_parameter():
    hidden = ModelFacts.of(net(256)).hidden_numel
    assert 0 < hidden <= 4 * 256**2
    assert make_plan(net(256), 0.6).settings["planned_tokens"] == 20 * hidden


def test_a_source_says_where_evidence_ends():
    assert "extrapolated from" in at(10**11).source(3, uses_law=True)
    assert "extrapolated" not in at(10**8).source(3, uses_law=True)
    assert "no evidence at 100.0B" in at(10**11, regime="finetune").source(3, uses_law=False)
    assert "no evidence" not in at(10**6, regime="finetune").source(3, uses_law=False)
    for size, uses_law in itertools.product((10**4, 7 * 10**10), (True, False)):
        for regime in REGIMES:
            assert len(at(size, 10_000, regime).source(9999, uses_law=uses_law and regime == SCRATCH)) <= 69

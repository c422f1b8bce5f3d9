"""The effect table: its file, and how measured differences become effects."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from torch import nn

from baoc import EffectPlanner, make_plan, parse
from baoc.core.roles import Role
from baoc.planners.effect_table import LADDERS, Difference, Effect, EffectTable, TableError, completed, table_of
from baoc.planners.model_facts import REGIMES


def test_the_table_that_ships_knows_all_regimes_and_where_it_comes_from():
    table = EffectTable.load()
    assert set(table.effects) == set(REGIMES) and "python -m experiments" in table.provenance
    for roles in table.effects.values():
        assert {Role.MATRIX, Role.EMBEDDING} <= set(roles)
        assert all(parse("adamw-32") in known for known in roles.values())
    assert any(effect.runs >= 3 for effect in table.effects["scratch"][Role.MATRIX].values())


def test_a_table_survives_its_file(tmp_path):
    table = EffectTable.load()
    table.save(tmp_path / "table.json")
    assert EffectTable.load(tmp_path / "table.json") == EffectTable.from_json(table.to_json())
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.Linear(128, 64))
    plans = [
        make_plan(model, 0.3, planner=EffectPlanner(table=table)) for table in (None, str(tmp_path / "table.json"))
    ]
    assert plans[0].blocks == plans[1].blocks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no .format."),
        ('{"format": "baoc.effect-table", "version": 9}', "version 9"),
        ('{"format": "baoc.effect-table", "version": 1}', "damaged"),
        ('{"format": "baoc.effect-table", "version": 1, "effects": {"later": {}}}', "regime 'later'"),
        ('{"format": "baoc.effect-table", "version": 1, "effects": {"scratch": {"matrx": {}}}}', "damaged"),
        (
            '{"format": "baoc.effect-table", "version": 1, "effects": {"scratch": {"matrix": {"sgd": {"loss": NaN}}}}}',
            "bad.json' is not an effect table: NaN is out of range. Numbers must be finite",
        ),
        ("[" * 100_000, "nested too deeply"),
        ('{"format": "baoc.effect-table", "version": 1, "effects": 1e999}', "1e999 is out of range"),
    ],
)
def test_bad_tables_are_refused(text, message, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(TableError, match=message):
        EffectTable.load(path)


def test_a_table_that_changes_is_read_again(tmp_path):
    path = tmp_path / "table.json"
    EffectTable.load().save(path)
    before = EffectTable.load(path)
    assert EffectTable.load(path) is before, "an unchanged file is read once"
    EffectTable({}, "another").save(path)
    assert EffectTable.load(path).provenance == "another"
    path.unlink()
    with pytest.raises(TableError, match=r"cannot read the effect table '.*table.json': No such file"):
        EffectTable.load(path)


def differences(values: Mapping[str, list[float]], workload: str = "w") -> list[Difference]:
    return [
        Difference("scratch", Role.MATRIX, parse(name), workload, percent)
        for name, percents in values.items()
        for percent in percents
    ]


def test_runs_become_effects_and_more_state_is_never_worse():
    table = table_of(
        differences({"muon-8": [-9.0, -10.0], "muon-4": [-9.8, -9.6], "spectral": [-5.0], "adamw-8": [-1.0]})
    )
    known = table.effects["scratch"][Role.MATRIX]
    ladder = [known[parse(name)].loss for name in ("muon-32", "muon-16", "muon-8", "muon-4", "spectral")]
    assert ladder == sorted(ladder) and ladder[2] == pytest.approx(-9.6, abs=0.02)
    assert ladder[-1] == pytest.approx(-5.0, abs=0.02)
    assert known[parse("adamw-32")].loss == 0.0 <= known[parse("adamw-8")].loss < 0.1, "noise is no gain"
    assert known[parse("muon-8")].runs == 2 and known[parse("muon-32")].runs == 2


def test_workloads_count_alike_however_many_runs_they_have():
    many = [*differences({"muon-8": [-10.0] * 9}, "a"), *differences({"muon-8": [-2.0]}, "b")]
    assert table_of(many).effects["scratch"][Role.MATRIX][parse("muon-8")].loss == pytest.approx(-6.0, abs=0.02)


def test_completing_twice_changes_little():
    once = completed({parse("muon-8"): Effect(-9.0, runs=3), parse("muon-4"): Effect(-8.0, runs=3)})
    twice = completed(once)
    assert np.allclose([e.loss for e in once.values()], [e.loss for e in twice.values()], atol=0.05)


@pytest.mark.parametrize("regime", ["scratch", "finetune"])
def test_more_state_of_one_kind_is_never_worse_in_the_table_that_ships(regime):
    for known in EffectTable.load().effects[regime].values():
        for ladder in LADDERS:
            losses = [known[parse(rung)].loss for rung in ladder if parse(rung) in known]
            assert losses == sorted(losses)


def test_roles_that_were_not_ablated_have_the_effects_of_others():
    table = EffectTable.load()
    muon, adamw = parse("muon-8"), parse("adamw-8")
    assert table.effect("scratch", Role.STACK, muon) == table.effect("scratch", Role.MATRIX, muon)
    assert table.effect("finetune", Role.HEAD, adamw) == table.effect("finetune", Role.EMBEDDING, adamw)
    assert table.effect("scratch", Role.EMBEDDING, muon) is None
    assert table.effect("scratch", Role.VECTOR, adamw) is None

"""Plans of measured effects: never behind a uniform plan that fits, better with more memory, the same everywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from baoc import BAOC, BlockOptimizer, Plan, PlanError, make_plan, parse, profile, state_bytes
from baoc.core.roles import Role, roles_of
from baoc.core.spec import Hyper
from baoc.planning.planner import Planner
from baoc.planning.risk import Effect, Table, TableError, elements, role_shares
from baoc.planning.risk.calibration import Difference, completed, table_of
from baoc.planning.settings import Settings
from baoc.profiling.facts import Facts, TokenCounter
from tests.training import shapes

SHARES = (0.02, 0.05, 0.1, 0.13, 0.2, 0.25, 0.3, 0.5, 0.75, 1.0, 2.0)
ROOMY = 1e6  # tokens: nothing is too slow


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 64, words: int = 200, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ConvNet(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 96, 3), nn.Flatten())
        self.append(nn.Linear(96 * 4 * 4, 10))


MODELS = {"transformer": Net(), "convolutions": ConvNet()}
by_model = pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
by_regime = pytest.mark.parametrize("regime", ["scratch", "finetune"])


def planner(model: nn.Module, **settings: Any) -> Planner:
    settings = {"tokens": int(ROOMY), **settings}
    return Planner(shapes(model), None, Hyper(lr=1e-3), Settings(**settings), Facts.of(model))


def expected(plan: Plan) -> float:
    return float(plan.settings["expected_loss"])


def predicted(model: nn.Module, spelling: str, regime: str) -> tuple[int, float] | None:
    """Bytes and expected loss of a uniform plan, from the table alone; ``None`` if it was not measured."""
    table, configuration, total = Table.load(), parse(spelling), 0.0
    roles, plan = roles_of(model), {}
    known = []
    for name, shape in shapes(model).items():
        role = roles[name]
        small = role in (Role.EMBEDDING, Role.HEAD) and math.prod(shape) < 4096
        role = Role.VECTOR if small else role
        plan[name] = parse("adamw-32") if role is Role.VECTOR else configuration.suited(shape, role)
        known.append((name, role, math.prod(shape)))
    totals = elements((role, numel) for _, role, numel in known)
    for name, role, numel in known:
        effect = table.effect(regime, role, plan[name])
        if effect is None:
            return None
        total += role_shares([(role, numel)], of=totals)[role] * effect.loss
    return sum(plan[name].state_bytes(shape) for name, shape in shapes(model).items()), total


UNIFORM = (
    *("adamw-32", "adamw-16", "adamw-8", "adamw[m=int8,v=factored]", "adamw[m=int4,v=factored]", "colnorm"),
    *("muon-8 else adamw-8", "muon-8 else adamw[m=int8,v=factored]", "muon-4 else adamw[m=int4,v=factored]"),
    *("spectral else adamw[m=int8,v=factored]", "spectral else colnorm"),
)


@by_model
@by_regime
@pytest.mark.parametrize("spelling", UNIFORM)
def test_no_uniform_plan_that_fits_is_expected_to_be_better(model, regime, spelling):
    found = predicted(model, spelling, regime)
    if found is None:
        pytest.skip("not in the table")
    held, loss = found
    assert expected(planner(model, regime=regime).plan(held)) <= loss + 1e-3


@by_model
@by_regime
def test_more_memory_is_never_expected_to_be_worse(model, regime):
    source = planner(model, regime=regime)
    least = source.least_bytes() / source.reference_bytes
    losses = [expected(source.plan(share)) for share in SHARES if share >= least]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


@by_model
@pytest.mark.parametrize("share", SHARES)
def test_vectors_keep_adamw_and_nothing_is_sgd(model, share):
    source = planner(model)
    if share * source.reference_bytes < source.least_bytes():
        pytest.skip("vectors alone hold more")
    plan = source.plan(share)
    assert plan.state_bytes <= share * plan.reference_bytes
    for name, shape in shapes(model).items():
        chosen = plan.block_of(name).configuration
        assert len(shape) > 1 or chosen == parse("adamw-32")
        assert not chosen.mechanism_name.startswith("sgd")
        assert chosen.mechanism.suits(shape, roles_of(model)[name])


def test_just_below_a_uniform_configuration_a_mix_is_nearly_as_good():
    """0.5 lies under adamw-8, 0.25 under int8 with a factored v: one matrix less of it is all that it costs."""
    model = Net(layers=12)
    source = planner(model)
    for spelling in ("adamw-16", "adamw[m=int8,v=factored]", "muon-8 else adamw[m=int8,v=factored]"):
        held, _ = predicted(model, spelling, "scratch")  # type: ignore[misc]
        whole, less = expected(source.plan(held)), expected(source.plan(int(0.98 * held)))
        assert less - whole < 0.5


def test_a_budget_is_spent():
    source = planner(Net(layers=8))
    for share in (0.1, 0.13, 0.25, 0.5):
        assert source.plan(share).state_bytes > 0.9 * share * source.reference_bytes


def test_zero_is_the_cheapest_and_auto_the_cheapest_that_is_good():
    source = planner(Net())
    cheapest, best = source.plan(0.0), source.plan(100.0)
    assert cheapest.state_bytes == source.least_bytes()
    for tolerance in (0.05, 0.5, 3.0):
        lenient = planner(Net(), tolerance=tolerance)
        found = lenient.plan("auto")
        assert expected(found) <= expected(best) + tolerance + 1e-3
        assert found.state_bytes <= best.state_bytes
        slightly_less = found.settings["memory_budget"] - 2 * (source.reference_bytes >> 10)
        if slightly_less >= cheapest.state_bytes:
            assert expected(source.plan(slightly_less)) > expected(best) + tolerance - 1e-3


def test_newton_schulz_is_left_out_where_it_would_dominate_a_step():
    model = Net(width=256)
    large, small = (planner(model, tokens=tokens).plan(0.5) for tokens in (1 << 20, 64))

    def orthogonalised(plan: Plan) -> int:
        return sum(b.numel for b in plan.blocks if b.configuration.mechanism_name in ("muon", "normuon", "spectral"))

    assert orthogonalised(large) > 4 * orthogonalised(small)
    assert small.settings["time"] <= 2.0
    assert orthogonalised(planner(model, tokens=64).plan(0.5, math.inf)) == orthogonalised(large)


def test_vectors_keep_adamw32_in_the_cheapest_plan_too():
    """One of them is long enough, and one has the shape, for another state to be smaller."""
    shapes = {"position": (1, 65, 128), "bias": (32, 4), "hidden.weight": (256, 256)}
    roles = {"position": Role.VECTOR, "bias": Role.EMBEDDING, "hidden.weight": Role.MATRIX}
    plan = Planner(shapes, None, Hyper(lr=1e-3), facts=Facts(roles)).plan(0.0)
    assert {name: plan.block_of(name).configuration.alias for name in shapes} == {
        "position": "adamw-32",
        "bias": "adamw-32",
        "hidden.weight": "spectral",
    }
    assert plan.settings["expected_loss"] < 10


def test_what_nobody_measured_is_a_last_resort():
    source = planner(Net(), candidates=("adamw-32", "lion-8", "sgdwm-8"))
    assert {b.configuration.alias for b in source.plan(2.0).blocks} == {"adamw-32"}
    assert source.plan(0.3).state_bytes <= 0.3 * source.reference_bytes


# ---- the same everywhere ----


def test_a_saved_profile_plans_as_the_run_it_came_from(tmp_path):
    model = Net()
    optimizer = BAOC(model, lr=1e-3, memory=2.0, warmup=3)
    for step in range(4):
        words = torch.randint(200, (4, 16), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.profile is not None and optimizer.profile.facts.tokens == 64
    optimizer.profile.save(tmp_path / "a.profile")
    from baoc.profiling.profile import Profile

    again = make_plan(Profile.load(tmp_path / "a.profile"), memory=2.0)
    for name, block in again.by_parameter:
        assert block.configuration == optimizer.plan.block_of(name).configuration
    assert again.settings["regime"] == "scratch" and again.settings["tokens"] == 64


# ---- the optimizer ----


@pytest.mark.parametrize("memory", [0.0, 0.03, 0.1, 0.5, "auto"])
def test_any_budget_trains_within_it_from_the_first_step(memory):
    model = Net()
    optimizer = BAOC(model, lr=3e-3, memory=memory, warmup=4)
    # what is good enough may depend on the tokens of a step, which are counted in the first
    allowed = max(planner(Net(), tokens=tokens).budget(memory) for tokens in (None, 8 * 16))
    losses = []
    for step in range(20):
        words = torch.randint(200, (8, 16), generator=torch.Generator().manual_seed(step % 3))
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        assert state_bytes(optimizer) <= allowed
    assert losses[-1] < 0.8 * losses[0]


def test_the_plan_is_told_in_80_columns():
    text = str(planner(Net(layers=8)).plan(0.15))
    assert max(map(len, text.splitlines())) <= 80
    assert "loss against AdamW32, from scratch, from" in text


def test_tokens_are_counted_once_and_the_hooks_are_gone():
    model = Net()
    optimizer = BAOC(model, lr=1e-3, memory=0.5, warmup=2)
    with torch.no_grad():
        model(torch.zeros(7, 7, dtype=torch.long))  # an evaluation does not count
    for _ in range(2):  # but both halves of an accumulated step do
        model(torch.zeros(4, 16, dtype=torch.long)).sum().backward()
    optimizer.step()
    assert optimizer.plan.settings["tokens"] in (128, 4096)  # the plan may not change
    assert optimizer._facts.tokens == 128
    assert not any(module._forward_hooks for module in model.modules())


def test_a_convolution_counts_its_pixels():
    model = ConvNet()
    counter = TokenCounter(model)
    model(torch.zeros(2, 3, 8, 8))
    found = counter.stop()
    sizes = [64 * 27, 96 * 64 * 9]
    assert found == round((2 * 36 * sizes[0] + 2 * 16 * sizes[1]) / sum(sizes))


# ---- the regime ----


def test_trained_weights_are_told_from_fresh_ones():
    model = Net()
    assert Facts.of(model).regime == "scratch" == Facts.of(nn.Linear(64, 64)).regime
    optimizer = BlockOptimizer(model, lr=1e-2)
    for step in range(30):
        words = torch.randint(200, (8, 16), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(words).flatten(0, 1), (words * 7 % 200).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert Facts.of(model).regime == "finetune"
    plan = BAOC(model, lr=1e-3).plan
    assert plan.settings["regime"] == "finetune" and "in fine-tuning" in str(plan)
    assert BAOC(model, lr=1e-3, regime="scratch").plan.settings["regime"] == "scratch"


def test_a_resumed_run_stays_what_it_was():
    model = Net()
    optimizer = BAOC(model, lr=1e-2, warmup=30)
    for step in range(20):
        words = torch.randint(200, (8, 16), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(words).flatten(0, 1), (words * 7 % 200).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert Facts.of(model).regime == "finetune", "the test proves nothing"
    resumed = BAOC(model, lr=1e-2, warmup=30)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.replan().settings["regime"] == "scratch"


# ---- the table ----


def test_the_table_that_ships_knows_both_regimes_and_where_it_comes_from():
    table = Table.load()
    assert set(table.effects) == {"scratch", "finetune"} and "python -m experiments" in table.provenance
    for roles in table.effects.values():
        assert {Role.MATRIX, Role.EMBEDDING} <= set(roles)
        assert all(parse("adamw-32") in known for known in roles.values())
    assert any(effect.runs >= 3 for effect in table.effects["scratch"][Role.MATRIX].values())


def test_a_table_survives_its_file(tmp_path):
    table = Table.load()
    table.save(tmp_path / "table.json")
    assert Table.load(tmp_path / "table.json") == Table.from_json(table.to_json())
    assert planner(Net(), table=str(tmp_path / "table.json")).plan(0.3) == planner(Net()).plan(0.3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no .format."),
        ('{"format": "baoc.risk-table", "version": 9}', "version 9"),
        ('{"format": "baoc.risk-table", "version": 1}', "damaged"),
        ('{"format": "baoc.risk-table", "version": 1, "effects": {"later": {}}}', "regime 'later'"),
        ('{"format": "baoc.risk-table", "version": 1, "effects": {"scratch": {"matrx": {}}}}', "damaged"),
        (
            '{"format": "baoc.risk-table", "version": 1, "effects": {"scratch": {"matrix": {"sgd": {"loss": NaN}}}}}',
            "not a number",
        ),
    ],
)
def test_bad_tables_are_refused(text, message, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(TableError, match=message):
        Table.load(path)


def test_a_better_table_makes_another_plan(tmp_path):
    """The planner believes what was measured: here, that Muon hurts."""
    known = {parse(name): Effect(loss) for name, loss in (("adamw-8", 0.0), ("muon-8", 3.0), ("adamw-32", 0.0))}
    Table({"scratch": {Role.MATRIX: known, Role.EMBEDDING: known}}).save(tmp_path / "mine.json")
    chosen = {b.configuration.alias for b in planner(Net(), table=str(tmp_path / "mine.json")).plan(0.6).blocks}
    assert "muon-8" not in chosen and "adamw-8" in chosen


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


def test_a_plan_says_how_it_was_judged_in_its_file():
    settings = json.loads(planner(Net()).plan(0.3).to_json())["settings"]
    assert settings["space"] == "measured" and settings["expected_from_runs"] > 0


def test_a_budget_below_the_vectors_names_the_smallest():
    source = planner(Net())
    with pytest.raises(PlanError, match=f"needs {source.least_bytes()} B"):
        source.plan(1000)


def test_a_profile_without_facts_is_planned_by_names():
    model = Net()
    seen = profile(model, lambda m, b: m(b).square().mean(), [torch.zeros(2, 4, dtype=torch.long)], steps=2)
    assert make_plan(seen, 0.3).block_of("embed.weight").configuration.mechanism_name in ("adamw", "colnorm", "rownorm")


def test_bare_parameters_are_planned_by_their_places():
    """As some trainers pass them: an embedding must not be taken for a hidden matrix."""
    model = Net()
    plan = BAOC(model.parameters(), lr=1e-3, memory=0.3).plan
    order = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    for name in ("embed.weight", "head.weight"):
        assert plan.block_of(f"0.{order[name]}").configuration.mechanism_name in ("adamw", "colnorm", "rownorm")
    assert plan.block_of(f"0.{order['layers.1.up.weight']}").configuration.mechanism_name in ("muon", "spectral")

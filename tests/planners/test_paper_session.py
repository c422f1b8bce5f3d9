"""The warm-up of ``PaperPlanner``: what it runs on, how long it takes, what it keeps, and how it resumes."""

from __future__ import annotations

import dataclasses
import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baoc import (
    BAOC,
    Budget,
    GradientStatistics,
    ModelFacts,
    PaperPlanner,
    Plan,
    PlanError,
    StatisticsError,
    parse,
    state_bytes,
)
from baoc.plan import make_plan, measure_updates, measured_times
from baoc.planners.base import Progress
from baoc.planners.paper.planner import PaperSession
from baoc.planners.paper.risk import Anchors
from baoc.planners.paper.times import UpdateTimes

WARMUP, WORDS, WIDTH = 6, 200, 64
TIME = 100.0  # no plan is so slow


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        for _ in range(2)
    ]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))


def backward(model: nn.Module, step: int) -> None:
    words = torch.randint(WORDS, (32,), generator=torch.Generator().manual_seed(step))
    model.zero_grad()
    nn.functional.cross_entropy(model(words), (7 * words) % WORDS).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()


def baoc(model: nn.Module, memory: Any = 0.5, **settings: Any) -> BAOC:
    planner = PaperPlanner(**{"warmup": WARMUP, "time": TIME} | settings)
    return BAOC(model, lr=3e-3, memory=memory, planner=planner, verbose=False)


# ---- what the warm-up runs on ----


@pytest.mark.parametrize("memory", [0.3, 0.6, "auto"])
def test_the_warmup_runs_on_adamw16_and_the_plan_holds_the_budget(memory: Any) -> None:
    model = make_model()
    optimizer = baoc(model, memory)
    reference = optimizer.plan.reference_bytes
    for step in range(WARMUP):
        assert optimizer.is_warming_up
        assert {block.configuration for block in optimizer.plan.blocks} == {parse("adamw-16")}
        assert optimizer.plan.state_bytes == reference
        train(model, optimizer, range(step, step + 1))
    assert not optimizer.is_warming_up and optimizer.plan.settings["warmup_steps"] == WARMUP
    assert state_bytes(optimizer) == optimizer.plan.state_bytes
    assert memory == "auto" or state_bytes(optimizer) <= memory * reference


@pytest.mark.parametrize("memory", [0.15, 0.5, 1.0])
@pytest.mark.parametrize("replan_every", [None, 4])
def test_a_warmup_within_the_budget_holds_it_from_the_first_step_with_its_samples(
    memory: float, replan_every: int | None
) -> None:
    model = make_model()
    optimizer = baoc(model, memory, warmup_base="budget", replan_every=replan_every)
    budget = memory * optimizer.plan.reference_bytes
    assert optimizer._run.session.nbytes > 0
    for step in range(WARMUP):
        assert optimizer.is_warming_up
        assert optimizer.plan.state_bytes + optimizer._run.session.nbytes <= budget
        assert state_bytes(optimizer) <= budget
        train(model, optimizer, range(step, step + 1))
    train(model, optimizer, range(WARMUP, WARMUP + 5))
    assert state_bytes(optimizer) == optimizer.plan.state_bytes <= budget


def test_samples_take_nothing_from_the_plans_budget() -> None:
    """Neither the budget of Eq. 2 nor StateMem depends on s, whether or not sampling goes on."""
    for replan_every in (None, 3):
        found = []
        for ratio in (0.001, 0.5):
            model = make_model()
            optimizer = baoc(model, 0.5, sample_ratio=ratio, replan_every=replan_every)
            train(model, optimizer, range(WARMUP + 4))
            assert optimizer.metrics()["state_bytes"] == state_bytes(optimizer) == optimizer.plan.state_bytes
            assert optimizer.metrics().get("planner_bytes", 0.0) == optimizer._run.session.nbytes
            found.append(optimizer.plan.settings["memory_budget"])
        assert found[0] == found[1] == int(0.5 * optimizer.plan.reference_bytes)


@pytest.mark.parametrize("inherit", [True, False])
def test_online_plans_inherit_state_or_restart_it(inherit: bool) -> None:
    """App. D. The first plan takes over the state of the warm-up in any case."""
    model = make_model()
    optimizer = baoc(model, 0.5, replan_every=4, inherit=inherit)
    train(model, optimizer, range(WARMUP))
    first = optimizer.plan
    assert max(ages(optimizer)) == WARMUP
    another = optimizer._run.settings.changed(memory=0.2)  # so that the next plan differs
    optimizer._run = optimizer._run.changed(settings=another)
    train(model, optimizer, range(WARMUP, WARMUP + 4))
    assert optimizer.plan.state_bytes < first.state_bytes
    assert max(ages(optimizer)) == (WARMUP + 4 if inherit else 0)
    train(model, optimizer, range(WARMUP + 4, WARMUP + 6))


def ages(optimizer: BAOC) -> list[int]:
    found = [int(value) for state in optimizer.state.values() for key, value in state.items() if key.endswith(".age")]
    return found or [0]


# ---- times ----


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The measurements that were made."""
    made = []

    def counted(*args: Any) -> UpdateTimes:
        made.append(args)
        return measure_updates(*args)

    monkeypatch.setattr("baoc.plan.measure_updates", counted)
    return made


def test_times_are_measured_once_and_kept_in_plan_and_checkpoint(calls: list[Any]) -> None:
    model = make_model()
    optimizer = baoc(model, 0.5, times="measure", replan_every=3)
    train(model, optimizer, range(WARMUP))
    kept = optimizer.plan.settings["times"]
    assert len(calls) == 1 and kept["device"] == "cpu" and len(kept["seconds"]) > 2
    train(model, optimizer, range(WARMUP, WARMUP + 3))
    resumed = baoc(model, 0.5, times="measure", replan_every=3)
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    train(model, resumed, range(WARMUP + 3, WARMUP + 9))
    assert resumed.plan.settings["times"] == kept and resumed.plan.settings["warmup_steps"] == WARMUP + 9
    assert len(calls) == 1


def test_a_run_that_resumes_in_its_warmup_measures_at_its_end(calls: list[Any]) -> None:
    model = make_model()
    optimizer = baoc(model, 0.5, times="measure")
    train(model, optimizer, range(WARMUP - 2))
    resumed = baoc(model, 0.5, times="measure")
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    assert not calls, "before the end of the warm-up"
    train(model, resumed, range(WARMUP - 2, WARMUP + 2))
    assert len(calls) == 1 and resumed.plan.settings["times"]["device"] == "cpu"


def test_a_resumed_run_plans_again_with_its_old_times(calls: list[Any], tmp_path: Path) -> None:
    """Also where samples are gone, and the next plan is made on request from saved statistics."""
    model = make_model()
    optimizer = baoc(model, 0.5, times="measure")
    train(model, optimizer, range(WARMUP))
    optimizer.statistics.save(tmp_path / "a.stats")
    resumed = baoc(model, 0.5, times="measure")
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    resumed.replan(statistics=GradientStatistics.load(tmp_path / "a.stats"))
    assert resumed.plan == optimizer.plan and len(calls) == 1
    train(model, resumed, range(WARMUP, WARMUP + 2))
    assert resumed.plan == optimizer.plan and len(calls) == 1


def test_other_times_are_never_measured(calls: list[Any]) -> None:
    ratios = {str(candidate): 1.0 for candidate in PaperPlanner().candidates}
    for times in ("gpu", ratios):
        model = make_model()
        optimizer = baoc(model, 0.5, times=times, replan_every=2)
        train(model, optimizer, range(WARMUP + 4))
        assert optimizer.plan.settings["times"] == times
    assert optimizer.plan.settings["time"] == 1.0 and not calls


def test_a_plan_apart_from_training_measures_and_the_planner_alone_does_not(calls: list[Any]) -> None:
    model = make_model()
    optimizer = baoc(model, 0.5)
    train(model, optimizer, range(WARMUP))
    planner = PaperPlanner(times="measure", time=TIME)
    with pytest.raises(PlanError, match=r"times='measure' must be measured first"):
        planner.plan(optimizer.statistics, ModelFacts.of(model), Budget(0.5))
    plan = make_plan(optimizer.statistics, 0.5, planner=planner)
    assert len(calls) == 1 and plan.settings["times"]["device"] == "cpu"


def test_measured_times_come_from_a_file(tmp_path: Path) -> None:
    facts = ModelFacts.of(make_model())
    measured_times(PaperPlanner(), facts, torch.device("cpu")).save(tmp_path / "times.json")
    planner = PaperPlanner(times=str(tmp_path / "times.json"), warmup=2, time=TIME)
    assert planner == PaperPlanner(times=tmp_path / "times.json", warmup=2, time=TIME)
    assert planner == dataclasses.replace(planner, times=dataclasses.asdict(planner.times))  # as a checkpoint has it
    model = make_model()
    optimizer = BAOC(model, memory=0.5, planner=planner, verbose=False)
    train(model, optimizer, range(2))
    assert optimizer.plan.settings["times"]["seconds"] == planner.times.seconds
    other = nn.Linear(3, 5)
    with pytest.raises(PlanError, match=r"no time of adamw-32 for the unit .* of shapes 5x3"):
        BAOC(other, memory=0.5, planner=planner, verbose=False)


def test_the_ratio_of_a_block_is_the_ratio_of_its_units_sums() -> None:
    seconds = {"8x8": {"adamw[m=bf16,v=bf16]": 2.0, "sgd": 1.0}, "8": {"adamw[m=bf16,v=bf16]": 1.0, "sgd": 1.0}}
    units = [{"w": (8, 8)}, {"b": (8,)}]
    found = UpdateTimes("cpu", seconds).ratios([units, units[:1], [{"e": (0,)}]], [parse("sgd"), parse("adamw-16")])
    assert found.tolist() == [[2 / 3, 1.0], [0.5, 1.0], [1.0, 1.0]]


def test_the_warmup_can_run_on_any_configuration_or_plan() -> None:
    model = make_model()
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    for base in ("adamw-8", parse("adamw-8"), Plan.uniform("adamw-8", shapes)):
        assert {block.configuration.alias for block in baoc(model, warmup_base=base).plan.blocks} == {"adamw-8"}


@pytest.mark.parametrize("base", ["adamw-16", "budget"])
def test_a_budget_that_no_plan_fits_is_refused_before_the_warmup(base: str) -> None:
    """With the smallest share that fits, at which the run trains and plans."""
    settings = {"forbid": "sgd*", "warmup_base": base}
    with pytest.raises(PlanError, match=r"no plan fits memory=0\.001: ") as caught:
        baoc(make_model(), 0.001, **settings)
    found = re.search(r"the smallest needs (\d+) B, ([\d.]+)% of AdamW16's state", str(caught.value))
    assert found is not None
    share = float(found[2]) / 100
    with pytest.raises(PlanError, match="no plan fits memory="):
        baoc(make_model(), share - 2e-4, **settings)
    model = make_model()
    optimizer = baoc(model, share, **settings)
    train(model, optimizer, range(WARMUP))
    assert not optimizer.is_warming_up and state_bytes(optimizer) <= share * optimizer.plan.reference_bytes


def test_the_papers_candidates_fit_any_share() -> None:
    """SGD has no state. So only constraints, fewer candidates or times make a share too small."""
    assert PaperPlanner().problem(ModelFacts.of(make_model())).least_bytes() == 0
    model = make_model()
    optimizer = baoc(model, 1e-9)
    train(model, optimizer, range(WARMUP))
    assert state_bytes(optimizer) == 0


def test_the_warmup_starts_where_the_budget_is_all_but_spent_on_samples() -> None:
    """Samples are not part of the budget while the warm-up itself exceeds it."""
    optimizer = baoc(make_model(), 0.01, sample_ratio=1.0)
    assert optimizer._run.session.nbytes > 0.01 * optimizer.plan.reference_bytes


# ---- its samples ----


def test_samples_are_dropped_once_the_plan_is_made() -> None:
    model = make_model()
    optimizer = baoc(model)
    train(model, optimizer, range(WARMUP))
    assert optimizer._run.session.nbytes == 0 and not optimizer._run.session.is_watching
    assert optimizer.statistics.steps == WARMUP, "what they said is kept"


def test_samples_stay_for_the_next_plan() -> None:
    model = make_model()
    optimizer = baoc(model, replan_every=4)
    held = optimizer._run.session.nbytes
    steps = []
    for step in range(WARMUP + 9):
        train(model, optimizer, range(step, step + 1))
        steps.append(optimizer.plan.settings.get("warmup_steps", 0))
        assert optimizer._run.session.nbytes == held > 0
    assert steps == [0] * (WARMUP - 1) + [WARMUP] * 4 + [WARMUP + 4] * 4 + [WARMUP + 8] * 2


# ---- sessions ----


def session(model: nn.Module, **settings: Any) -> tuple[PaperSession, dict[str, Tensor], ModelFacts]:
    planner = PaperPlanner(**{"warmup": WARMUP, "time": TIME} | settings)
    params, facts = dict(model.named_parameters()), ModelFacts.of(model)
    return planner.start(params, facts), params, facts


def observe(model: nn.Module, sessions: list[PaperSession], steps: range) -> None:
    params = dict(model.named_parameters())
    for step in steps:
        backward(model, step)
        for each in sessions:
            each.observe(params)


@pytest.mark.parametrize(
    ("progress", "settings", "due"),
    [
        (Progress(WARMUP - 1), {}, False),
        (Progress(WARMUP), {}, True),
        (Progress(1000, planned_at=WARMUP), {}, False),
        (Progress(WARMUP + 3, planned_at=WARMUP), {"replan_every": 4}, False),
        (Progress(WARMUP + 4, planned_at=WARMUP), {"replan_every": 4}, True),
        (Progress(2 * WARMUP - 1, planned_at=WARMUP, failed=True), {}, False),
        (Progress(2 * WARMUP, planned_at=WARMUP, failed=True), {}, True),
    ],
)
def test_a_plan_is_due_after_the_warmup_and_then_as_often_as_asked(
    progress: Progress, settings: dict[str, Any], due: bool
) -> None:
    made, params, facts = session(make_model(), **settings)
    assert made.is_due(progress, params, facts) is due


def test_without_a_step_there_is_nothing_to_plan_from() -> None:
    made, params, facts = session(make_model())
    with pytest.raises(StatisticsError, match="no gradient statistics"):
        made.plan(params, facts, Budget(0.5))


def through_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_resumed_session_makes_the_same_plan(steps: int) -> None:
    model = make_model()
    first, params, facts = session(model)
    observe(model, [first], range(steps))
    resumed, *_ = session(model)
    resumed.load_state_dict(through_file(first.state_dict()), params)
    assert resumed.nbytes == first.nbytes and resumed.is_watching
    observe(model, [first, resumed], range(steps, steps + 3))
    plans = [each.plan(params, facts, Budget(0.4)) for each in (first, resumed)]
    assert plans[0].to_json() == plans[1].to_json()
    assert plans[0].settings["warmup_steps"] == steps + 3


def test_a_session_that_has_dropped_its_samples_stays_without_them() -> None:
    model = make_model()
    first, params, facts = session(model)
    observe(model, [first], range(3))
    first.planned(Plan.uniform("sgd", facts.shapes))
    resumed, *_ = session(model)
    resumed.load_state_dict(through_file(first.state_dict()), params)
    assert first.nbytes == resumed.nbytes == 0 and not resumed.is_watching


def test_parameters_may_have_other_names_in_the_run_that_resumes() -> None:
    model = make_model()
    first, params, facts = session(model)
    observe(model, [first], range(3))
    renamed = {f"module.{name}": param for name, param in params.items()}
    resumed, *_ = session(model)
    resumed.load_state_dict(first.state_dict(), renamed)
    shapes = {f"module.{name}": shape for name, shape in facts.shapes.items()}
    roles = {f"module.{name}": role for name, role in facts.roles.items()}
    again = resumed.plan(renamed, dataclasses.replace(facts, shapes=shapes, roles=roles), Budget(0.4))
    expected = first.plan(params, facts, Budget(0.4))
    for name, block in expected.by_parameter:
        assert again.block_of(f"module.{name}").configuration == block.configuration


# ---- the end of the warm-up ----


def test_the_warmup_ends_once_diagnostics_are_stable() -> None:
    """They are looked at every ten steps, and compared with ten steps before."""

    def planned_after(stable_within: float | None, steps: int) -> int:
        model = make_model()
        optimizer = baoc(model, warmup=45, stable_within=stable_within)
        for step in range(steps):
            train(model, optimizer, range(step, step + 1))
            if not optimizer.is_warming_up:
                return step + 1
        return steps + 1

    assert planned_after(1e6, 45) == 20
    assert planned_after(1e-12, 45) == planned_after(None, 45) == 45


def test_stability_goes_on_where_a_checkpoint_was_written() -> None:
    model = make_model()
    first, params, facts = session(model, warmup=50, stable_within=1e6)
    observe(model, [first], range(10))
    assert not first.is_due(Progress(10), params, facts)
    resumed, *_ = session(model, warmup=50, stable_within=1e6)
    resumed.load_state_dict(through_file(first.state_dict()), params)
    observe(model, [first, resumed], range(10, 20))
    assert first.is_due(Progress(20), params, facts) and resumed.is_due(Progress(20), params, facts)
    forgetful, *_ = session(model, warmup=50, stable_within=1e6)
    observe(model, [forgetful], range(20))
    assert not forgetful.is_due(Progress(20), params, facts), "it has nothing to compare with"


# ---- settings ----

BAD = {
    "low_bits": ["4", 8, None],
    "warmup": [0, -1, 2.5, True, None, "50"],
    "seed": [-1, 0.5, None],
    "sample_floor": [-1, 1.5],
    "replan_every": [0, -3, 1.5, True],
    "beta_m": [1.0, -0.1, "0.9"],
    "beta_v": [1.0, math.nan],
    "beta_rho": [1.0, -0.5, None],
    "bias_correction": [1, None],
    "epsilon": [0.0, -1e-12, math.inf],
    "inherit": [0, "no"],
    "times": [
        *(3, None, "slow", Path("slow"), __file__, {"adamw-8": 1.0}, {"adamw-99": 1.0}, {5: 1.0}),
        *({"sgd": ratio} for ratio in (-1.0, 0.0, math.nan, math.inf, "1", True)),
        *({"device": "cpu", "seconds": seconds} for seconds in (None, {"8": 3}, {"8": {"sgd": 0.0}})),
    ],
    "tau": [-0.1, 1.5, math.nan, "0.5"],
    "snr": ["sometimes", None, True],
    "diagnostic_weights": [{"speed": 1.0}, [1.0, 2.0], {"decay": -1.0}, 3],
    "time": [0.0, -1.0, math.nan, "fast", None, True],
    "granularity": ["fine", None],
    "sample_ratio": [0.0, -0.1, 1.5, math.nan, "1%"],
    "quantile": [-0.1, 1.1, math.nan],
    "min_share": [-0.1, 1.1, math.inf, "1%"],
    "gamma": [-0.1, math.nan],
    "preference": [-1.0, math.inf],
    "stable_within": [0.0, -0.1, math.nan],
    "warmup_base": ["adamw-99", "nothing", None, 3],
    "candidates": [(), ("adamw-99",), None, (3,)],
    "risk": ["papper", 3],
    "anchors": [3, {"anisotropy": (2.0, 1.0)}, {"stability": 3}, {"speed": (0.0, 1.0)}, {"snr": (0.0, math.nan)}],
    "weights": [{"speed": 1.0}, {"decay": -1.0}, {"decay": "x"}, [1.0] * 5, "adaptive"],
    "forbid": [3, [3], {"head": 3}, {3: "sgd"}, "lamb*", {"head": ["sgd*", "lamb"]}],
    "prefer": [3, [None], "lamb*", "muon*"],
    "lr_match": ["rms", 1, None],
}
PATTERN = {"time": "time must be a positive ratio"}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_settings_are_refused_by_name_when_the_planner_is_built(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=PATTERN.get(name, name)):
        PaperPlanner(**{name: value})


def test_every_setting_is_in_the_table_of_bad_values() -> None:
    assert set(BAD) == {field.name for field in dataclasses.fields(PaperPlanner)}


def test_settings_are_frozen_and_by_keyword_only() -> None:
    planner = PaperPlanner()
    with pytest.raises(dataclasses.FrozenInstanceError):
        planner.warmup = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        PaperPlanner(50)  # type: ignore[misc]
    assert planner == PaperPlanner(warmup=50, warmup_base="adamw-16", anchors=Anchors())

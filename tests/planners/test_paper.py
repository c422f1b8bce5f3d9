"""``PaperPlanner``: the allocation problem of Eq. 2, its blocks and risks, and the warm-up that it plans from."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from baoc import (
    CATALOG,
    BlockOptimizer,
    Budget,
    Configuration,
    GradientStatistics,
    ModelFacts,
    PaperPlanner,
    Plan,
    PlanError,
    make_plan,
    parse,
    state_bytes,
)
from baoc.core.budget import memory_budget
from baoc.core.configuration import BUDGET_REFERENCE
from baoc.core.spec import Hyper
from baoc.planners import cost
from baoc.planners.paper import risk as risks
from baoc.planners.paper.metrics import Metrics
from baoc.planners.paper.problem import PAPER, PaperProblem
from baoc.planners.paper.sampling import Sampler

WIDTH, WORDS = 64, 100
HYPER = Hyper(lr=1e-3, weight_decay=0.1)
GRANULARITIES = ("coarse", "layer", "module", "tensor", "refined")


def made_up_times(blocks: Sequence[Mapping[str, Any]], configurations: Sequence[Configuration]) -> Any:
    """Times that stand against memory: 16 bits take 1, 8 bits 1.5, fp32 1.2, stateless 0.5."""
    row = [{32: 1.2, 16: 1.0, 8: 1.5}[c.switches.bits] if c.mechanism.slots else 0.5 for c in configurations]
    return np.tile(row, (len(blocks), 1))


@pytest.fixture(scope="module", autouse=True)
def _times_that_bind() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cost, "update_ratios", made_up_times)
        yield


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH)})
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn["qkv"](self.norm(x)).chunk(3, -1)
        x = x + self.attn["out"](nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.mlp(x)


class Transformer(nn.Module):
    """With a module that no gradient ever reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


@functools.cache
def statistics(steps: int = 12) -> GradientStatistics:
    network = model()
    params = dict(network.named_parameters())
    sampler, optimizer = Sampler(params, floor=1024), torch.optim.AdamW(network.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        words = torch.randint(WORDS, (4, 16), generator=generator)
        network.zero_grad()
        nn.functional.cross_entropy(network(words).flatten(0, 1), (3 * words % WORDS).flatten()).backward()
        sampler.observe(params)
        optimizer.step()
    return GradientStatistics.from_sampler(sampler, params, ModelFacts.of(network, HYPER))


def planner(**settings: Any) -> PaperPlanner:
    """All of the paper's tuples, with risks that gradients decide."""
    return PaperPlanner(**{"risk": "update", "candidates": CATALOG, "time": 1.4, "lr_match": True} | settings)


def problem(**settings: Any) -> PaperProblem:
    return PaperProblem(planner(**settings), statistics().model, statistics())


def prior(**settings: Any) -> PaperProblem:
    """The problem before any gradient was seen."""
    return PaperProblem(planner(**settings), statistics().model, None)


@pytest.fixture(scope="module")
def default() -> PaperProblem:
    return problem()


@pytest.fixture(scope="module")
def modules() -> PaperProblem:
    return problem(granularity="module")


@pytest.fixture(scope="module")
def untimed() -> PaperProblem:
    return problem(granularity="module", time=math.inf)


def configurations(made: Plan) -> dict[str, str]:
    return {block.name: str(block.configuration) for block in made.blocks}


def risk_of(made: Plan) -> float:
    return float(made.settings["objective"])


# ---- budgets ----

BUDGETS = (0.0, 0.01, 0.03, 0.1, 0.21, 0.33, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4097, 100_001, "40%", "0.1MiB")


@pytest.mark.parametrize("memory", BUDGETS, ids=repr)
@pytest.mark.parametrize("granularity", ["refined", "module"])
def test_the_budget_is_kept_to_the_byte(
    memory: float | str, granularity: str, default: PaperProblem, modules: PaperProblem
) -> None:
    source = default if granularity == "refined" else modules
    made = source.plan(Budget(memory))
    assert made.state_bytes <= memory_budget(memory, source.reference_bytes) == made.settings["memory_budget"]
    column = [CATALOG.index(block.configuration) for block in made.blocks]
    assert made.state_bytes == source.memory[np.arange(len(column)), column].sum()
    assert source.time[np.arange(len(column)), column].mean() == pytest.approx(made.settings["time"], abs=1e-4)


@pytest.mark.parametrize("reserved", [1, 1000, 30_000])
def test_what_is_reserved_is_not_spent(reserved: int, modules: PaperProblem) -> None:
    made = modules.plan(Budget(0.5, reserved=reserved))
    assert made.state_bytes + reserved <= 0.5 * modules.reference_bytes
    assert made.settings["memory_budget"] == int(0.5 * modules.reference_bytes) - reserved


@pytest.mark.parametrize("memory", [0.1, 0.5, 1.0])
def test_the_optimizer_holds_what_the_plan_promises(memory: float, default: PaperProblem) -> None:
    made = default.plan(Budget(memory))
    optimizer = BlockOptimizer(model(), plan=made, lr=1e-3)
    assert state_bytes(optimizer) == made.state_bytes <= memory * default.reference_bytes


def test_a_budget_that_is_exactly_met_is_enough(modules: PaperProblem) -> None:
    made = modules.plan(Budget(0.4))
    again = modules.plan(Budget(made.state_bytes))
    assert configurations(again) == configurations(made)
    assert risk_of(modules.plan(Budget(made.state_bytes - 1))) >= risk_of(made)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_less_memory_never_means_less_risk(granularity: str) -> None:
    source = problem(granularity=granularity)
    shares = (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.8, 1.2, 2.0)
    found = [risk_of(source.plan(Budget(share))) for share in shares]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1] >= risk_of(source.plan(Budget("auto")))


def test_with_room_for_all_every_block_has_its_least_risk(untimed: PaperProblem) -> None:
    for memory in (10.0, "auto"):
        made = untimed.plan(Budget(memory))
        assert risk_of(made) == pytest.approx(untimed.cost.min(axis=1).sum())
        assert {block.why for block in made.blocks if block.name != "unused"} == {"least risk of all"}


@pytest.mark.parametrize("time", [0.6, 0.8, 1.0, 1.1, 1.3])
def test_the_time_budget_is_kept(time: float, untimed: PaperProblem) -> None:
    made = problem(granularity="module", time=time).plan(Budget(0.5))
    column = [CATALOG.index(block.configuration) for block in made.blocks]
    assert untimed.time[np.arange(len(column)), column].mean() <= time + 1e-9
    assert made.settings["time_budget"] == time
    assert risk_of(made) >= risk_of(untimed.plan(Budget(0.5)))


def test_a_time_budget_below_the_fastest_names_the_fastest() -> None:
    too_short = problem(granularity="module", time=0.4)
    message = r"no plan is within time=0\.4 of AdamW16's update time: the fastest needs 0\.5"
    with pytest.raises(PlanError, match=message):
        too_short.plan(Budget(0.5))
    assert too_short.time.min(axis=1).mean() == 0.5


def test_a_plan_without_a_time_limit_has_none_in_its_settings(untimed: PaperProblem) -> None:
    assert untimed.plan(Budget(0.5)).settings["time_budget"] is None


def test_the_bound_is_the_optimum_of_every_assignment(default: PaperProblem) -> None:
    """Of as many random assignments as fit, none has less risk than the plan's."""
    rng = np.random.default_rng(0)
    made = default.plan(Budget(0.4))
    rows = np.arange(len(default.blocks))
    fitting = 0
    for _ in range(2000):
        choice = rng.integers(len(CATALOG), size=len(rows))
        is_within = default.time[rows, choice].mean() <= 1.4
        if is_within and default.memory[rows, choice].sum() <= 0.4 * default.reference_bytes:
            fitting += 1
            assert default.cost[rows, choice].sum() >= made.settings["bound"] - 1e-9
    assert fitting > 10 and made.settings["bound"] <= risk_of(made) + 1e-9


def test_all_ways_to_ask_give_one_plan(default: PaperProblem) -> None:
    expected = default.plan(Budget("30%")).to_json()
    assert make_plan(statistics(), "30%", planner=planner()).to_json() == expected
    assert planner().plan(statistics(), statistics().model, Budget("30%")).to_json() == expected


def test_plans_need_gradients(default: PaperProblem) -> None:
    with pytest.raises(PlanError, match="PaperPlanner plans from gradient statistics"):
        make_plan(model(), 0.5, planner=planner())


# ---- infeasible budgets ----


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_an_infeasible_budget_names_the_smallest_and_that_one_is_feasible(granularity: str) -> None:
    source = problem(granularity=granularity, forbid=["sgd*"])
    with pytest.raises(PlanError, match=r"no plan fits memory=0\.001") as caught:
        source.plan(Budget(0.001))
    size = re.search(r"needs (\d+) B, ([\d.]+%) of AdamW16's state", str(caught.value))
    assert size is not None
    least = int(size[1])
    assert source.plan(Budget(least)).state_bytes == least == source.least_bytes()
    assert source.plan(Budget(size[2])).state_bytes >= least
    with pytest.raises(PlanError, match="no plan fits"):
        source.plan(Budget(least - 1))
    assert source.plan(Budget(0.0)).state_bytes == least


def test_the_smallest_budget_depends_on_the_time() -> None:
    """8 bits are smaller than 16 here, and slower."""
    settings = {"granularity": "module", "forbid": ["sgd*", "adafactor*", "*factored*"]}
    short, long = (problem(**settings, time=time) for time in (1.1, 1.6))
    least = long.least_bytes()
    assert short.least_bytes() > least
    with pytest.raises(PlanError, match=r"It would fit with time=[\d.]+ \(now 1\.1\)") as caught:
        short.plan(Budget(least))
    ratio = re.search(r"time=([\d.]+)", str(caught.value))
    assert ratio is not None
    assert problem(**settings, time=float(ratio[1])).plan(Budget(least)).state_bytes == least


def test_two_infeasible_budgets_are_a_plan_error() -> None:
    with pytest.raises(PlanError):
        problem(forbid="sgd*", time=0.1).plan(Budget(0.0))


# ---- patterns, candidates, risks ----


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("forbid", ["sgd*", ["sgd", "sgdw", "sgdm*", "sgdwm*"], {"*": "sgd*"}], ids=str)
def test_no_sgd_means_no_sgd(granularity: str, forbid: Any) -> None:
    made = problem(granularity=granularity, forbid=forbid, time=2.0).plan(Budget(0.06))
    assert not [name for name in configurations(made).values() if name.startswith("sgd")]
    free = problem(granularity=granularity, time=2.0).plan(Budget(0.01))
    assert [name for name in configurations(free).values() if name.startswith("sgd")], "the test proves nothing"


def test_forbidding_by_pattern_leaves_other_blocks_free(untimed: PaperProblem) -> None:
    assert set(configurations(untimed.plan(Budget(0.0))).values()) <= {"sgd", "sgdw"}
    forbid = {"*attn*": "sgd*", "embed": ["sgd*", "adafactor*"]}
    made = problem(granularity="module", forbid=forbid, time=2.0).plan(Budget(0.2))
    for name, chosen in configurations(made).items():
        assert "attn" not in name or not chosen.startswith("sgd")
        assert name != "embed" or not chosen.startswith(("sgd", "adafactor"))


def test_a_pattern_on_a_parameter_binds_its_whole_block() -> None:
    made = problem(granularity="coarse", forbid={"layers.1.mlp.0.bias": "sgd*"}, time=2.0).plan(Budget(0.1))
    assert not str(made.block_of("layers.0.norm.weight").configuration).startswith("sgd")


def test_brackets_in_patterns_are_not_special() -> None:
    forbidden = ["adamw[m=int8,v=int8]", "adafactor[v=*]"]
    made = problem(granularity="module", forbid=forbidden, time=2.0).plan(Budget(0.3))
    assert not [c for c in configurations(made).values() if c == forbidden[0] or c.startswith("adafactor")]


def test_a_preference_shifts_choices_and_its_strength_matters() -> None:
    wanted = "adamw[m=int8,v=int8]"

    def count(**settings: Any) -> int:
        made = problem(granularity="module", time=2.0, **settings).plan(Budget(0.6))
        return sum(chosen == wanted for chosen in configurations(made).values())

    plain, preferred = count(), count(prefer=wanted)
    assert plain < preferred
    assert count(prefer=wanted, preference=0.0) == plain
    assert preferred <= count(prefer="adamw-8", preference=50.0)


def test_preference_by_pattern_is_lambda_off_the_risk(modules: PaperProblem) -> None:
    source = problem(granularity="module", prefer={"*norm*": "adamw-32"}, preference=0.25)
    difference = modules.cost - source.cost
    for row, name in zip(difference, source.names):
        expected = [0.25 if "norm" in name and c == parse("adamw-32") else 0.0 for c in CATALOG]
        assert row == pytest.approx(expected)


@pytest.mark.parametrize("rule", ["forbid", "prefer"])
def test_patterns_that_match_nothing_are_errors(rule: str) -> None:
    with pytest.raises(PlanError, match=r"'\*embedding\*' names no block and no parameter.*Blocks: embed"):
        problem(**{rule: {"*embedding*": "sgd*"}})


def test_forbidding_everything_names_the_block() -> None:
    with pytest.raises(PlanError, match="every configuration is forbidden for block 'embed'"):
        problem(granularity="module", forbid={"embed": "*"}).plan(Budget(0.5))


def test_only_candidates_are_chosen() -> None:
    candidates = ("adamw-8", "sgdm-8", "sgd")
    made = problem(candidates=candidates, time=2.0).plan(Budget(0.3))
    assert {block.configuration for block in made.blocks} <= set(map(parse, candidates))


def test_the_default_candidates_are_the_papers() -> None:
    assert PaperPlanner().candidates == PAPER and len(PAPER) == 17
    assert {c.switches.bits for c in PAPER} == {32, 16, 8}


def only_bits(
    metrics: risks.BlockMetrics, configuration: Configuration, settings: risks.RiskSettings
) -> dict[str, float]:
    return {"bits": 1 - configuration.switches.bits / 32}


def test_a_risk_model_of_ones_own_by_name_and_as_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(risks, "RISKS", dict(risks.RISKS))
    risks.register_risk("only-bits")(only_bits)
    by_name, by_function = (problem(risk=risk, time=2.0).plan(Budget(0.0)) for risk in ("only-bits", only_bits))
    assert by_name == by_function
    with_signal = [block for block in by_name.blocks if block.name != "unused"]
    assert all(block.risk == {"bits": 0.0} and not block.state_bytes for block in with_signal)


def test_the_papers_risk_weights_and_anchors_reach_the_plan() -> None:
    source = problem(risk="paper", weights={"adaptive": 3.0}, gamma=0.2, granularity="module", time=math.inf)
    settings = risks.RiskSettings(weights={"adaptive": 3.0}, gamma=0.2, weight_decay=HYPER.weight_decay)
    for block in source.plan(Budget(0.05)).blocks:
        metrics = Metrics(statistics(), block.parameters, HYPER)
        if metrics.has_signal:
            assert block.risk == pytest.approx(risks.paper(metrics, block.configuration, settings), abs=1e-6)
    anchors = risks.Anchors(anisotropy=(50.0, 60.0))  # beyond any gradient's
    far = problem(anchors=anchors, granularity="module", time=math.inf).plan(Budget(0.0))
    assert all(block.risk.get("adaptive", 0.0) == 0 for block in far.blocks)
    near = problem(granularity="module", time=math.inf).plan(Budget(0.0))
    assert any(block.risk.get("adaptive", 0.0) > 0 for block in near.blocks)


# ---- blocks ----


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("source", [problem, prior], ids=["statistics", "prior"])
def test_every_parameter_is_in_exactly_one_block(granularity: str, source: Callable[..., PaperProblem]) -> None:
    made = source(granularity=granularity).plan(Budget(0.5))
    made.check(statistics().shapes)
    assert Counter(name for block in made.blocks for name in block.parameters) == Counter(list(statistics().shapes))


def test_finer_granularities_have_more_blocks() -> None:
    counts = [len(problem(granularity=g).blocks) for g in ("coarse", "layer", "module", "tensor")]
    assert counts == sorted(counts) and counts[0] < counts[-1] == len(statistics().shapes)
    assert 1 < len(problem().blocks) <= len(problem(granularity="module").blocks)


def test_refinement_has_its_two_knobs() -> None:
    assert len(problem(min_share=0.4).blocks) < len(problem().blocks)
    assert len(problem(quantile=0.0, min_share=0.0).blocks) > len(problem(quantile=1.0, min_share=0.0).blocks)


@pytest.mark.parametrize("memory", [0.3, 1.0, 3.0])
def test_a_block_without_signal_keeps_adamw_and_says_why(memory: float, untimed: PaperProblem) -> None:
    block = untimed.plan(Budget(memory)).block_of("unused.weight")
    assert block.name == "unused"
    assert block.configuration.mechanism_name == "adamw" and not block.configuration.switches.factored
    assert "no gradient in the warm-up: keeps AdamW" in block.why
    assert block.lr_scale == 1.0


def test_a_block_without_signal_that_lost_adamw_does_not_claim_to_keep_it(untimed: PaperProblem) -> None:
    block = untimed.plan(Budget(0.0)).block_of("unused.weight")
    assert block.configuration.mechanism_name != "adamw"
    assert "keeps AdamW" not in block.why


def test_reasons_name_what_would_be_better(untimed: PaperProblem) -> None:
    made = untimed.plan(Budget(0.4))
    reasons = 0
    for i, block in enumerate(made.blocks):
        best = CATALOG[int(np.argmin(untimed.cost[i]))]
        if block.name != "unused" and block.configuration != best:
            reasons += 1
            assert re.fullmatch(rf"{re.escape(best.alias)} risks \d+\.\d{{3}} less but needs .* more", block.why)
    assert reasons


def test_risks_in_the_plan_sum_to_the_objective(modules: PaperProblem) -> None:
    made = modules.plan(Budget(0.4))
    assert sum(sum(block.risk.values()) for block in made.blocks) == pytest.approx(risk_of(made), abs=1e-4)
    assert made.settings["warmup_steps"] == statistics().steps and made.settings["seed"] == statistics().seed


def test_names_of_a_compiled_model_can_be_planned() -> None:
    wrapped = {f"_orig_mod.{name}": param for name, param in model().named_parameters()}
    made = PaperProblem(planner(), ModelFacts.of(wrapped), None).plan(Budget(0.5))
    made.check(statistics().shapes)


# ---- learning rates ----


@pytest.mark.parametrize("memory", [0.0, 0.05, 0.2, 0.5, 1.0])
def test_lr_scales_match_the_rms_of_updates(memory: float, untimed: PaperProblem) -> None:
    for block in untimed.plan(Budget(memory)).blocks:
        mechanism = block.configuration.mechanism
        metrics = Metrics(statistics(), block.parameters, HYPER)
        if (mechanism.adaptive and mechanism.momentum) or not metrics.has_signal:
            assert block.lr_scale == 1.0
        else:
            ratio = metrics.update_rms(BUDGET_REFERENCE) / metrics.update_rms(block.configuration)
            assert block.lr_scale == pytest.approx(ratio, rel=1e-3)


def test_sgd_is_scaled_up_to_adams_step(untimed: PaperProblem) -> None:
    [scale] = [block.lr_scale for block in untimed.plan(Budget(0.0)).blocks if block.name == "layers.0.attn"]
    assert scale is not None and scale > 10, "its gradients are far below 1"


def test_without_lr_match_all_learning_rates_are_the_papers() -> None:
    assert PaperPlanner().lr_match is False
    made = problem(lr_match=False, time=2.0).plan(Budget(0.05))
    assert {block.lr_scale for block in made.blocks} == {1.0}


# ---- without gradients ----


def test_without_gradients_the_prior_decides() -> None:
    made = prior().plan(Budget(0.5))
    assert made.state_bytes <= 0.5 * made.reference_bytes
    assert {block.why for block in made.blocks} == {"no gradients seen yet: assumed to be like most blocks"}
    assert {block.lr_scale for block in made.blocks} == {1.0}
    assert made.settings["warmup_steps"] == 0 and made.settings["seed"] is None


def test_without_gradients_vectors_are_not_judged_by_their_structure() -> None:
    source = prior(granularity="tensor")
    for metrics, block in zip(source.metrics, source.blocks):
        [shape] = block.values()
        assert (metrics.structure_residual is None) == (len(shape) < 2)


# ---- many budgets ----


@pytest.mark.parametrize("granularity", ["module", "refined"])
def test_the_frontier_is_single_plans(granularity: str) -> None:
    source = problem(granularity=granularity)
    budgets = [int(share * source.reference_bytes) for share in (0.6, 0.1, 0.3, 1.0, 0.02)]
    plans = source.frontier(budgets)
    assert len(plans) == len(budgets)
    for nbytes, made in zip(budgets, plans):
        assert risk_of(made) == pytest.approx(risk_of(source.plan(Budget(nbytes))), abs=1e-9)
        assert made.state_bytes <= nbytes == made.settings["memory_budget"]
    assert source.frontier([]) == []


def test_the_frontier_leaves_out_budgets_that_no_plan_fits() -> None:
    source = problem(forbid="sgd*")
    least = source.least_bytes()
    assert [made.state_bytes for made in source.frontier([least - 1, least])] == [least]

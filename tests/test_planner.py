"""From a profile and a budget to a plan: what it promises, what it obeys, and how it refuses."""

from __future__ import annotations

import functools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from baoc import CATALOG, Block, BlockOptimizer, Configuration, Plan, PlanError, make_plan, parse, state_bytes
from baoc.core.budget import memory_budget
from baoc.core.configuration import REFERENCE
from baoc.core.spec import Hyper
from baoc.planning import cost
from baoc.planning import risk as risks
from baoc.planning.metrics import Metrics
from baoc.planning.planner import Planner
from baoc.planning.settings import Settings
from baoc.profiling.profile import Profile
from baoc.profiling.sampling import Sampler
from tests.training import shapes

WIDTH, WORDS = 64, 100
HYPER = Hyper(lr=1e-3, weight_decay=0.1)
GRANULARITIES = ("coarse", "layer", "module", "tensor", "refined")
DOCS = Path(__file__).parent.parent / "docs"


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
def profile(steps: int = 12) -> Profile:
    network = model()
    params = dict(network.named_parameters())
    sampler, optimizer = Sampler(params), torch.optim.AdamW(network.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        words = torch.randint(WORDS, (4, 16), generator=generator)
        network.zero_grad()
        nn.functional.cross_entropy(network(words).flatten(0, 1), (3 * words % WORDS).flatten()).backward()
        sampler.observe(params)
        optimizer.step()
    return Profile.from_sampler(sampler, params)


CATALOG_SPACE = {"space": "paper", "risk": "update", "candidates": CATALOG}
"""All of the paper's tuples, with risks that gradients decide."""


def planner(**settings: Any) -> Planner:
    return Planner(profile().shapes, profile(), HYPER, Settings(**CATALOG_SPACE | settings))


def prior(**settings: Any) -> Planner:
    return Planner(profile().shapes, None, HYPER, Settings(**CATALOG_SPACE | settings))


@pytest.fixture(scope="module")
def default() -> Planner:
    return planner()


@pytest.fixture(scope="module")
def modules() -> Planner:
    return planner(granularity="module")


def configurations(made: Plan) -> dict[str, str]:
    return {block.name: str(block.configuration) for block in made.blocks}


def risk_of(made: Plan) -> float:
    return float(made.settings["objective"])


# ---- budgets ----

BUDGETS = (
    0.0,
    0.01,
    0.03,
    0.1,
    0.21,
    0.33,
    0.5,
    0.75,
    1.0,
    1.5,
    2.0,
    3.0,
    0,
    1,
    4097,
    100_001,
    "40%",
    "0.1MiB",
)


@pytest.mark.parametrize("memory", BUDGETS, ids=repr)
@pytest.mark.parametrize("granularity", ["refined", "module"])
def test_the_budget_is_kept_to_the_byte(
    memory: float | str, granularity: str, default: Planner, modules: Planner
) -> None:
    source = default if granularity == "refined" else modules
    made = source.plan(memory, 1.4)
    budget = memory_budget(memory, source.reference_bytes)
    assert made.state_bytes <= budget == made.settings["memory_budget"]
    column = [CATALOG.index(block.configuration) for block in made.blocks]
    assert made.state_bytes == source.memory[np.arange(len(column)), column].sum()
    assert source.time[np.arange(len(column)), column].mean() == pytest.approx(made.settings["time"], abs=1e-4)


@pytest.mark.parametrize("memory", [0.1, 0.5, 1.0])
def test_the_optimizer_holds_what_the_plan_promises(memory: float, default: Planner) -> None:
    network, made = model(), default.plan(memory, 1.4)
    optimizer = BlockOptimizer(network, plan=made, lr=1e-3)
    for param in network.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert state_bytes(optimizer) == made.state_bytes <= memory * default.reference_bytes


def test_a_budget_that_is_exactly_met_is_enough(modules: Planner) -> None:
    made = modules.plan(0.4, 1.4)
    again = modules.plan(made.state_bytes, 1.4)
    assert configurations(again) == configurations(made)
    assert risk_of(modules.plan(made.state_bytes - 1, 1.4)) >= risk_of(made)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_less_memory_never_means_less_risk(granularity: str) -> None:
    source = planner(granularity=granularity)
    found = [risk_of(source.plan(share, 1.4)) for share in (0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.8, 1.2, 2.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_with_room_for_all_every_block_has_its_least_risk(modules: Planner) -> None:
    made = modules.plan(10.0, 10.0)
    assert risk_of(made) == pytest.approx(modules.cost.min(axis=1).sum())
    assert {block.why for block in made.blocks if block.name != "unused"} == {"least risk of all"}


@pytest.mark.parametrize("time", [0.6, 0.8, 1.0, 1.1, 1.3])
def test_the_time_budget_is_kept(time: float, modules: Planner) -> None:
    made = modules.plan(0.5, time)
    column = [CATALOG.index(block.configuration) for block in made.blocks]
    assert modules.time[np.arange(len(column)), column].mean() <= time + 1e-9
    assert made.settings["time_budget"] == time
    assert risk_of(made) >= risk_of(modules.plan(0.5, 2.0))


def test_a_time_budget_below_the_fastest_names_the_fastest(modules: Planner) -> None:
    with pytest.raises(
        PlanError, match=r"no plan is within time=0\.4 of AdamW16's update time: the fastest needs 0\.5"
    ):
        modules.plan(0.5, 0.4)


def test_the_same_inputs_give_the_same_plan() -> None:
    texts = {planner().plan(share, 1.4).to_json() for share in (0.3,) for _ in range(3)}
    assert len(texts) == 1
    profile.cache_clear()  # the gradients too
    assert planner().plan(0.3, 1.4).to_json() in texts


def test_the_function_is_the_planner(default: Planner) -> None:
    made = make_plan(profile(), "30%", 1.4, hyper=HYPER, gamma=0.1, **CATALOG_SPACE)
    assert made.to_json() == default.plan("30%", 1.4).to_json()


# ---- infeasible budgets ----


def smallest(source: Planner, memory: float, time: float = 1.4) -> int:
    with pytest.raises(PlanError) as caught:
        source.plan(memory, time)
    least = caught.value.__cause__.smallest_memory  # type: ignore[union-attr]
    assert f"{least / source.reference_bytes:.2%} of AdamW16's state" in str(caught.value)
    return int(least)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_an_infeasible_budget_names_the_smallest_and_that_one_is_feasible(granularity: str) -> None:
    source = planner(granularity=granularity, forbid=["sgd*"])
    least = smallest(source, 0.001)
    assert source.plan(least, 1.4).state_bytes == least
    with pytest.raises(PlanError, match="no plan fits"):
        source.plan(least - 1, 1.4)


def test_the_smallest_budget_depends_on_the_time() -> None:
    source = planner(granularity="module", forbid=["sgd*"])
    assert smallest(source, 0.001, 1.0) >= smallest(source, 0.001, 1.5)


def test_an_int_that_looks_like_a_share_gets_a_hint() -> None:
    source = planner(forbid="sgd*")
    with pytest.raises(PlanError, match=r"An int is read as bytes: write 1\.0 for a share"):
        source.plan(1)
    with pytest.raises(PlanError) as caught:
        source.plan(0.001)
    assert "An int" not in str(caught.value)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (0.5, 500_000),
        ("50%", 500_000),
        ("12.5 %", 125_000),
        (" 50% ", 500_000),
        (1.0, 1_000_000),
        (2.0, 2_000_000),
        (400, 400),
        (0, 0),
        ("1.5GiB", 1_610_612_736),
        ("1.5 KiB", 1536),
        ("2MB", 2_000_000),
        ("3TB", 3_000_000_000_000),
        ("7B", 7),
        (np.float64(0.5), 500_000),
    ],
)
def test_budgets_are_read(memory: float | str, expected: int) -> None:
    assert memory_budget(memory, 1_000_000) == expected


@pytest.mark.parametrize("memory", ["", "50", "half", "1.5GiBs", "-1GiB", "1..5GiB", "GiB", "%", "-5%", -0.1, math.nan])
def test_budgets_that_mean_nothing_are_refused(memory: float | str) -> None:
    with pytest.raises(PlanError):
        memory_budget(memory, 1_000_000)


# ---- what a person asks for ----


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("forbid", ["sgd*", ["sgd", "sgdw", "sgdm*", "sgdwm*"], {"*": "sgd*"}], ids=str)
def test_no_sgd_means_no_sgd(granularity: str, forbid: Any) -> None:
    made = planner(granularity=granularity, forbid=forbid).plan(0.06, 2.0)
    assert not [name for name in configurations(made).values() if name.startswith("sgd")]
    free = planner(granularity=granularity).plan(0.01, 2.0)
    assert [name for name in configurations(free).values() if name.startswith("sgd")], "the test proves nothing"


def test_forbidding_by_pattern_leaves_other_blocks_free() -> None:
    free = planner(granularity="module").plan(0.0, 2.0)
    assert set(configurations(free).values()) <= {"sgd", "sgdw"}
    made = planner(granularity="module", forbid={"*attn*": "sgd*", "embed": ["sgd*", "adafactor*"]}).plan(0.2, 2.0)
    for name, chosen in configurations(made).items():
        assert "attn" not in name or not chosen.startswith("sgd")
        assert name != "embed" or not chosen.startswith(("sgd", "adafactor"))


def test_a_pattern_on_a_parameter_binds_its_whole_block() -> None:
    source = planner(granularity="coarse", forbid={"layers.1.mlp.0.bias": "sgd*"})
    made = source.plan(0.1, 2.0)
    assert not str(made.block_of("layers.0.norm.weight").configuration).startswith("sgd")


def test_brackets_in_patterns_are_not_special() -> None:
    forbidden = ["adamw[m=int8,v=int8]", "adafactor[v=*]"]
    made = planner(granularity="module", forbid=forbidden).plan(0.3, 2.0)
    assert not [c for c in configurations(made).values() if c == forbidden[0] or c.startswith("adafactor")]


def test_a_preference_shifts_choices_and_its_strength_matters() -> None:
    wanted = "adamw[m=int8,v=int8]"

    def count(**settings: Any) -> int:
        made = planner(granularity="module", **settings).plan(0.6, 2.0)
        return sum(chosen == wanted for chosen in configurations(made).values())

    plain, preferred = count(), count(prefer=wanted)
    assert plain < preferred
    assert count(prefer=wanted, preference=0.0) == plain
    assert preferred <= count(prefer="adamw-8", preference=50.0)


def test_preference_by_pattern_is_lambda_off_the_risk(modules: Planner) -> None:
    source = planner(granularity="module", prefer={"*norm*": "adamw-32"}, preference=0.25)
    difference = modules.cost - source.cost
    for row, name in zip(difference, source.names):
        expected = [0.25 if "norm" in name and c == parse("adamw-32") else 0.0 for c in CATALOG]
        assert row == pytest.approx(expected)


@pytest.mark.parametrize("rule", ["forbid", "prefer"])
def test_patterns_that_match_nothing_are_errors(rule: str) -> None:
    with pytest.raises(PlanError, match=r"'lamb\*' names no candidate"):
        planner(**{rule: "lamb*"}).plan(0.5)
    with pytest.raises(PlanError, match=r"'\*embedding\*' names no block and no parameter.*Blocks: embed"):
        planner(**{rule: {"*embedding*": "sgd*"}}).plan(0.5)


def test_only_candidates_are_chosen() -> None:
    candidates = (parse("adamw-8"), parse("sgdm-8"), parse("sgd"))
    made = planner(candidates=candidates).plan(0.3, 2.0)
    assert {block.configuration for block in made.blocks} <= set(candidates)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_match": "max"}, "unknown lr_match 'max'"),
        ({"granularity": "fine"}, "unknown granularity 'fine'.*role, refined, tensor, module"),
    ],
)
def test_unknown_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**settings)


def test_unknown_risks_and_terms_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown risk model 'papper'"):
        planner(risk="papper")
    with pytest.raises(ValueError, match="unknown risk term 'speed'"):
        planner(weights={"speed": 1.0})


def only_bits(metrics: risks.BlockMetrics, configuration: Configuration, settings: risks.Settings) -> dict[str, float]:
    return {"bits": 1 - configuration.switches.bits / 32}


def test_a_risk_model_of_ones_own_by_name_and_as_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(risks, "RISKS", dict(risks.RISKS))
    risks.register("only-bits")(only_bits)
    by_name, by_function = (planner(risk=risk).plan(0.0, 2.0) for risk in ("only-bits", only_bits))
    assert by_name == by_function
    with_signal = [block for block in by_name.blocks if block.name != "unused"]
    assert all(block.risk == {"bits": 0.0} and not block.state_bytes for block in with_signal)


def test_the_papers_risk_weights_and_anchors_reach_the_plan() -> None:
    row = planner(risk="paper", weights={"adaptive": 3.0}, gamma=0.2, granularity="module")
    for metrics, terms in zip(row.metrics, row._terms):
        if metrics.has_signal:
            settings = risks.Settings(weights={"adaptive": 3.0}, gamma=0.2, weight_decay=HYPER.weight_decay)
            assert terms == [risks.paper(metrics, c, settings) for c in CATALOG]
    far = planner(anchors=risks.Anchors(anisotropy=(50.0, 60.0)), granularity="module")
    assert all(cell["adaptive"] == 0 for terms in far._terms for cell in terms if "adaptive" in cell)


# ---- blocks ----


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("source", [planner, prior], ids=["profile", "prior"])
def test_every_parameter_is_in_exactly_one_block(granularity: str, source: Any) -> None:
    made = source(granularity=granularity).plan(0.5, 1.4)
    made.check(profile().shapes)
    assert Counter(name for block in made.blocks for name in block.parameters) == Counter(list(profile().shapes))


def test_finer_granularities_have_more_blocks() -> None:
    counts = [len(planner(granularity=g).blocks) for g in ("coarse", "layer", "module", "tensor")]
    assert counts == sorted(counts) and counts[0] < counts[-1] == len(profile().shapes)
    assert 1 < len(planner().blocks) <= len(planner(granularity="module").blocks)


def test_refinement_has_its_two_knobs() -> None:
    assert len(planner(min_share=0.4).blocks) < len(planner().blocks)
    assert len(planner(quantile=0.0, min_share=0.0).blocks) >= len(planner(quantile=1.0, min_share=0.0).blocks)


@pytest.mark.parametrize("memory", [0.3, 1.0, 3.0])
def test_a_block_without_signal_keeps_adamw_and_says_why(memory: float, modules: Planner) -> None:
    block = modules.plan(memory, 2.0).block_of("unused.weight")
    assert block.name == "unused"
    assert block.configuration.mechanism_name == "adamw" and not block.configuration.switches.factored
    assert "no gradient in the warm-up" in block.why
    assert block.lr_scale == 1.0


def test_reasons_name_what_would_be_better(modules: Planner) -> None:
    made = modules.plan(0.4, 2.0)
    for i, block in enumerate(made.blocks):
        best = CATALOG[int(np.argmin(modules.cost[i]))]
        if block.name != "unused" and block.configuration != best:
            assert re.fullmatch(rf"{re.escape(best.alias)} risks \d+\.\d{{3}} less but needs .* more", block.why)


def test_risks_in_the_plan_sum_to_the_objective(modules: Planner) -> None:
    made = modules.plan(0.4, 1.4)
    assert sum(sum(block.risk.values()) for block in made.blocks) == pytest.approx(risk_of(made), abs=1e-4)
    assert made.settings["bound"] <= risk_of(made) + 1e-9
    assert made.settings["warmup_steps"] == profile().steps and made.settings["seed"] == profile().seed


# ---- learning rates ----


@pytest.mark.parametrize("memory", [0.0, 0.05, 0.2, 0.5, 1.0])
def test_lr_scales_match_the_rms_of_updates(memory: float, modules: Planner) -> None:
    for block in modules.plan(memory, 2.0).blocks:
        mechanism = block.configuration.mechanism
        metrics = Metrics(profile(), block.parameters, HYPER)
        if (mechanism.adaptive and mechanism.momentum) or not metrics.has_signal:
            assert block.lr_scale == 1.0
        else:
            ratio = metrics.update_rms(REFERENCE) / metrics.update_rms(block.configuration)
            assert block.lr_scale == pytest.approx(ratio, rel=1e-3)


def test_sgd_is_scaled_up_to_adams_step(modules: Planner) -> None:
    [scale] = [block.lr_scale for block in modules.plan(0.0, 2.0).blocks if block.name == "layers.0.attn"]
    assert scale is not None and scale > 10, "its gradients are far below 1"


def test_lr_match_none_is_the_papers() -> None:
    made = planner(lr_match="none").plan(0.05, 2.0)
    assert {block.lr_scale for block in made.blocks} == {1.0}


# ---- without gradients ----


def test_without_a_profile_the_prior_decides() -> None:
    source = prior()
    made = source.plan(0.5, 1.4)
    assert made.state_bytes <= 0.5 * made.reference_bytes
    assert {block.why for block in made.blocks} == {"no gradients seen yet: assumed to be like most blocks"}
    assert {block.lr_scale for block in made.blocks} == {1.0}
    assert made.settings["warmup_steps"] == 0 and made.settings["seed"] is None
    assert made == prior().plan(0.5, 1.4)


def test_without_a_profile_vectors_are_not_judged_by_their_structure() -> None:
    source = prior(granularity="tensor")
    for metrics, block in zip(source.metrics, source.blocks):
        [shape] = block.values()
        assert (metrics.structure_residual is None) == (len(shape) < 2)


# ---- many budgets ----


@pytest.mark.parametrize("granularity", ["module", "refined"])
def test_the_frontier_is_single_plans_and_monotone(granularity: str) -> None:
    source = planner(granularity=granularity)
    shares = [0.6, 0.1, 0.3, 1.0, 0.02]
    plans = source.frontier(shares, 1.4)
    assert len(plans) == len(shares)
    for share, made in zip(shares, plans):
        single = source.plan(share, 1.4)
        assert risk_of(made) == pytest.approx(risk_of(single), abs=1e-9)
        assert made.state_bytes <= memory_budget(share, source.reference_bytes) == made.settings["memory_budget"]
    by_share = [risk_of(made) for _, made in sorted(zip(shares, plans), key=lambda pair: pair[0])]
    assert by_share == sorted(by_share, reverse=True)


def test_the_frontier_of_no_budgets_is_empty(modules: Planner) -> None:
    assert modules.frontier([]) == []


# ---- the file ----


def test_a_plan_survives_its_file(tmp_path: Path, default: Planner) -> None:
    made = default.plan(0.3, 1.4)
    made.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read == made and read.to_json() == made.to_json()
    for before, after in zip(made.blocks, read.blocks):
        assert (after.risk, after.why, after.lr_scale) == (before.risk, before.why, before.lr_scale)
    assert read.settings == made.settings and read.settings["memory_budget"] > 0


def test_a_configuration_can_be_edited_by_hand(default: Planner) -> None:
    content = json.loads(default.plan(0.3, 1.4).to_json())
    content["blocks"][0]["configuration"] = "sgdm-8"
    content["blocks"][0]["lr_scale"] = None
    edited = Plan.from_json(json.dumps(content))
    assert edited.blocks[0].configuration == parse("sgdm-8") and edited.blocks[0].lr_scale is None
    BlockOptimizer(model(), plan=edited, lr=1e-3)


def test_a_minimal_plan_by_hand_is_enough() -> None:
    block = {"name": "all", "configuration": "adamw-8", "parameters": {"w": [64, 64]}}
    read = Plan.from_json(json.dumps({"format": "baoc.plan", "version": 1, "blocks": [block]}))
    assert read == Plan((Block("all", parse("adamw-8"), {"w": (64, 64)}),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "not a plan file"),
        ({"format": None}, "not a plan file"),
        ({"version": 2}, "version 2, and this baoc reads version 1"),
        ({"version": None}, "version None"),
        ({"version": "1"}, "version '1'"),
        ({"blocks": [{}]}, "block 0 of the plan has no 'name'"),
        ({"blocks": [{"name": "a"}]}, "block 0 of the plan has no 'configuration'"),
        ({"blocks": [{"name": "a", "configuration": "sgd"}]}, "block 0 of the plan has no 'parameters'"),
        ({"blocks": ["a"]}, "block 0 of the plan cannot be read"),
        ({"blocks": [{"name": "a", "configuration": "sgd", "parameters": []}]}, "block 0 of the plan cannot be read"),
        ({"blocks": [{"name": "a", "configuration": 8, "parameters": {}}]}, "block 0 of the plan cannot be read"),
        ({"blocks": [{"name": "a", "configuration": "sgd", "parameters": {}, "lr_scale": -1}]}, "lr_scale -1"),
        ({"blocks": [{"name": "a", "configuration": "sgd", "parameters": {}}] * 2}, "two blocks are called 'a'"),
        ({"blocks": [{"name": n, "configuration": "sgd", "parameters": {"w": [2]}} for n in "ab"]}, "in two blocks"),
    ],
)
def test_bad_plans_are_refused(change: dict[str, Any], message: str, default: Planner) -> None:
    content = json.loads(default.plan(0.5, 1.4).to_json()) | change
    with pytest.raises(PlanError, match=re.escape(message)):
        Plan.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"blocks": []}', "plan"])
def test_what_is_not_json_or_not_a_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a plan file"):
        Plan.from_json(text)


# ---- the schema ----

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def schema() -> dict[str, Any]:
    return json.loads((resources.files("baoc.core") / "plan.schema.json").read_text(encoding="utf-8"))


def faults(value: Any, rule: dict[str, Any], root: dict[str, Any], place: str = "plan") -> list[str]:
    """As much of JSON schema as the plan's uses."""
    known = {"$schema", "$id", "$defs", "title", "description", "default", "examples"}
    known |= {"$ref", "const", "type", "required", "properties", "additionalProperties", "items"}
    known |= {"minimum", "exclusiveMinimum", "minLength"}
    assert set(rule) <= known, f"this check does not know {set(rule) - known}"
    if "$ref" in rule:
        rule = root["$defs"][rule["$ref"].removeprefix("#/$defs/")]
    found = []
    if "const" in rule and value != rule["const"]:
        found.append(f"{place} is {value!r}")
    types = rule.get("type", list(TYPES))
    allowed = [types] if isinstance(types, str) else types
    is_right = "boolean" in allowed if isinstance(value, bool) else any(isinstance(value, TYPES[n]) for n in allowed)
    if not is_right:
        return [*found, f"{place} is not {allowed}"]
    if isinstance(value, (int, float)):
        if not value >= rule.get("minimum", -math.inf) or not value > rule.get("exclusiveMinimum", -math.inf):
            found.append(f"{place} is {value}")
    elif isinstance(value, str) and len(value) < rule.get("minLength", 0):
        found.append(f"{place} is too short")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += faults(item, rule.get("items", {}), root, f"{place}[{index}]")
    elif isinstance(value, dict):
        found += [f"{place} has no {name}" for name in rule.get("required", ()) if name not in value]
        for name, item in value.items():
            inner = rule.get("properties", {}).get(name, rule.get("additionalProperties", {}))
            if inner is False:
                found.append(f"{place} has an unknown {name}")
            elif isinstance(inner, dict):
                found += faults(item, inner, root, f"{place}.{name}")
    return found


def test_plans_are_as_the_schema_says(default: Planner) -> None:
    uniform = Plan.uniform("adamw-8", shapes(model()))
    for made in (default.plan(0.3, 1.4), prior().plan(0.5, 1.4), uniform):
        assert faults(json.loads(made.to_json()), schema(), schema()) == []


def test_the_schema_knows_every_key_that_is_written(default: Planner) -> None:
    rules, content = schema(), json.loads(default.plan(0.3, 1.4).to_json())
    assert rules["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert set(content) == set(rules["properties"])
    assert set(content["settings"]) <= set(rules["properties"]["settings"]["properties"])
    assert set(content["blocks"][0]) == set(rules["$defs"]["block"]["properties"])


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"format": "other"},
        {"blocks": None},
        {"blocks": [{}]},
        {"blocks": [{"name": "a", "configuration": "sgd", "parameters": {"w": [-1]}}]},
        {"blocks": [{"name": "a", "configuration": "sgd", "parameters": {"w": [1]}, "lr_scale": 0}]},
        {"settings": {"memory_budget": "1GiB"}},
    ],
)
def test_the_schema_refuses(change: dict[str, Any], default: Planner) -> None:
    assert faults(json.loads(default.plan(0.3, 1.4).to_json()) | change, schema(), schema())


# ---- the page on equations ----


def test_links_of_the_page_on_equations_exist() -> None:
    page = (DOCS / "equations.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page)
    assert len(links) > 20
    for link in links:
        assert link.startswith("http") or (DOCS / link).exists(), link


def test_functions_of_the_page_on_equations_exist() -> None:
    page = (DOCS / "equations.md").read_text(encoding="utf-8")
    named = re.findall(r"\[`(\w[\w.]*)`\]\((\.\./src/[^)#]+)\)", page)
    assert len(named) > 20
    for name, link in named:
        path = DOCS / link
        text = "".join(p.read_text(encoding="utf-8") for p in ([path] if path.is_file() else path.glob("*.py")))
        last = name.rsplit(".", 1)[-1]
        assert re.search(rf"(def|class) {last}\b|^ *{last}\b ?[:=]", text, re.M), f"{name} is not in {link}"


# ---- known faults; each of these tests turns red when its fault is mended: take its mark off then ----


def test_a_block_without_signal_that_lost_adamw_does_not_claim_to_keep_it(modules: Planner) -> None:
    block = modules.plan(0.0, 2.0).block_of("unused.weight")
    assert block.configuration.mechanism_name != "adamw"
    assert "keeps AdamW" not in block.why


@pytest.mark.parametrize(("settings", "time"), [({"forbid": "sgd*"}, 1.4), ({}, 0.4)], ids=["forbid", "time"])
def test_the_frontier_leaves_out_what_cannot_be_met(settings: dict[str, Any], time: float) -> None:
    plans = planner(**settings).frontier([0.0, 0.5], time)
    assert len(plans) == (1 if settings else 0)


def test_two_infeasible_budgets_are_a_plan_error() -> None:
    with pytest.raises(PlanError):
        planner(forbid="sgd*").plan(0.0, 0.1)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_budget_that_an_error_names_is_feasible_as_written(granularity: str) -> None:
    source = planner(granularity=granularity, forbid=["sgd*"])
    with pytest.raises(PlanError) as caught:
        source.plan(0.001, 1.4)
    size = re.search(r"needs (\d[\d.,]* ?[KMGT]?i?B)", str(caught.value))
    share = re.search(r"([\d.]+%) of AdamW16", str(caught.value))
    assert size and share
    source.plan(size[1], 1.4)
    source.plan(share[1], 1.4)


def test_forbidding_everything_is_a_plan_error_with_the_blocks_name() -> None:
    with pytest.raises(PlanError, match="embed"):
        planner(granularity="module", forbid={"embed": "*"}).plan(0.5)


def test_names_of_a_compiled_model_can_be_planned() -> None:
    wrapped = {f"_orig_mod.{name}": shape for name, shape in profile().shapes.items()}
    Planner(wrapped, None, HYPER).plan(0.5, 1.4)


@pytest.mark.parametrize(
    "change",
    [
        {"blocks": None},
        {"settings": None},
        {"blocks": [{"name": "a", "configuration": "sgd", "parameters": {}, "lr_scale": "x"}]},
        {"blocks": [{"name": "a", "configuration": "sgd", "parameters": {"w": ["x"]}}]},
        {"blocks": [{"name": "a", "configuration": "sgd", "parameters": {"w": [-2]}}]},
        {"blocks": [{"name": "a", "configuration": "sgd", "parameters": {"w": [2.7]}}]},
        {"blocks": [{"name": "a", "configuration": "sgd", "parameters": {"w": "12"}}]},
        {"blocks": [{"name": "a", "configuration": "adamww", "parameters": {}}]},
    ],
    ids=["no blocks", "no settings", "lr_scale", "size", "negative size", "fraction", "text", "configuration"],
)
def test_all_bad_plans_are_plan_errors(change: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(json.dumps({"format": "baoc.plan", "version": 1, "blocks": [], **change}))


@pytest.mark.parametrize("memory", [".GiB", "5iB", math.inf, None], ids=repr)
def test_all_bad_budgets_are_plan_errors(memory: Any) -> None:
    with pytest.raises(PlanError):
        memory_budget(memory, 1_000_000)


@pytest.mark.parametrize("memory", [np.float32(0.5), torch.tensor(0.5)], ids=["numpy", "torch"])
def test_other_floats_are_shares_too(memory: Any) -> None:
    assert memory_budget(memory, 1_000_000) == 500_000


def test_a_plan_without_a_limit_on_time_is_json(modules: Planner) -> None:
    text = modules.plan(0.5, math.inf).to_json()
    json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))

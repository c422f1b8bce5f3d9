"""``PaperPlanner`` against an independent implementation of the paper, stage by stage and as whole plans."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from baoc import Budget, ModelFacts, PaperPlanner
from baoc.core.codecs import CODECS
from baoc.core.configuration import parse
from baoc.core.spec import Hyper, Slot
from baoc.planners.paper import risk as risks
from baoc.planners.paper.metrics import Metrics, sampled_matrices, stored_and_read
from baoc.planners.paper.problem import PaperProblem, diagnostics_of, risk_settings
from baoc.planners.paper.refine import refine
from baoc.planners.paper.sampling import Sampler
from baoc.planners.paper.statistics import GradientStatistics, TensorRecord
from baoc.planners.paper.units import Unit, structural_units
from tests.planners import paper_reference as paper

HYPER = Hyper(lr=1e-3, weight_decay=0.1)
SEEDS = range(8)
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "bias correction": {"bias_correction": True},
    "betas": {"beta_m": 0.8, "beta_v": 0.95, "beta_rho": 0.7},
    "epsilon": {"epsilon": 1e-4},
    "anchors": {"anchors": risks.Anchors((0.1, 3.0), (-0.2, 0.3), (0.0, 1.0))},
    "no snr": {"snr": "never"},
    "snr": {"snr": "always"},
    "weights": {"weights": {"adaptive": 2.0, "decay": 0.5, "aggressive": 3.0}, "gamma": 0.4},
    "partition": {"diagnostic_weights": (2.0, 0.0, 0.5, 1.0, 3.0), "quantile": 0.4, "min_share": 0.05},
    "tau": {"tau": 0.2, "min_share": 0.0},
    "sampling": {"sample_ratio": 0.3},
    "floor": {"sample_floor": 40},
}
by_settings = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
by_seed = pytest.mark.parametrize("seed", SEEDS)


# ---- random models and streams ----


def random_model(random: np.random.Generator) -> nn.Module:
    """Embedding, norms, layers of random widths, a convolution, and a head."""

    def width() -> int:
        return int(random.integers(5, 90))

    layers = [
        nn.ModuleDict({"norm": nn.LayerNorm(width()), "attn": nn.Linear(width(), width()), "mlp": mlp(width, random)})
        for _ in range(random.integers(1, 4))
    ]
    parts: dict[str, nn.Module] = {"embed": nn.Embedding(width(), width()), "layers": nn.ModuleList(layers)}
    if random.random() < 0.5:
        parts["conv"] = nn.Conv2d(int(random.integers(2, 12)), int(random.integers(2, 12)), 3)
    return nn.ModuleDict(parts | {"head": nn.Linear(width(), width(), bias=False)})


def mlp(width: Any, random: np.random.Generator) -> nn.Module:
    return nn.Sequential(nn.Linear(width(), width()), nn.GELU(), nn.Linear(width(), width()))


@dataclasses.dataclass
class Run:
    """A warm-up on random gradients: what the planner sees, and the same as plain numbers."""

    planner: PaperPlanner
    facts: ModelFacts
    statistics: GradientStatistics
    tensors: Mapping[str, paper.Tensor]  # those with samples
    settings: paper.Settings


def run(seed: int, steps: int | None = None, **settings: Any) -> Run:
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = random_model(random)
    params = dict(model.named_parameters())
    planner = PaperPlanner(**settings)
    session = planner.start(params, ModelFacts.of(model, HYPER))
    sampler = session._sampler
    assert isinstance(sampler, Sampler)
    scales = {name: random.lognormal(-4, 2) * torch.randn(p.shape).mul(1.5).exp() for name, p in params.items()}
    signals = {name: random.normal() * torch.randn(p.shape) for name, p in params.items()}
    taken: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in params}
    steps = int(random.integers(2, 30)) if steps is None else steps
    for _ in range(steps):
        for name, param in params.items():
            param.grad = scales[name] * (signals[name] + torch.randn(param.shape))
            taken[name].append(sampler.streams[name].coordinates.take(param.grad).double().numpy())
        session.observe(params)
    facts = ModelFacts.of(model, HYPER)
    statistics = session.current_statistics(params, facts)
    tensors = {
        name: plain_tensor(record, np.array(taken[name]))
        for name, record in statistics.records.items()
        if len(record.second)
    }
    return Run(planner, facts, statistics, tensors, plain_settings(planner))


def plain_tensor(record: TensorRecord, gradients: np.ndarray[Any, Any]) -> paper.Tensor:
    places = np.arange(len(record.second), dtype=np.float64)
    found = sampled_matrices(record, places)[0]
    enough = [min(2, size) for size in record.shape[-2:]]
    matrices = [m.astype(np.int64) for m in found if m.shape[0] >= enough[0] and m.shape[1] >= enough[1]]

    def quantizer(moment: np.ndarray[Any, Any], bits: int, signed: bool) -> np.ndarray[Any, Any]:
        slot = Slot("m" if signed else "v", signed=signed)
        codec = CODECS[{32: "fp32", 16: "bf16", 8: "int8"}[bits]]
        return stored_and_read(record, moment, codec, slot).double().numpy()

    return paper.Tensor(gradients, record.values, matrices, len(record.shape) > 1, quantizer)


def plain_settings(planner: PaperPlanner) -> paper.Settings:
    anchors = planner.anchors
    return paper.Settings(
        *(planner.beta_m, planner.beta_v, planner.beta_rho, planner.bias_correction, planner.epsilon, HYPER.eps),
        *(*anchors.anisotropy, *anchors.stability, *anchors.snr),
        snr=planner.snr,
        gamma=planner.gamma,
        weights=planner.weights,
        w=[planner.diagnostic_weights.get(name, 1.0) for name in risks.DIAGNOSTICS],
        alpha=planner.min_share,
        tau=planner.tau,
        quantile=planner.quantile,
    )


def raw(made: Run, names: Sequence[str]) -> paper.Raw:
    mine = [made.tensors[name] for name in names if name in made.tensors]
    found = paper.raw_metrics(mine, made.settings)
    factored = any(len(made.statistics.records[name].shape) > 1 for name in names)
    return dataclasses.replace(found, can_be_factored=factored)


def units_of(made: Run) -> tuple[Unit, ...]:
    return structural_units(made.facts.shapes)


# ---- sampling ----


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.05, 0.1, 1.0])
@by_seed
def test_every_unit_has_ceil_s_d_samples(seed: int, ratio: float) -> None:
    made = run(seed, steps=1, sample_ratio=ratio)
    for unit in units_of(made):
        counts = {name: len(made.statistics.records[name].second) for name in unit.parameters}
        assert sum(counts.values()) == paper.omega_size(ratio, unit.numel)
        for name, count in counts.items():  # in proportion to sizes
            quota = sum(counts.values()) * made.statistics.records[name].numel / unit.numel
            assert math.floor(quota) <= count <= math.ceil(quota)


@pytest.mark.parametrize("granularity", ["tensor", "layer", "coarse"])
@by_seed
def test_blocks_that_are_known_before_have_exactly_ceil_s_d_samples(seed: int, granularity: str) -> None:
    made = run(seed, steps=1, sample_ratio=0.01, granularity=granularity)
    for block in PaperProblem(made.planner, made.facts, made.statistics).blocks:
        numel = sum(math.prod(shape) for shape in block.values())
        assert sum(len(made.statistics.records[n].second) for n in block) == paper.omega_size(0.01, numel)


# ---- metrics, signals, risks ----


@by_settings
@by_seed
def test_raw_metrics(seed: int, settings: dict[str, Any]) -> None:
    made = run(seed, **{"sample_ratio": 0.05} | settings)
    everything = tuple(made.facts.shapes)
    for names in (*(unit.parameters for unit in units_of(made)), everything):
        expected = raw(made, names)
        metrics = Metrics(made.statistics, names, HYPER, made.planner.metric_settings)
        near = {"rel": 2e-4, "abs": 1e-5}  # the samples are fp32
        assert metrics.anisotropy == pytest.approx(expected.a, **near)
        assert metrics.direction_stability == pytest.approx(expected.rho, **near)
        assert metrics.snr == pytest.approx(expected.snr, **near)
        assert metrics.distortion == pytest.approx(expected.c, **near)
        assert (metrics.structure_residual is None) == (expected.f is None)
        assert expected.f is None or metrics.structure_residual == pytest.approx(expected.f, **near)
        for bits, q in expected.q.items():
            assert metrics.precision(bits) == pytest.approx(q, rel=1e-4)
        assert (metrics.has_signal, metrics.has_matrix) == (expected.has_signal, expected.can_be_factored)


def test_direction_stability_is_of_the_whole_history() -> None:
    """Two hundred steps, and with a decay under which all of them count."""
    made = run(3, steps=200, beta_rho=0.99, sample_ratio=0.05)
    names = tuple(made.facts.shapes)
    metrics = Metrics(made.statistics, names, HYPER, made.planner.metric_settings)
    assert metrics.direction_stability == pytest.approx(raw(made, names).rho, rel=1e-5)


@by_settings
@by_seed
def test_signals_and_phi(seed: int, settings: dict[str, Any]) -> None:
    made = run(seed, **settings)
    problem = PaperProblem(made.planner, made.facts, made.statistics)
    told = risk_settings(made.planner, made.facts, made.statistics)
    for row, block in enumerate(problem.blocks):
        z = paper.normalize(raw(made, tuple(block)), made.settings)
        need = risks.needs(problem.metrics[row], told)
        assert need.vector() == pytest.approx((z.s_a, z.s_m, z.c, z.s_f), rel=1e-3, abs=1e-4)
        for column, configuration in enumerate(problem.candidates):
            expected = paper.phi(z, tuple_of(str(configuration.alias)), made.settings)
            assert problem.cost[row, column] == pytest.approx(expected, rel=1e-3, abs=1e-4), configuration


def tuple_of(alias: str) -> paper.Configuration:
    """Definition 1 by the names of Sec. 4.1. Choice: Adafactor has decoupled decay; stateless SGD has 32 bits."""
    name, _, bits = alias.partition("-")
    y = {
        "adamw": (1, 1, 1, 0),
        "adam": (1, 1, 0, 0),
        "adafactor": (1, 0, 1, 1),
        "sgdwm": (0, 1, 1, 0),
        "sgdm": (0, 1, 0, 0),
        "sgdw": (0, 0, 1, 0),
        "sgd": (0, 0, 0, 0),
    }[name]
    return paper.Configuration(*y, int(bits or 32))


def test_agg_of_every_candidate() -> None:
    for configuration in PaperPlanner().candidates:
        assert risks.aggressiveness(parse(configuration)) == paper.aggressiveness(tuple_of(parse(configuration).alias))


# ---- Algorithm 2 ----


@pytest.mark.parametrize("seed", range(60))
def test_partition_of_random_diagnostics(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 25))
    z = random.random((count, 5)) * (random.random((count, 5)) > 0.2)
    z[random.random((count, 5)) < 0.15] = math.nan
    z[random.random(count) < 0.1] = math.nan
    n = [int(size) for size in random.integers(1, 2000, size=count)]
    settings = paper.Settings(
        w=[float(x) for x in random.choice([0.0, 0.5, 1.0, 2.0], size=5)],
        alpha=float(random.choice([0.0, 0.001, 0.02, 0.1])),
        tau=float(random.random()) if seed % 2 else None,
        quantile=float(random.choice([0.25, 0.5, 0.75])),
    )
    units = [Unit(str(j), (), size) for j, size in enumerate(n)]
    found = refine(
        units, z, weights=settings.w, min_share=settings.alpha, threshold=settings.tau, quantile=settings.quantile
    )
    assert [list(block) for block in found] == paper.partition(z.tolist(), n, settings)


@by_settings
@by_seed
def test_diagnostics_and_blocks_of_streams(seed: int, settings: dict[str, Any]) -> None:
    made = run(seed, **settings)
    units = units_of(made)
    told = risk_settings(made.planner, made.facts, made.statistics)
    vectors = diagnostics_of(units, made.statistics, made.facts, made.planner.metric_settings, told)
    expected = [paper.vector(raw(made, unit.parameters), made.settings) for unit in units]
    assert vectors == pytest.approx(np.array(expected), rel=1e-3, abs=1e-4, nan_ok=True)
    # the same numbers, so that no rounding error is on another side of tau
    groups = paper.partition(vectors.tolist(), [unit.numel for unit in units], made.settings)
    blocks = [{name for j in group for name in units[j].parameters} for group in groups]
    assert [set(block) for block in PaperProblem(made.planner, made.facts, made.statistics).blocks] == blocks


# ---- Eq. 2 ----


@pytest.mark.parametrize("seed", range(30))
def test_optimum_of_random_streams(seed: int) -> None:
    """Whole plans have the least sum of Phi: with the reference's Phi, its blocks, and budgets of all sizes."""
    random = np.random.default_rng(1000 + seed)
    settings = list(SETTINGS.values())[seed % len(SETTINGS)]
    ratios = {str(c): float(random.choice([0.5, 0.8, 1.0, 1.2, 1.5])) for c in PaperPlanner().candidates}
    few = random.choice(len(ratios), size=7, replace=False)
    chosen = {name: ratio for index, (name, ratio) in enumerate(ratios.items()) if index in few} | {"sgd": 0.4}
    made = run(seed, **settings, candidates=tuple(chosen), times=chosen, time=float(random.choice([0.9, 1.1, 1.3])))
    problem = PaperProblem(made.planner, made.facts, made.statistics)
    phi = np.array(
        [
            [
                paper.phi(paper.normalize(raw(made, tuple(block)), made.settings), tuple_of(c.alias), made.settings)
                for c in problem.candidates
            ]
            for block in problem.blocks
        ]
    )
    times = np.tile(list(chosen.values()), (len(phi), 1))
    assert problem.time.tolist() == times.tolist()
    memory = np.array([[sum(c.state_bytes(s) for s in b.values()) for c in problem.candidates] for b in problem.blocks])
    for share in (0.0, 0.3, 0.5, 1.0):
        b_mem = share * problem.reference_bytes if share else problem.least_bytes()
        plan = problem.plan(Budget(share))
        columns = [problem.candidates.index(block.configuration) for block in plan.blocks]
        rows = np.arange(len(columns))
        assert memory[rows, columns].sum() == plan.state_bytes <= b_mem
        assert times[rows, columns].mean() <= made.planner.time + 1e-9
        best = paper.best_assignment(phi, memory, times, b_mem, made.planner.time)
        assert phi[rows, columns].sum() == pytest.approx(best, rel=1e-3, abs=1e-3), share


@by_seed
def test_constraints_of_the_user(seed: int) -> None:
    """Sec. 3.2: what is forbidden has no variable, and what is preferred costs lambda less."""
    made = run(seed)
    wanted = dataclasses.replace(
        made.planner, forbid={"embed*": "sgd*"}, prefer={"*mlp*": "adamw-8"}, preference=0.25, granularity="module"
    )
    problem = PaperProblem(wanted, made.facts, made.statistics)
    for row, (name, block) in enumerate(zip(problem.names, problem.blocks)):
        z = paper.normalize(raw(made, tuple(block)), made.settings)
        for column, c in enumerate(problem.candidates):
            expected = paper.phi(z, tuple_of(c.alias), made.settings)
            expected -= 0.25 * ("mlp" in name and c == parse("adamw-8"))
            is_forbidden = name == "embed" and c.alias.startswith("sgd")
            assert problem.cost[row, column] == pytest.approx(
                math.inf if is_forbidden else expected, rel=1e-3, abs=1e-4
            )

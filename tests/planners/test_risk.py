"""Appendix A's normalizations and Eq. 1 and 9, against formulas written out slowly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from baoc import CATALOG, Configuration, parse
from baoc.core.spec import Hyper
from baoc.planners.paper import risk as risks
from baoc.planners.paper.metrics import Metrics
from baoc.planners.paper.risk import TERMS, Anchors, Prior, RiskSettings
from baoc.planners.paper.sampling import Sampler
from baoc.planners.paper.statistics import GradientStatistics
from tests.cases import gradients

# The paper's tuple (y_a, y_m, y_d, y_f, b) of every candidate, written by hand.
TUPLES: dict[str, tuple[int, int, int, int, int]] = {
    "adamw[m=fp32,v=fp32]": (1, 1, 1, 0, 32),
    "adamw[m=bf16,v=bf16]": (1, 1, 1, 0, 16),
    "adamw[m=int8,v=int8]": (1, 1, 1, 0, 8),
    "adamw[m=fp32,v=factored]": (1, 1, 1, 1, 32),
    "adamw[m=bf16,v=factored]": (1, 1, 1, 1, 16),
    "adamw[m=int8,v=factored]": (1, 1, 1, 1, 8),
    "adam[m=fp32,v=fp32]": (1, 1, 0, 0, 32),
    "adam[m=bf16,v=bf16]": (1, 1, 0, 0, 16),
    "adam[m=int8,v=int8]": (1, 1, 0, 0, 8),
    "adam[m=fp32,v=factored]": (1, 1, 0, 1, 32),
    "adam[m=bf16,v=factored]": (1, 1, 0, 1, 16),
    "adam[m=int8,v=factored]": (1, 1, 0, 1, 8),
    "adafactor[v=fp32]": (1, 0, 1, 0, 32),
    "adafactor[v=bf16]": (1, 0, 1, 0, 16),
    "adafactor[v=int8]": (1, 0, 1, 0, 8),
    "adafactor[v=factored]": (1, 0, 1, 1, 32),
    "adafactor[v=factored-bf16]": (1, 0, 1, 1, 16),
    "adafactor[v=factored-int8]": (1, 0, 1, 1, 8),
    "sgdwm[m=fp32]": (0, 1, 1, 0, 32),
    "sgdwm[m=bf16]": (0, 1, 1, 0, 16),
    "sgdwm[m=int8]": (0, 1, 1, 0, 8),
    "sgdm[m=fp32]": (0, 1, 0, 0, 32),
    "sgdm[m=bf16]": (0, 1, 0, 0, 16),
    "sgdm[m=int8]": (0, 1, 0, 0, 8),
    "sgdw": (0, 0, 1, 0, 32),
    "sgd": (0, 0, 0, 0, 32),
}
# Agg of Eq. 1, worked out on paper.
AGG: dict[tuple[int, int, int, int, int], float] = {
    (1, 1, 1, 0, 32): 0,
    (1, 1, 1, 0, 16): 1,
    (1, 1, 1, 0, 8): 3,
    (1, 1, 1, 1, 32): 1,
    (1, 1, 0, 1, 8): 5,
    (1, 0, 1, 1, 16): 3,
    (0, 1, 0, 0, 8): 5,
    (0, 0, 1, 0, 32): 2,
    (0, 0, 0, 0, 32): 3,
}


@dataclass(frozen=True)
class Fake:
    """Metrics with given values. Precision and alignment differ, so that a model cannot mistake one for the other."""

    steps: int = 50
    has_signal: bool = True
    has_matrix: bool = True
    anisotropy: float = 1.5
    direction_stability: float = 0.45
    snr: float = 0.8
    distortion: float = 0.7
    structure_residual: float | None = 0.3

    def precision(self, bits: int) -> float:
        return {32: 1.0, 16: 0.98, 8: 0.9}[bits]

    def alignment(self, configuration: Configuration) -> float:
        return self.precision(configuration.switches.bits) - 0.01 * (1 + len(str(configuration)) / 100)


def clip(value: float, low: float, high: float) -> float:
    if value < low:
        return low
    if value > high:
        return high
    return value


def reference(metrics: Fake, spelling: str, gamma: float = 0.1) -> dict[str, float]:
    """App. A and Eq. 9 as printed."""
    a, m, d, f, b = TUPLES[spelling]
    s_a = clip((metrics.anisotropy - math.log(2)) / (math.log(10) - math.log(2)), 0, 1)
    s_rho = clip((metrics.direction_stability - 0.2) / (0.6 - 0.2), 0, 1)
    s_snr = clip((math.log(1 + metrics.snr) - 0) / (2 - 0), 0, 1)
    c_tilde = math.log(1 + metrics.distortion)
    s_f = clip(metrics.structure_residual or 0.0, 0, 1)
    return {
        "adaptive": s_a * (1 - a),
        "momentum": s_rho * s_snr * (1 - m),
        "decay": c_tilde * (1 - d),
        "structure": s_f * f,
        "precision": -math.log(clip(metrics.precision(b), 1e-12, 1) + 1e-12),
        "aggressive": gamma * ((1 - a) + (1 - m) + (1 - d) + f + 32 / b - 1),
    }


def adaptive(anisotropy: float, anchors: Anchors = risks.DEFAULT_ANCHORS) -> float:
    return risks.needs(Fake(anisotropy=anisotropy), RiskSettings(anchors)).adaptive


def momentum(stability: float, snr: float) -> float:
    fake = Fake(direction_stability=stability, snr=snr)
    return risks.needs(fake, RiskSettings()).momentum


# ---- Appendix A ----


@pytest.mark.parametrize(
    ("ratio", "need"),
    [(1, 0), (1.999, 0), (2, 0), (math.sqrt(20), 0.5), (10, 1), (10.001, 1), (1e9, 1), (0.1, 0)],
)
def test_anisotropy_is_no_need_at_a_ratio_of_2_and_full_need_at_10(ratio: float, need: float) -> None:
    assert adaptive(math.log(ratio)) == pytest.approx(need, abs=1e-12)


@pytest.mark.parametrize(("stability", "gate"), [(-1, 0), (0.2, 0), (0.3, 0.25), (0.4, 0.5), (0.6, 1), (1, 1)])
def test_direction_gates_momentum_between_its_anchors(stability: float, gate: float) -> None:
    assert momentum(stability, snr=1e9) == pytest.approx(gate, abs=1e-12)


@pytest.mark.parametrize(("snr", "gate"), [(0, 0), (math.e - 1, 0.5), (math.exp(2) - 1, 1), (100, 1)])
def test_snr_gates_momentum_by_its_logarithm(snr: float, gate: float) -> None:
    assert momentum(1.0, snr) == pytest.approx(gate, abs=1e-12)


def test_momentum_is_the_product_of_its_gates() -> None:
    assert momentum(0.4, math.e - 1) == pytest.approx(0.25)


@pytest.mark.parametrize("distortion", [0.0, 0.5, 3.0, 1e6])
def test_distortion_is_compressed_and_not_bounded(distortion: float) -> None:
    found = risks.needs(Fake(distortion=distortion), RiskSettings()).decay
    assert found == pytest.approx(math.log(1 + distortion))


@pytest.mark.parametrize(("residual", "signal"), [(None, 0), (-0.1, 0), (0, 0), (0.4, 0.4), (1, 1), (1.7, 1)])
def test_structure_residual_is_clipped_and_none_for_vectors(residual: float | None, signal: float) -> None:
    fake = Fake(structure_residual=residual, has_matrix=residual is not None)
    assert risks.needs(fake, RiskSettings()).structure == signal


def test_a_matrix_with_too_few_samples_is_not_assumed_to_be_of_rank_1() -> None:
    assert risks.needs(Fake(structure_residual=None), RiskSettings()).structure == 1.0


@pytest.mark.parametrize(("steps", "snr", "uses_snr"), [(10, "auto", True), (9, "auto", False), (9, "always", True)])
def test_without_a_reliable_snr_direction_alone_tells_the_need_for_momentum(
    steps: int, snr: str, uses_snr: bool
) -> None:
    fake = Fake(steps=steps, direction_stability=0.4, snr=math.e - 1)
    assert risks.needs(fake, RiskSettings(snr=snr)).momentum == pytest.approx(0.25 if uses_snr else 0.5)
    assert risks.needs(fake, RiskSettings(snr="never")).momentum == pytest.approx(0.5)


def test_the_vector_of_needs_is_in_the_papers_order() -> None:
    need = risks.needs(Fake(), RiskSettings())
    assert need.vector() == (need.adaptive, need.momentum, need.decay, need.structure)


@pytest.mark.parametrize("cosine", [1.0, 1.0 + 1e-9, 1.5])
def test_a_cosine_of_one_or_above_by_rounding_is_no_risk_but_for_epsilon(cosine: float) -> None:
    assert risks.precision_risk(cosine) == pytest.approx(-1e-12, rel=1e-3)


@pytest.mark.parametrize("cosine", [0.0, -0.3, -1.0, 1e-13])
def test_a_cosine_of_zero_or_below_is_the_largest_finite_risk(cosine: float) -> None:
    assert risks.precision_risk(cosine) == pytest.approx(-math.log(2e-12))


@pytest.mark.parametrize("cosine", [0.999999, 0.99, 0.5, 1e-6])
def test_precision_risk_is_minus_log(cosine: float) -> None:
    assert risks.precision_risk(cosine) == pytest.approx(-math.log(cosine + 1e-12), rel=1e-12)


# ---- Eq. 1 and 9 ----


def test_the_table_has_every_candidate() -> None:
    assert set(TUPLES) == set(map(str, CATALOG))


@pytest.mark.parametrize("configuration", CATALOG, ids=str)
def test_agg_is_equation_1(configuration: Configuration) -> None:
    a, m, d, f, b = TUPLES[str(configuration)]
    assert risks.aggressiveness(configuration) == (1 - a) + (1 - m) + (1 - d) + f + 32 / b - 1
    assert risks.aggressiveness(configuration) == AGG.get((a, m, d, f, b), risks.aggressiveness(configuration))


@pytest.mark.parametrize("configuration", CATALOG, ids=str)
@pytest.mark.parametrize(
    "metrics",
    [
        Fake(),
        Fake(
            anisotropy=0.1, direction_stability=-0.2, snr=0.0, distortion=0.0, structure_residual=None, has_matrix=False
        ),
        Fake(anisotropy=9.0, direction_stability=0.9, snr=50.0, distortion=12.0, structure_residual=1.4),
    ],
    ids=["between anchors", "below anchors", "above anchors"],
)
def test_the_papers_model_is_equation_9_and_agg(configuration: Configuration, metrics: Fake) -> None:
    terms = risks.paper(metrics, configuration, RiskSettings())
    assert tuple(terms) == TERMS
    assert terms == pytest.approx(reference(metrics, str(configuration)), abs=1e-11)


@pytest.mark.parametrize("configuration", CATALOG, ids=str)
def test_the_update_model_differs_in_precision_alone(configuration: Configuration) -> None:
    paper, update = (model(Fake(), configuration, RiskSettings()) for model in (risks.paper, risks.update))
    aligned = risks.precision_risk(Fake().alignment(configuration))
    assert update == paper | {"precision": aligned}


@pytest.mark.parametrize("configuration", CATALOG, ids=str)
def test_without_weight_decay_the_update_model_sees_no_risk_in_dropping_it(configuration: Configuration) -> None:
    with_decay, without = RiskSettings(weight_decay=0.1), RiskSettings(weight_decay=0.0)
    update = risks.update(Fake(), configuration, with_decay)
    assert risks.update(Fake(), configuration, without) == update | {"decay": 0.0}
    paper = risks.paper(Fake(), configuration, with_decay)
    assert risks.paper(Fake(), configuration, without) == paper, "the paper's model does not ask"


def measured() -> Metrics:
    param = nn.Parameter(torch.randn(80, 96))
    sampler = Sampler({"weight": param})
    for grad in gradients((80, 96), 12):
        param.grad = grad
        sampler.observe({"weight": param})
    return Metrics(GradientStatistics.from_sampler(sampler, {"weight": param}), ["weight"], Hyper(lr=1e-3))


def test_on_real_gradients_the_models_agree_on_all_dense_adams_and_on_fp32() -> None:
    metrics = measured()
    differ = set()
    for configuration in CATALOG:
        paper, update = (model(metrics, configuration, RiskSettings()) for model in (risks.paper, risks.update))
        assert {k: v for k, v in paper.items() if k != "precision"} == {
            k: v for k, v in update.items() if k != "precision"
        }
        if not math.isclose(paper["precision"], update["precision"], rel_tol=1e-6, abs_tol=1e-11):
            differ.add(configuration)
    for configuration in differ:
        dense_adam = configuration.mechanism_name in ("adam", "adamw") and not configuration.switches.factored
        assert not dense_adam and configuration.switches.bits < 32, str(configuration)
    assert parse("adamw[m=int8,v=factored]") in differ
    assert parse("sgdm-8") in differ


def test_stateless_configurations_have_no_precision_risk() -> None:
    metrics = measured()
    for spelling in ("sgd", "sgdw"):
        assert risks.update(metrics, parse(spelling), RiskSettings())["precision"] == pytest.approx(0.0, abs=1e-11)


def test_the_prior_answers_for_every_candidate() -> None:
    for configuration in CATALOG:
        terms = risks.update(Prior(), configuration, RiskSettings())
        assert all(math.isfinite(value) and value >= -1e-11 for value in terms.values())
    assert sum(risks.update(Prior(), parse("adamw-32"), RiskSettings()).values()) == pytest.approx(0.0, abs=1e-11)


# ---- what a user may change ----


@pytest.mark.parametrize("term", TERMS)
def test_a_weight_scales_its_own_term(term: str) -> None:
    for configuration in CATALOG:
        plain = risks.paper(Fake(), configuration, RiskSettings())
        weighted = risks.paper(Fake(), configuration, RiskSettings(weights={term: 2.5}))
        assert weighted == plain | {term: 2.5 * plain[term]}


def test_gamma_weighs_agg_alone() -> None:
    sgd = parse("sgd")
    assert risks.paper(Fake(), sgd, RiskSettings(gamma=0.4))["aggressive"] == pytest.approx(1.2)
    assert risks.paper(Fake(), sgd, RiskSettings(gamma=0.0)) == risks.paper(Fake(), sgd, RiskSettings()) | {
        "aggressive": 0.0
    }


@pytest.mark.parametrize("share", [0.2, 0.1, -0.1, -0.2])
def test_perturbed_anchors_move_the_need_for_adaptivity_alone(share: float) -> None:
    moved = Anchors().perturbed(share)
    low, high = math.log(2) * (1 + share), math.log(10) * (1 + share)
    assert moved.anisotropy == pytest.approx((low, high))
    for value in (0.0, low, 0.5 * (low + high), high, 2 * high):
        assert adaptive(value, moved) == pytest.approx(clip((value - low) / (high - low), 0, 1), abs=1e-12)
    before, after = risks.needs(Fake(), RiskSettings()), risks.needs(Fake(), RiskSettings(moved))
    assert replace(before, adaptive=0) == replace(after, adaptive=0)
    assert (after.adaptive < before.adaptive) == (share > 0)


@pytest.mark.parametrize("name", ["anisotropy", "stability", "snr"])
@pytest.mark.parametrize("anchors", [(0.5, 0.5), (0.6, 0.2)])
def test_anchors_must_be_in_order(name: str, anchors: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=f"anchors of {name}"):
        Anchors(**{name: anchors})


def test_an_unknown_term_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"weights names 'momentun'.*momentum, decay"):
        RiskSettings(weights={"momentun": 2.0})


@pytest.fixture
def registered() -> Iterator[str]:
    @risks.register_risk("test-bits")
    def bits(metrics: risks.BlockMetrics, configuration: Configuration, settings: RiskSettings) -> dict[str, float]:
        return {"precision": 32 / configuration.switches.bits}

    yield "test-bits"
    del risks.RISKS["test-bits"]


def test_a_registered_model_is_found_by_name(registered: str) -> None:
    assert risks.find_risk(registered)(Fake(), parse("adamw-8"), RiskSettings()) == {"precision": 4.0}


def test_a_function_is_a_model_and_names_are_known() -> None:
    assert risks.find_risk(risks.paper) is risks.paper
    assert risks.find_risk("paper") is risks.paper
    with pytest.raises(ValueError, match=r"unknown risk model 'papper'.*paper, update.*register_risk"):
        risks.find_risk("papper")

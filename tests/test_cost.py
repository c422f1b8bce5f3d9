"""What configurations cost: bytes that are really held, and time ratios that do not depend on luck."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from baoc import CATALOG, Block, BlockOptimizer, Configuration, Plan, parse
from baoc.core.configuration import REFERENCE, Layout
from baoc.core.spec import SMALL_NUMEL
from baoc.optim.measure import state_bytes
from baoc.optim.timing import StepRunner
from baoc.planning import cost as costs
from baoc.planning.cost import TimeModel, shape_class
from tests.cases import SHAPES

GPT2_LAYER = {
    "ln_1.weight": (768,),
    "ln_1.bias": (768,),
    "attn.c_attn.weight": (768, 2304),
    "attn.c_attn.bias": (2304,),
    "attn.c_proj.weight": (768, 768),
    "attn.c_proj.bias": (768,),
    "ln_2.weight": (768,),
    "ln_2.bias": (768,),
    "mlp.c_fc.weight": (768, 3072),
    "mlp.c_fc.bias": (3072,),
    "mlp.c_proj.weight": (3072, 768),
    "mlp.c_proj.bias": (768,),
}
GPT2 = {
    "wte.weight": (50257, 768),
    "wpe.weight": (1024, 768),
    **{f"h.{i}.{name}": shape for i in range(12) for name, shape in GPT2_LAYER.items()},
    "ln_f.weight": (768,),
    "ln_f.bias": (768,),
}
FEW = (parse("adamw-32"), REFERENCE, parse("adamw-8"), parse("adafactor"), parse("sgd"))


class Clock:
    """Times an update by its form instead of by running it, and counts how often it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        monkeypatch.setattr(StepRunner, "__call__", lambda runner, shape, configuration: configuration.layout(shape))
        monkeypatch.setattr(TimeModel, "_time", lambda model, layout: self(layout))

    def __call__(self, layout: Layout) -> float:
        self.calls += 1
        stored = sum(1.0 + 0.37 * each.rounds for each in layout.formats)
        return 1e-9 * math.prod(layout.shape) * (0.3 + stored)


@pytest.fixture(autouse=True)
def _nothing_measured_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_MEASURED", {})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


# ---- memory ----


@pytest.mark.parametrize("configuration", CATALOG, ids=str)
def test_memory_is_what_an_optimizer_holds(configuration: Configuration) -> None:
    params = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    plan = Plan((Block("all", configuration, SHAPES),))
    optimizer = BlockOptimizer(params.items(), plan=plan, lr=1e-3)
    for param in params.values():
        param.grad = torch.ones_like(param)
    optimizer.step()
    [[promised]] = costs.memory([SHAPES], [configuration])
    assert promised == state_bytes(optimizer) == plan.state_bytes


def test_memory_of_a_block_is_the_sum_of_its_tensors() -> None:
    blocks = [{"a": (64, 64), "b": (7,)}, {"c": (9, 700)}, {}]
    table = costs.memory(blocks, CATALOG)
    assert table.shape == (3, len(CATALOG)) and table.dtype == np.int64
    for i, block in enumerate(blocks):
        for j, configuration in enumerate(CATALOG):
            assert table[i, j] == sum(configuration.state_bytes(shape) for shape in block.values())


def test_memory_of_nothing_has_its_shape() -> None:
    assert costs.memory([], CATALOG).shape == (0, len(CATALOG))


# ---- time ----


class BitsForRunner:
    """Instead of an update to time, the bits that a clock needs to know."""

    name = "bits"

    def __call__(self, shape: tuple[int, ...], configuration: Configuration) -> Any:
        return configuration.switches.bits


def test_real_ratios_are_positive_and_the_reference_is_one() -> None:
    blocks = [{"matrix": (64, 64), "bias": (64,)}, {"norm": (64,)}]
    ratios = TimeModel(StepRunner(kernel="eager"), repeats=3).ratios(blocks, FEW)
    assert ratios.shape == (2, len(FEW))
    assert (ratios[:, FEW.index(REFERENCE)] == 1.0).all()
    assert (ratios > 0).all()


def test_the_reference_is_one_whether_or_not_it_is_a_candidate(clock: Clock) -> None:
    model, block = TimeModel(StepRunner(kernel="eager")), {"w": (64, 64)}
    alone = model.ratios([block], [parse("adamw-32")])
    among = model.ratios([block], [parse("adamw-32"), REFERENCE])
    assert alone[0, 0] == among[0, 0] and among[0, 1] == 1.0


def test_nothing_is_measured_twice(clock: Clock) -> None:
    model, blocks = TimeModel(StepRunner(kernel="eager"), repeats=2), [{"w": (64, 80)}, {"b": (80,)}]
    first = model.ratios(blocks, FEW)
    calls = clock.calls
    assert 0 < calls <= 2 * len(FEW) * (2 + 1)  # shape classes x configurations x (repeats and a warm-up)
    assert (model.ratios(blocks, FEW) == first).all()
    assert (model.ratios(blocks[::-1], FEW[::-1]) == first[::-1, ::-1]).all()
    assert (TimeModel(StepRunner(kernel="eager")).ratios(blocks, FEW) == first).all(), (
        "another model of the same device"
    )
    assert clock.calls == calls
    model.ratios(blocks, (*FEW, parse("sgdm-8")))
    assert calls < clock.calls <= calls + 2 * (2 + 1), "only the new configuration"


def test_configurations_that_take_the_same_work_are_measured_once(clock: Clock) -> None:
    model = TimeModel(StepRunner(kernel="eager"), repeats=1)
    ratios = model.ratios([{"w": (64, 80)}], [parse("adamw-8"), parse("adam-8"), parse("sgd"), parse("sgdw")])
    assert ratios[0, 0] == ratios[0, 1] and ratios[0, 2] == ratios[0, 3]
    assert clock.calls == 3 * 2  # adam-8, sgd and the reference


def test_gpt2_has_few_shape_classes(clock: Clock) -> None:
    classes = {shape_class(shape) for shape in GPT2.values()}
    assert len(classes) <= 8
    assert all(math.prod(shape) <= 2**18 for shape in classes)
    TimeModel(StepRunner(kernel="eager"), repeats=1).ratios([GPT2], FEW)
    assert clock.calls <= len(classes) * len(FEW) * 2


def test_large_tensors_are_timed_in_part_and_keep_their_weight(clock: Clock) -> None:
    """A block's ratio is that of its whole time: the large tensor's, not the mean of its tensors'."""
    matrix, biases = {"w": (8192, 768)}, {f"b{i}": (4000,) for i in range(30)}
    [[large], [small], [both]] = TimeModel(StepRunner(kernel="eager")).ratios(
        [matrix, biases, matrix | biases], FEW[:1]
    )
    assert large != small
    assert both == large


def test_tensors_of_a_million_columns_have_a_class() -> None:
    assert shape_class((4, 1_000_000)) == (1, 1_000_000)
    assert shape_class(()) == (1,)
    assert math.prod(shape_class((10**9,))) <= 2**18


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0)], ids=str)
def test_empty_tensors_cost_nothing(clock: Clock, shape: tuple[int, ...]) -> None:
    model = TimeModel(StepRunner(kernel="eager"))
    with_empty, without = model.ratios([{"w": (64, 64), "empty": shape}, {"w": (64, 64)}], FEW)
    assert (with_empty == without).all()


@pytest.mark.parametrize("block", [{}, {"empty": (0, 8)}], ids=["no tensors", "an empty tensor"])
def test_a_block_of_size_zero_has_finite_ratios(clock: Clock, block: dict[str, tuple[int, ...]]) -> None:
    ratios = TimeModel(StepRunner(kernel="eager")).ratios([block], FEW)
    assert ratios.shape == (1, len(FEW)) and np.isfinite(ratios).all()


def test_no_blocks_have_no_ratios(clock: Clock) -> None:
    assert TimeModel(StepRunner(kernel="eager")).ratios([], FEW).shape == (0, len(FEW))
    assert clock.calls == 0


def test_ratios_are_rounded_so_that_noise_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    def ratio(seconds: float) -> float:
        monkeypatch.setattr(costs, "_MEASURED", {})
        monkeypatch.setattr(TimeModel, "_time", lambda model, bits: 1.0 if bits == 16 else seconds)
        return float(TimeModel(BitsForRunner()).ratios([{"w": (64, 64)}], [parse("adamw-8")])[0, 0])

    assert ratio(1.26) == ratio(1.34) == pytest.approx(1.3)
    assert ratio(1.22) == pytest.approx(1.2)
    for seconds in (0.31, 0.77, 1.03, 2.49, 10.01):
        assert ratio(seconds) / 0.1 == pytest.approx(round(ratio(seconds) / 0.1), abs=1e-9)
        assert abs(ratio(seconds) - seconds) <= 0.05 + 1e-9


def test_slow_moments_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest of the repeats."""
    times = {16: iter([50.0, 1.0, 1.0, 1.0, 80.0, 1.0]), 8: iter([50.0, 2.0, 2.0, 90.0, 2.0, 2.0])}
    monkeypatch.setattr(costs, "_MEASURED", {})
    monkeypatch.setattr(TimeModel, "_time", lambda model, bits: next(times[bits]))
    ratios = TimeModel(BitsForRunner(), repeats=5).ratios([{"w": (64, 64)}], [REFERENCE, parse("adamw-8")])
    assert ratios.tolist() == [[1.0, 2.0]]


def test_the_first_run_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {16: iter([50.0, 1.0]), 8: iter([10.0, 2.0])}
    monkeypatch.setattr(costs, "_MEASURED", {})
    monkeypatch.setattr(TimeModel, "_time", lambda model, bits: next(times[bits]))
    ratios = TimeModel(BitsForRunner(), repeats=1).ratios([{"w": (64, 64)}], [REFERENCE, parse("adamw-8")])
    assert ratios.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("shape", [*SHAPES.values(), *GPT2_LAYER.values(), (4095,), (4096,), (2, 2048)], ids=str)
def test_tensors_are_timed_in_the_format_they_are_stored_in(shape: tuple[int, ...]) -> None:
    """Small ones keep fp32: rounded up to a size that is not small, they would be timed as int8."""
    timed = shape_class(shape)
    assert (math.prod(timed) < SMALL_NUMEL) == (math.prod(shape) < SMALL_NUMEL)
    for configuration in CATALOG if math.prod(shape) else ():
        if configuration.switches.factored and math.prod(shape) < SMALL_NUMEL:
            continue  # below
        stored, measured = ([type(each) for each in configuration.layout(x).formats] for x in (shape, timed))
        assert stored == measured, f"{configuration}: stored as {stored}, timed as {measured}"


def test_small_matrices_are_timed_factored_where_they_are() -> None:
    layouts = [parse("adafactor").layout(shape) for shape in ((63, 65), shape_class((63, 65)))]
    stored, measured = ([type(each) for each in layout.formats] for layout in layouts)
    assert stored == measured

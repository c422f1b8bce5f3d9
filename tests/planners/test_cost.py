"""Costs of configurations: bytes that an optimizer holds, and times that are estimated, never measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baoc import CATALOG, Block, BlockOptimizer, Configuration, Plan, parse
from baoc.core.configuration import BUDGET_REFERENCE
from baoc.core.spec import Shape
from baoc.optim.state import state_bytes
from baoc.planners import cost as costs
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
FEW = (parse("adamw-32"), BUDGET_REFERENCE, parse("adamw-8"), parse("adafactor"), parse("sgd"))


# ---- memory ----


@pytest.mark.parametrize("configuration", CATALOG, ids=str)
def test_memory_is_what_an_optimizer_holds(configuration: Configuration) -> None:
    params = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    plan = Plan((Block("all", configuration, SHAPES),))
    optimizer = BlockOptimizer(params.items(), plan=plan, lr=1e-3)
    [[promised]] = costs.memory([SHAPES], [configuration])
    assert promised == state_bytes(optimizer) == plan.state_bytes
    for param in params.values():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert state_bytes(optimizer) == promised


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


def test_the_papers_ratios_are_those_of_bytes_on_a_gpu() -> None:
    [row] = costs.update_ratios([GPT2], FEW)
    assert row[FEW.index(BUDGET_REFERENCE)] == 1.0
    assert row[0] == pytest.approx(28 / 20, rel=1e-2) and row[-1] == pytest.approx(12 / 20, rel=1e-2)
    assert row[2] < 1.0 < row[3], "8 bits move less than 16; Adafactor has no fused kernel"


def test_an_empty_block_costs_what_the_reference_does() -> None:
    assert (costs.update_ratios([{}, {"w": (0, 4)}], FEW) == 1.0).all()
    assert costs.update_ratios([], FEW).shape == (0, len(FEW))


def step_ratios(shapes: list[Shape], configurations: Sequence[Configuration], tokens: int) -> NDArray[np.float64]:
    """The time of a step in which all tensors have one configuration."""
    times = costs.step_times(shapes, [1] * len(shapes), configurations, tokens)
    return times.base + times.updates.sum(axis=0)


@pytest.mark.parametrize("tokens", [1, 512, 65536])
def test_a_step_of_the_reference_takes_one(tokens: int) -> None:
    found = step_ratios(list(GPT2.values()), (BUDGET_REFERENCE, parse("adamw-32"), parse("sgd")), tokens)
    assert found[0] == pytest.approx(1.0)
    assert found[1] > 1.0 > found[2]


def test_equal_tensors_may_be_counted_together() -> None:
    shapes = list(GPT2.values())
    distinct = list(dict.fromkeys(shapes))
    single = costs.step_times(shapes, [1] * len(shapes), FEW, tokens=4096)
    classes = costs.step_times(distinct, [shapes.count(shape) for shape in distinct], FEW, tokens=4096)
    assert classes.base == pytest.approx(single.base)
    for shape, row in zip(distinct, classes.updates):
        assert row == pytest.approx(single.updates[shapes.index(shape)])


@pytest.mark.parametrize("tokens", [512, 4096, 65536])
def test_element_by_element_updates_hardly_show_and_newton_schulz_does(tokens: int) -> None:
    hidden = [shape for name, shape in GPT2.items() if "attn.c" in name or "mlp.c" in name]
    eight, muon = step_ratios(hidden, (parse("adamw-8"), parse("muon-8")), tokens)
    assert eight == pytest.approx(1.0, abs=0.03)
    # 0.76 TFLOP on GPT2-small's hidden matrices, against 6 operations a weight and token
    weights = sum(math.prod(shape) for shape in hidden)
    assert muon - 1 == pytest.approx(0.76e12 / (6 * tokens * weights), rel=0.1)


def test_gpus_compute_the_whole_of_symmetric_products() -> None:
    shapes, muon = list(GPT2.values()), parse("muon-8")
    cpu, cuda = (costs.step_times(shapes, [1] * len(shapes), [muon], 64, 4.0, device) for device in ("cpu", "cuda"))
    assert cuda.updates.sum() > 1.3 * cpu.updates.sum()


def test_faster_devices_make_bytes_more_expensive() -> None:
    shapes, muon = list(GPT2.values()), parse("muon-8")

    def base(operations_per_byte: float) -> float:
        times = costs.step_times(shapes, [1] * len(shapes), [muon], 64, operations_per_byte)
        return times.base

    assert base(4.0) > base(100.0)


class _Moved(TorchDispatchMode):
    """Counts bytes as a GPU moves them that runs one kernel for each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)]
            self.total += sum(each.numel() * each.element_size() for each in tensors)
        return out


def test_unfused_updates_move_the_bytes_that_the_table_has() -> None:
    param = nn.Parameter(torch.randn(512, 512))
    param.grad = torch.randn(512, 512)
    optimizer = torch.optim.Adafactor([param], foreach=False)
    optimizer.step()
    with _Moved() as moved:
        optimizer.step()
    assert moved.total / param.numel() == pytest.approx(costs.GPU_BYTES_UNFUSED["adafactor"], rel=0.01)

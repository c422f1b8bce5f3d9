"""What Triton compiles for GPUs that are not installed, the cost of a step on the host, and the roofline page."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baoc.optim.kernels.triton.families import Family
from baoc.optim.kernels.triton.tables import Tiles
from benchmarks import roofline
from benchmarks.triton_kernels import TARGETS, Compiled, Kernel, compiled, families, kernels_of, problems

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

ADAM8 = Family("adam", "fp32", "fp32", "int8", "int8", shares=True)
REPRESENTATIVES = {
    "fp32": Family("adam", "fp32", "fp32", "fp32", "fp32"),
    "int8": ADAM8,
    "int8, bf16 parameters": ADAM8._replace(param="bf16", grad="bf16"),
    "int8, fp16 parameters": ADAM8._replace(param="fp16", grad="fp16"),
    "int8, fp16 parameters with low bits": ADAM8._replace(param="fp16", grad="fp16", w="8"),
    "int8, not aligned": ADAM8._replace(aligned=False),
    "int4 and factors": ADAM8._replace(m="int4", v="factored", reductions=("both",)),
    "adafactor": Family("adafactor", "bf16", "bf16", v="factored", reductions=("both",), shares=True),
    "a momentum's columns": Family("ahead", "fp32", "bf16", "int8", reductions=("row", "col"), shares=True),
}


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_kernels_compile_without_spills_and_with_vector_loads(name, target):
    """For some families; ``make gpu-check`` covers all of them."""
    for kernel in dict.fromkeys(kernels_of(REPRESENTATIVES[name], Tiles.on(TARGETS[target].threads))):
        made = compiled(kernel, TARGETS[target])
        assert not problems(kernel, TARGETS[target], made), kernel
        assert made.registers <= 96 and made.shared <= 4096


def test_spills_narrow_loads_and_fused_products_are_reported():
    kernel = Kernel("update", (("PARAM", "fp32"), ("GRAD", "bf16"), ("MOVES", True), ("ALIGNED", True)))
    good = Compiled(64, 0, 0, {8: 1, 16: 1}, {16: 1}, 0)
    assert not problems(kernel, TARGETS["sm_90"], good)
    bad = Compiled(64, 8, 0, {4: 1, 8: 1}, {16: 1}, 3)
    assert len(problems(kernel, TARGETS["sm_90"], bad)) == 3


def test_a_configuration_has_one_family_per_state_format():
    """One launch each: for matrices, for large vectors and for small tensors."""
    fp32 = [each for each in families(["adamw-8"]) if (each.param, each.grad, each.aligned) == ("fp32", "fp32", True)]
    assert [(each.m, each.v) for each in fp32] == [("int8", "int8"), ("bf16", "bf16"), ("fp32", "fp32")]


@needs_triton
def test_the_cost_on_the_host_is_measured():
    """In a process of its own: Triton reads ``TRITON_INTERPRET`` when it is imported."""
    measure = "from benchmarks.host import measure; cost = measure('adamw-8', steps=1)"
    code = f"{measure}; print(cost.launches, cost.step > cost.kernel > 0)"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.stdout.split() == ["2", "True"], result.stderr


def test_the_gpu_page_has_the_roofline_that_the_command_prints():
    page = ROOT / "docs" / "gpu.md"
    made = roofline.page(3350.0, 400.0, roofline.RANKS)
    assert page.read_text() == roofline.inserted(page.read_text(), made), "run the command that is named there"
    row = next(row for row in roofline.rows(roofline.MODELS[0], ["adamw-32"], 4))
    numel = sum(torch.Size(shape).numel() for shape in roofline.MODELS[0].shapes().values())
    assert (numel, row.moved_bytes, row.operations) == (6_738_415_616, 28 * numel, 0)

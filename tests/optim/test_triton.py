"""The Triton kernels without a GPU: in Triton's interpreter, and when ``kernel="auto"`` chooses them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import baoc
from baoc import BlockOptimizer
from baoc.core.spec import Reach
from baoc.optim import kernels
from baoc.optim.kernels import triton as triton_kernels
from baoc.optim.kernels.triton.families import Family, Form, form
from baoc.optim.kernels.triton.tables import Tiles, workspace
from baoc.optim.kernels.triton.verify import Trial, differences, small_shape
from baoc.tools import cli
from tests.cases import CONFIGURATIONS, SHAPES

ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda:0")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def interpreted(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@needs_triton
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("interpreted", "equals_eager and adam"),
        ("interpreted", "equals_eager and not adam"),
        ("interpreted", "not equals_eager"),
        ("steps", ""),
        ("verify", ""),
    ],
)
def test_in_the_interpreter(name, part):
    """In a process of its own: Triton reads ``TRITON_INTERPRET`` when it is imported."""
    result = interpreted("pytest", "-x", "-p", "no:cacheprovider", "-k", part, f"tests/optim/test_triton_{name}.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout and "skipped" not in result.stdout


@needs_triton
def test_a_tiny_self_check_runs_in_the_interpreter(tmp_path):
    """So users with a GPU can rely on the command."""
    output = tmp_path / "selfcheck.json"
    result = interpreted("baoc", "selfcheck", "--device", "cpu", "--tiny", "--output", str(output))
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads(output.read_text())
    assert content["passed"] and {each["found"] for each in content["equalities"]} == {"as promised"}
    timed = {each["optimizer"]: each["seconds"] for each in content["timings"]}
    assert set(timed) == {"torch AdamW fused", "adamw-16", "adamw-8"} and all(timed.values())
    assert "all 7 comparisons passed" in result.stdout


def test_differences_are_reported_as_far_as_they_break_the_promise():
    """Rounding may change a few codes by one; bits must be equal."""
    one, other, start = (Trial(baoc.parse("adamw-8"), [(64, 80)]) for _ in range(3))
    assert not differences(one, other, "bits", start)
    other.states[0]["m.codes"][0, 0] += 1
    assert list(map(str, differences(one, other, "bits", start))) == ["0.m.codes: 1 of 5120 elements differ"]
    assert not differences(one, other, "rounding", start)
    other.states[0]["m.codes"][0, 0] += 1
    other.params[0][1] += 1e-3
    assert len(differences(one, other, "rounding", start)) == 2


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_every_family_can_be_verified_on_a_small_tensor(configuration):
    """Whatever tensor needs the family, and wherever it is stored."""
    dtypes = itertools.product((torch.float32, torch.bfloat16), repeat=2)
    aligned_shapes = [(4096, 2), (512, 16), (256, 32), (64, 80), (4096,), (4, 16), (4, 4), (16,)]
    shapes = [*aligned_shapes, *(shape for shape in SHAPES.values() if 0 not in shape)]
    for shape, pair in itertools.product(shapes, dtypes):
        layout = configuration.layout(shape)
        for use in ("direction", "move") if layout.reach is Reach.MATRIX else ("step",):
            found = form(layout, torch.Size(shape or (1,)), *pair, use)
            for aligned in {found.family.aligned, False} if isinstance(found, Form) else ():
                family = found.family._replace(aligned=aligned)
                small = small_shape(family, layout.configuration, pair, use)
                assert math.prod(small) < 1 << 16
    with pytest.raises(LookupError, match="no small tensor of sgd is of the family adam"):
        small_shape(Family("adam", "fp32", "fp32"), baoc.parse("sgd"), (torch.float32, torch.float32), "step")


def test_a_self_check_without_a_gpu_says_what_to_do(monkeypatch, capsys):
    monkeypatch.delenv(triton_kernels.INTERPRETER, raising=False)
    assert cli.main(["selfcheck", "--device", "cpu"]) == 2
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err or importlib.util.find_spec("triton") is None


def test_sums_take_little_memory():
    family = Family("adam", "fp32", "fp32", "int4", "factored", reductions=("both",), shares=True)
    needed = workspace(Form(family, (), 4096, 11008), Tiles.on(32))
    assert sum((*needed.values.values(), *needed.tickets.values())) * 4 < 0.05 * 4096 * 11008


def test_it_is_the_default_on_gpus_and_says_why_it_cannot_run(monkeypatch):
    monkeypatch.delenv(triton_kernels.INTERPRETER, raising=False)
    monkeypatch.setattr(triton_kernels.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'baoc[triton]'" in str(triton_kernels.obstacle(CUDA))
    monkeypatch.undo()
    assert "CUDA and ROCm" in str(triton_kernels.obstacle(torch.device("xpu")))
    monkeypatch.setenv(triton_kernels.INTERPRETER, "1")
    assert "memory of CPUs only" in str(triton_kernels.obstacle(CUDA)) or not importlib.util.find_spec("triton")


@needs_triton
def test_auto_takes_it_on_a_gpu_and_not_on_a_cpu(monkeypatch):
    monkeypatch.delenv(triton_kernels.INTERPRETER, raising=False)
    kernels.choose.cache_clear()
    monkeypatch.setattr(triton_kernels.kernel, "LaunchMemory", lambda device: None)  # which would allocate there
    assert str(kernels.choose("auto", CUDA)) == "triton on cuda:0: one launch for all tensors of a kind"
    kernels.choose.cache_clear()
    assert kernels.choose("auto", torch.device("cpu")).name != "triton"
    param = torch.nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"kernel='triton' cannot run on cpu.*TRITON_INTERPRET=1.*Use kernel='auto'"):
        BlockOptimizer([param], kernel="triton").step()

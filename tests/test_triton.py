"""The Triton kernels without a GPU: in Triton's interpreter, compiled for GPUs that are not there, and by name."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import baoc
from baoc import BlockOptimizer, cli
from baoc.optim import kernels
from baoc.optim.kernels import triton as triton_kernels
from baoc.optim.kernels.triton.families import Family, Form
from baoc.optim.kernels.triton.tables import Tiles, room
from baoc.selfcheck.equality import Trained, differences
from benchmarks import roofline
from benchmarks.triton_kernels import TARGETS, Compiled, Kernel, compiled, families, kernels_of, problems

ROOT = Path(__file__).parents[1]
CUDA = torch.device("cuda:0")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

ADAM8 = Family("adam", "fp32", "fp32", "int8", "int8", shares=True)
REPRESENTATIVES = {
    "fp32": Family("adam", "fp32", "fp32", "fp32", "fp32"),
    "int8": ADAM8,
    "int8, bf16 parameters": ADAM8._replace(param="bf16", grad="bf16"),
    "int8, not aligned": ADAM8._replace(aligned=False),
    "int4 and factors": ADAM8._replace(m="int4", v="factored", turns=("both",)),
    "adafactor": Family("adafactor", "bf16", "bf16", v="factored", turns=("both",), shares=True),
    "a momentum's columns": Family("ahead", "fp32", "bf16", "int8", turns=("row", "col"), shares=True),
}


def interpreted(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@needs_triton
@pytest.mark.parametrize("part", ["equals_eager and adam", "equals_eager and not adam", "not equals_eager"])
def test_in_the_interpreter(part):
    """In a process of its own: triton decides when it is imported."""
    result = interpreted("pytest", "-x", "-p", "no:cacheprovider", "-k", part, "tests/test_triton_interpreted.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout and "skipped" not in result.stdout


@needs_triton
def test_a_tiny_self_check_runs_in_the_interpreter(tmp_path):
    """So that it is known to work where somebody has a GPU."""
    output = tmp_path / "selfcheck.json"
    result = interpreted("baoc", "selfcheck", "--device", "cpu", "--tiny", "--output", str(output))
    assert result.returncode == 0, result.stdout + result.stderr
    content = json.loads(output.read_text())
    assert content["passed"] and {each["found"] for each in content["equalities"]} == {"as promised"}
    timed = {each["optimizer"]: each["seconds"] for each in content["timings"]}
    assert set(timed) == {"torch AdamW fused", "adamw-16", "adamw-8"} and all(timed.values())
    assert "all 7 comparisons passed" in result.stdout


def test_differences_are_found():
    """Of the kind that is promised: bits, or codes that may be one apart here and there."""
    one, other, start = (Trained(baoc.parse("adamw-8"), [(64, 80)]) for _ in range(3))
    assert not differences(one, other, "bits", start)
    other.states[0]["m.codes"][0, 0] += 1
    assert differences(one, other, "bits", start) == ["0.m.codes: 1 of 5120 differ"]
    assert not differences(one, other, "rounding", start)
    other.states[0]["m.codes"][0, 0] += 1
    other.params[0][1] += 1e-3
    assert len(differences(one, other, "rounding", start)) == 2


def test_a_self_check_without_a_gpu_says_what_to_do(monkeypatch, capsys):
    monkeypatch.delenv(triton_kernels.INTERPRETER, raising=False)
    assert cli.main(["selfcheck", "--device", "cpu"]) == 2
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err or importlib.util.find_spec("triton") is None


def test_the_page_about_gpus_has_the_roofline_that_is_computed():
    page = ROOT / "docs" / "gpu.md"
    made = roofline.page(3350.0, 400.0, roofline.RANKS)
    assert page.read_text() == roofline.inserted(page.read_text(), made), "run the command that is named there"
    row = next(row for row in roofline.rows(roofline.MODELS[0], ["adamw-32"], 4))
    numel = sum(torch.Size(shape).numel() for shape in roofline.MODELS[0].shapes().values())
    assert (numel, row.moved_bytes, row.operations) == (6_738_415_616, 28 * numel, 0)


@needs_triton
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_it_compiles_to_what_a_gpu_likes(name, target):
    """``make gpu-check`` does so for every family."""
    for kernel in dict.fromkeys(kernels_of(REPRESENTATIVES[name], Tiles.on(TARGETS[target].threads))):
        made = compiled(kernel, TARGETS[target])
        assert not problems(kernel, TARGETS[target], made), kernel
        assert made.registers <= 96 and made.shared <= 4096


def test_problems_are_found():
    kernel = Kernel("update", (("PARAM", "fp32"), ("GRAD", "bf16"), ("MOVES", True), ("ALIGNED", True)))
    good = Compiled(64, 0, 0, {8: 1, 16: 1}, {16: 1}, 0)
    assert not problems(kernel, TARGETS["sm_90"], good)
    bad = Compiled(64, 8, 0, {4: 1, 8: 1}, {16: 1}, 3)
    assert len(problems(kernel, TARGETS["sm_90"], bad)) == 3


def test_families_are_few():
    """A launch for each: a plan of one configuration has one for its matrices and one for its vectors."""
    fp32 = [each for each in families(["adamw-8"]) if (each.param, each.grad, each.aligned) == ("fp32", "fp32", True)]
    assert [(each.m, each.v) for each in fp32] == [("int8", "int8"), ("bf16", "bf16"), ("fp32", "fp32")]


def test_sums_take_little_memory():
    needed = room(Form(REPRESENTATIVES["int4 and factors"], (), 4096, 11008), Tiles.on(32))
    assert sum((*needed.numbers.values(), *needed.tickets.values())) * 4 < 0.05 * 4096 * 11008


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
    monkeypatch.setattr(triton_kernels, "Memory", lambda device: None)  # which would allocate there
    assert str(kernels.choose("auto", CUDA)) == "triton on cuda:0: one launch for all tensors of a kind"
    kernels.choose.cache_clear()
    assert kernels.choose("auto", torch.device("cpu")).name != "triton"
    param = torch.nn.Parameter(torch.ones(4))
    param.grad = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"kernel='triton' cannot run on cpu.*TRITON_INTERPRET=1.*Use kernel='auto'"):
        BlockOptimizer([param], kernel="triton").step()

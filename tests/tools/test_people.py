"""What an optimizer prints: its plan, itself, and which kernel updates what."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

import baoc
from baoc import BAOC, BlockOptimizer, PaperPlanner
from baoc.optim.kernels import native
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.native import words
from baoc.optim.state import new_state
from tests.cases import SHAPES, by_configuration

RUN = """
import logging, os, torch, baoc
{before}
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
optimizer = baoc.BAOC(model, memory=0.5{settings})
for _ in range(4):
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
"""


def seen(before: str = "", settings: str = "") -> list[str]:
    """What a script writes to stderr."""
    ran = subprocess.run(
        [sys.executable, "-c", RUN.format(before=before, settings=settings)], capture_output=True, text=True, check=True
    )
    assert not ran.stdout
    return ran.stderr.splitlines()


def test_a_plan_is_announced_in_one_line():
    [line] = seen(settings=", planner=baoc.EffectPlanner(tokens=4096)")  # else two tokens change it
    assert line.startswith("baoc: ") and "of AdamW16's" in line and "print(optimizer.plan)" in line
    warming_up, planned = seen(settings=", planner=baoc.PaperPlanner(warmup=2, time=50.0)")
    assert "until the warm-up ends" in warming_up and "until" not in planned and "of AdamW16's" in planned
    assert max(map(len, (line, warming_up, planned))) < 200


@pytest.mark.parametrize(
    ("before", "settings"),
    [
        ("", ", verbose=False"),
        ("os.environ['BAOC_QUIET'] = '1'", ""),
        ("os.environ['RANK'] = '1'", ""),
        ("logging.basicConfig()", ""),
    ],
)
def test_nothing_is_printed_if_it_is_not_wanted(before, settings):
    assert seen(before, settings) == []


def test_with_logging_a_plan_is_a_record(caplog):
    model = nn.Linear(64, 64)
    with caplog.at_level(logging.INFO, logger="baoc"):
        optimizer = BAOC(model, memory=0.8, planner=PaperPlanner(warmup=1, time=50.0))
        assert "until the warm-up ends" in caplog.messages[-1]
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    assert caplog.messages[-1].startswith("new plan at step ") and "of AdamW16's" in caplog.messages[-1]


# ---- printing ----


def test_an_optimizer_prints_in_a_few_lines():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(50)))
    for optimizer in (BlockOptimizer(model, plan="muon-8"), BAOC(model, memory=0.5, verbose=False)):
        lines = str(optimizer).splitlines()
        assert len(lines) == 3 and max(map(len, lines)) <= 160
        assert "lr: 0.001" in lines[1] and "newton_schulz" not in lines[1]
    assert "update_rms: 0.2" in str(BlockOptimizer(model, plan="muon-8", update_rms=0.2)), "what is not the default"


def test_what_a_wrapper_prints_is_short_too():
    """Accelerate's has torch's own representation of the groups, after a round trip of the state dict."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(50)))
    optimizer = BAOC(model, memory=0.5, verbose=False)
    optimizer.load_state_dict(optimizer.state_dict())
    text = torch.optim.Optimizer.__repr__(optimizer)
    assert len(text.replace(str([name for name, _ in model.named_parameters()]), "")) < 1200


# ---- errors ----


def test_a_method_is_not_its_parameters():
    model = nn.Linear(8, 8)
    for optimizer in (BAOC, BlockOptimizer):
        with pytest.raises(TypeError, match=r"Call it first, parameters\(\.\.\.\), or pass the model itself"):
            optimizer(model.parameters)


# ---- kernels ----


def job_of(configuration: baoc.Configuration, param: torch.Tensor, grad: torch.Tensor) -> Job:
    from baoc.core.spec import Hyper

    layout = configuration.layout(tuple(param.shape))
    return Job.of(layout, param, grad, new_state(layout, param.device), Hyper(lr=0.0))


VIEWS = {
    "plain": lambda tensor: tensor,
    "fp64": lambda tensor: tensor.double(),
    "fp16": lambda tensor: tensor.half(),
    "bf16": lambda tensor: tensor.bfloat16(),
    "turned": lambda tensor: tensor.transpose(0, -1).contiguous().transpose(0, -1),
    "channels last": lambda tensor: tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor,
}


@pytest.mark.skipif(words.obstacle() is not None, reason="the native kernels were not built")
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(**by_configuration)
def test_what_is_said_to_run_natively_does(configuration, view):
    kernel = native.NativeKernel()
    for shape in SHAPES.values():
        if not shape or 0 in shape:
            continue
        param, grad = VIEWS[view](torch.ones(shape)), VIEWS[view](torch.ones(shape))
        job = job_of(configuration, param, grad)
        ahead = "AHEAD" if type(job.layout.mechanism) in words.AHEAD else ""
        is_left = bool(kernel.serve([job], ahead))
        reason = words.shortfall(job)
        assert is_left == (reason is not None), (shape, reason)
        assert view != "fp64" or is_left, "or there would be nothing to say"


def test_the_kernel_says_what_it_leaves_and_why():
    params = {"plain": nn.Parameter(torch.ones(80, 80)), "small": nn.Parameter(torch.ones(40, 40))}
    optimizer = BlockOptimizer(params.items(), plan="adamw[m=fp8,v=fp8]")
    assert "avx" in optimizer.kernel or "plain" in optimizer.kernel or "not built" in optimizer.kernel
    if words.obstacle() is None:
        assert "where there is no C code for the FP8Format of 'm' (1, such as 'small')" in optimizer.kernel
    assert "several times slower" not in BlockOptimizer([params["plain"]], kernel="eager").kernel

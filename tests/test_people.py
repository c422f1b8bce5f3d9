"""What a person sees without asking, and what they are told when something is not as they think."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

import baoc
from baoc import BAOC, BlockOptimizer, PlanError, ProfileError
from baoc.optim.kernels import native
from baoc.optim.kernels.job import Job
from baoc.optim.state import new_state
from tests.cases import SHAPES, by_configuration

RUN = """
import logging, os, torch, baoc
{before}
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
optimizer = baoc.BAOC(model, memory=0.5, warmup=2{settings})
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


def test_two_lines_are_seen_unless_someone_says_otherwise():
    begins, planned = seen()
    assert begins.startswith("baoc: plans after 2 steps; until then ") and "of AdamW16's" in begins
    assert planned.startswith("baoc: planned after 2 steps: ") and "print(optimizer.plan)" in planned
    assert max(map(len, (begins, planned))) < 200


@pytest.mark.parametrize(
    ("before", "settings"),
    [
        ("", ", quiet=True"),
        ("os.environ['BAOC_QUIET'] = '1'", ""),
        ("os.environ['RANK'] = '1'", ""),
        ("logging.basicConfig()", ""),
    ],
)
def test_nothing_is_seen_where_nobody_wants_it(before, settings):
    assert seen(before, settings) == []


def test_where_logging_is_set_up_it_is_a_record(caplog):
    model = nn.Linear(64, 64)
    optimizer = BAOC(model, memory=0.8, warmup=1)
    model(torch.ones(1, 64)).sum().backward()
    with caplog.at_level(logging.INFO, logger="baoc"):
        optimizer.step()
    assert [message for message in caplog.messages if message.startswith("planned after 1 step: ")]


# ---- printing ----


def test_an_optimizer_prints_in_a_few_lines():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(50)))
    for optimizer in (BlockOptimizer(model, plan="muon-8"), BAOC(model, memory=0.5, quiet=True)):
        lines = str(optimizer).splitlines()
        assert len(lines) == 3 and max(map(len, lines)) <= 140
        assert "lr: 0.001" in lines[1] and "newton_schulz" not in lines[1]
    assert "update_rms: 0.2" in str(BlockOptimizer(model, plan="muon-8", update_rms=0.2)), "what is not the default"


def test_what_a_wrapper_prints_is_short_too():
    """Accelerate's has torch's own representation of the groups, after a round trip of the state dict."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(50)))
    optimizer = BAOC(model, memory=0.5, quiet=True)
    optimizer.load_state_dict(optimizer.state_dict())
    text = torch.optim.Optimizer.__repr__(optimizer)
    assert len(text.replace(str([name for name, _ in model.named_parameters()]), "")) < 1200


# ---- errors ----


@pytest.mark.parametrize("memory", [50, 2, 50.0])
def test_a_budget_in_percent_is_told_from_one_in_bytes(memory):
    with pytest.raises(PlanError, match=rf"memory={memory / 100:g}0* or '{memory:g}%'"):
        BAOC(nn.Linear(64, 64), memory=memory)


def test_a_method_is_not_its_parameters():
    model = nn.Linear(8, 8)
    for optimizer in (BAOC, BlockOptimizer):
        with pytest.raises(TypeError, match=r"pass parameters\(\.\.\.\), or the model itself"):
            optimizer(model.parameters)


@pytest.mark.parametrize(("wrong", "right"), [("steps", "warmup"), ("memroy", "memory"), ("learning_rate", "lr")])
def test_an_argument_that_is_not_there_has_a_neighbour_that_is(wrong, right):
    with pytest.raises(TypeError, match=f"BAOC has no argument '{wrong}'. Did you mean '{right}'?"):
        BAOC(nn.Linear(8, 8), **{wrong: 3})


def test_a_profile_that_is_not_there_says_why():
    model = nn.Linear(64, 64)
    early = BAOC(model, memory=0.8, quiet=True)
    assert not early.has_profile
    with pytest.raises(ProfileError, match="no profile yet"):
        early.profile.save("never.pt")
    with pytest.raises(ProfileError, match="no room for samples"):
        _ = BAOC(model, memory=0.0, quiet=True).profile
    model(torch.ones(1, 64)).sum().backward()
    early.step()
    assert early.has_profile and early.profile.steps == 1


def test_every_argument_of_baoc_has_a_name_that_is_known():
    """The list that errors are made from is that of the constructor."""
    import inspect

    from baoc.configurator.optimizer import _ARGUMENTS

    named = [name for name, each in inspect.signature(BAOC).parameters.items() if each.kind != each.VAR_KEYWORD]
    assert set(named) == set(_ARGUMENTS)


# ---- kernels ----


def job_of(configuration: baoc.Configuration, param: torch.Tensor, grad: torch.Tensor) -> Job:
    from baoc.core.spec import Hyper

    layout = configuration.layout(tuple(param.shape))
    return Job.of(layout, param, grad, new_state(layout, param.device), Hyper(lr=0.0))


VIEWS = {
    "plain": lambda tensor: tensor,
    "fp16": lambda tensor: tensor.half(),
    "bf16": lambda tensor: tensor.bfloat16(),
    "turned": lambda tensor: tensor.transpose(0, -1).contiguous().transpose(0, -1),
    "channels last": lambda tensor: tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor,
}


@pytest.mark.skipif(native.obstacle() is not None, reason="the native kernels were not built")
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(**by_configuration)
def test_what_is_said_to_run_natively_does(configuration, view):
    kernel = native.NativeKernel()
    for shape in SHAPES.values():
        if not shape or 0 in shape:
            continue
        param, grad = VIEWS[view](torch.ones(shape)), VIEWS[view](torch.ones(shape))
        job = job_of(configuration, param, grad)
        ahead = "AHEAD" if type(job.layout.mechanism) in native._AHEAD else ""
        is_left = bool(kernel.serve([job], ahead))
        reason = native.shortfall(job.layout, param, grad, job.place)
        assert is_left == (reason is not None), (shape, reason)
        assert view != "fp16" or is_left, "or there would be nothing to say"


def test_the_kernel_says_what_it_leaves_and_why():
    params = {"plain": nn.Parameter(torch.ones(80, 80)), "half": nn.Parameter(torch.ones(80, 80).half())}
    optimizer = BlockOptimizer(params.items(), plan="adamw-8")
    assert "avx" in optimizer.kernel or "plain" in optimizer.kernel or "not built" in optimizer.kernel
    if native.obstacle() is None:
        assert "where numbers are torch.float16, neither fp32 nor bf16 (1, such as 'half')" in optimizer.kernel
    assert "several times slower" not in BlockOptimizer([params["plain"]], kernel="eager").kernel

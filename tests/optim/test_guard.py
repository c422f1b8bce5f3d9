"""Non-finite gradients are found and counted, and a skipped step changes nothing."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
from torch import nn

import baoc
from baoc import BlockOptimizer
from tests.cases import by_configuration, gradients
from tests.ranks import together

SHAPE = (64, 300)
BAD = {"infinite": math.inf, "no number": math.nan}


def poisoned(shape: tuple[int, ...], steps: int, at: tuple[int, ...], value: float) -> list[torch.Tensor]:
    stream = list(gradients(shape, steps))
    for step in at:
        stream[step][3, 77] = value
    return stream


@pytest.mark.parametrize("kernel", ["native", "eager"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(**by_configuration)
def test_a_skipped_step_changes_neither_weights_nor_state(configuration, bad, kernel):
    """Steps between two bad ones go on as if those had not come: ages too, or the next would differ."""
    at, stream = (0, 3), poisoned(SHAPE, 6, (0, 3), BAD[bad])
    runs = []
    for grads in (stream, [grad for step, grad in enumerate(stream) if step not in at]):
        param = nn.Parameter(torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)))
        optimizer = BlockOptimizer([param], plan=configuration, kernel=kernel, on_nonfinite="skip")
        for grad in grads:
            param.grad = grad
            optimizer.step()
        runs.append((optimizer, param))
    (struck, param), (spared, untouched) = runs
    assert torch.equal(param, untouched)
    left, right = (run.state_dict()["state"].get(0, {}) for run in (struck, spared))
    assert left.keys() == right.keys()
    for key, held in left.items():
        assert torch.equal(held, right[key]) if torch.is_tensor(held) else held == right[key], key
    counts = struck.metrics()
    assert (counts["nonfinite_steps"], counts["skipped_steps"]) == (2, 2)


def stepped(policy: str, *bad: str, shape: tuple[int, ...] = SHAPE) -> tuple[BlockOptimizer, dict[str, nn.Parameter]]:
    params = {name: nn.Parameter(torch.ones(shape)) for name in ("a", "b", "c", "d", "e")}
    optimizer = BlockOptimizer(params.items(), plan="adamw-8", on_nonfinite=policy)
    for name, param in params.items():
        param.grad = torch.ones(shape)
        if name in bad:
            param.grad[2, 5] = math.nan
    optimizer.step()
    return optimizer, params


def test_by_default_the_step_is_made_counted_and_said_once(caplog):
    with caplog.at_level(logging.WARNING, logger="baoc"):
        optimizer, params = stepped("step", "b")
        optimizer.step()
    assert [record.getMessage() for record in caplog.records if "on_nonfinite='skip'" in record.getMessage()] == [
        caplog.records[0].getMessage()
    ]
    assert "in 'b': the step is made, as in torch.optim" in caplog.text
    assert params["b"].isnan().sum() == 1, "as in torch"
    assert optimizer.metrics()["nonfinite_steps"] == 2 and optimizer.metrics()["skipped_steps"] == 0


def test_raise_stops_before_anything_has_changed():
    with pytest.raises(FloatingPointError, match=r"not finite in 'a', 'b', 'c' and 1 more\. Nothing was changed"):
        stepped("raise", "a", "b", "c", "d")
    optimizer, params = stepped("raise")
    before = copy.deepcopy(params["e"])
    params["e"].grad[0, 0] = math.inf
    with pytest.raises(FloatingPointError, match="in 'e'"):
        optimizer.step()
    assert torch.equal(params["e"], before) and optimizer.metrics()["nonfinite_steps"] == 1


def test_large_gradients_are_no_reason_to_skip():
    """Their squares overflow, and so does the norm that is looked at first."""
    for value, clipped in ((1e5, 0.0), (1e18, 1.0), (3e38, 1.0)):
        param = nn.Parameter(torch.ones(SHAPE))
        optimizer = BlockOptimizer([param], plan="adamw-8", on_nonfinite="skip")
        param.grad = torch.ones(SHAPE)
        param.grad[0, 0] = value
        optimizer.step()
        metrics = optimizer.metrics()
        assert (metrics["skipped_steps"], metrics["clipped_steps"]) == (0.0, clipped)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_every_dtype_is_looked_at(dtype):
    params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((), (0,), (80, 80))]
    optimizer = BlockOptimizer(params, on_nonfinite="skip")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.metrics()["nonfinite_steps"] == 0
    params[0].grad = torch.full_like(params[0], math.inf)
    optimizer.step()
    assert optimizer.metrics()["skipped_steps"] == 1


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match=r"on_nonfinite must be one of 'step', 'skip', 'raise', got 'ignore'"):
        BlockOptimizer(nn.Linear(2, 2), on_nonfinite="ignore")


def test_counts_are_copied():
    optimizer, _ = stepped("skip", "a")
    assert copy.deepcopy(optimizer).metrics()["skipped_steps"] == 1


# ---- metrics ----


@pytest.mark.parametrize("plan", ["adamw-32", "adamw-8", "muon-8 else adamw-32", "sgdwm-16"])
def test_the_update_rms_is_that_of_the_last_update(plan):
    weight, thin = nn.Parameter(torch.randn(20, 20)), nn.Parameter(torch.randn(7))
    optimizer = BlockOptimizer([("weight", weight), ("thin", thin)], plan=plan)
    assert not [key for key in optimizer.metrics() if key.startswith("update_rms")], "nobody has watched yet"
    for grads in zip(gradients((20, 20), 3), gradients((7,), 3)):
        before = [weight.detach().clone(), thin.detach().clone()]
        weight.grad, thin.grad = grads
        optimizer.step()
    moved = {"weight": weight.detach() - before[0], "thin": thin.detach() - before[1]}
    for block in optimizer.plan.blocks:
        elements = torch.cat([moved[name].flatten() for name in block.parameters])
        expected = elements.square().mean().sqrt().item()
        assert optimizer.metrics()[f"update_rms/{block.name}"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kernel", ["native", "eager"])
@pytest.mark.parametrize("plan", ["adamw-8", "lion-4"])
def test_groups_that_underflow_are_counted(plan, kernel):
    """One element in each group that dwarfs the others leaves them no codes; even ones, and zeros, are fine."""
    shape = (64, 512)
    for kind, low, high in (("even", 0.0, 0.1), ("zero", 0.0, 0.0), ("dwarfed", 0.9, 1.0)):
        param = nn.Parameter(torch.zeros(shape))
        optimizer = BlockOptimizer([param], plan=plan, kernel=kernel)
        for grad in gradients(shape, 4):
            param.grad = torch.zeros(shape) if kind == "zero" else grad
            if kind == "dwarfed":
                param.grad[:, ::64] = 1e9
            optimizer.step()
        assert low <= optimizer.metrics()["underflow/all"] <= high, kind


def test_metrics_are_plain_numbers_that_count_what_is_there():
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    optimizer = BlockOptimizer(model, plan="adamw-8")
    for _ in range(3):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        metrics = optimizer.metrics()
        assert all(type(value) is float and math.isfinite(value) for value in metrics.values())
        assert metrics["state_bytes"] == baoc.state_bytes(optimizer) == optimizer.plan.state_bytes
    assert optimizer.metrics() == metrics, "asking changes nothing"


# ---- ranks ----


def on_ranks(rank: int) -> dict[str, object]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Linear(64, 65)  # an odd row, and a bias that the last rank may have none of
    fully_shard(model)
    optimizer = BlockOptimizer(model, plan="adamw-8", on_nonfinite="skip")
    for step in range(3):
        model(torch.ones(2, 64)).sum().backward()
        local = model.weight.grad.to_local()
        if step == 1 and rank == 1:
            local[0, 0] = math.nan
        optimizer.step()
        optimizer.zero_grad()
    return {**optimizer.metrics(), "age": optimizer.state[model.weight]["m.age"]}


def test_ranks_decide_alike(tmp_path):
    """One rank has the bad gradient, and both leave the step out."""
    for found in together(on_ranks, 2, tmp_path):
        assert (found["nonfinite_steps"], found["skipped_steps"], found["age"]) == (1.0, 1.0, 2)

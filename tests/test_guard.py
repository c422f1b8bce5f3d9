"""Gradients that are no numbers are seen and counted, and a step that is skipped is as if it had not been."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
from torch import nn

import baoc
from baoc import BAOC, Block, BlockOptimizer, Plan, parse
from baoc.configurator.promotion import EARLY, MANY, promoted
from experiments import corpus as corpora
from experiments import strained
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
    assert "in 'b': the step is made all the same" in caplog.text
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
    with pytest.raises(ValueError, match=r"on_nonfinite is 'ignore'\. Choose one of 'step', 'skip', 'raise'"):
        BlockOptimizer(nn.Linear(2, 2), on_nonfinite="ignore")


def test_counts_are_copied():
    optimizer, _ = stepped("skip", "a")
    assert copy.deepcopy(optimizer).metrics()["skipped_steps"] == 1


def test_a_skipped_step_is_none_of_the_warmup():
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 96), nn.Linear(96, 50))
    optimizer = BAOC(model, memory=0.8, warmup=3, on_nonfinite="skip", quiet=True)
    for bad in (True, False, True, False, False):
        loss = nn.functional.cross_entropy(model(torch.arange(32)), torch.arange(32))
        (loss * math.nan if bad else loss).backward()
        assert optimizer.metrics()["warmup"] == 1
        optimizer.step()
        optimizer.zero_grad()
    metrics = optimizer.metrics()
    assert (metrics["steps"], metrics["skipped_steps"], metrics["warmup"]) == (3, 2, 0)
    assert optimizer.profile.facts.tokens == 32, "tokens are those of one step"


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
def test_strained_groups_are_counted(plan, kernel):
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
        assert low <= optimizer.metrics()["strained/all"] <= high, kind


def test_metrics_are_plain_numbers_that_count_what_is_there():
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    optimizer = BAOC(model, memory=0.5, warmup=2, quiet=True)
    for _ in range(3):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        metrics = optimizer.metrics()
        assert all(type(value) is float and math.isfinite(value) for value in metrics.values())
        assert metrics["state_bytes"] == baoc.state_bytes(optimizer) <= metrics["budget_bytes"]
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


# ---- promotion ----


def strained_run(**settings: object) -> BAOC:
    """Gradients of which one column in 64 dwarfs the others, through a plan of narrow codes and past two looks."""
    model = nn.Sequential(nn.Linear(128, 64, bias=False), nn.Linear(64, 64, bias=False))
    optimizer = BAOC(model, memory=2.0, warmup=1, quiet=True, **settings)
    for step in range(1 + EARLY[-1]):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
            param.grad[:, ::64] = 1e4
        optimizer.step()
        if step == 0:
            optimizer.set_plan("adamw[m=int4,v=factored]")
    return optimizer


def test_a_strained_block_is_promoted_within_the_budget():
    optimizer = strained_run()
    [block] = optimizer.plan.blocks
    assert str(block.configuration) == "adamw[m=int8,v=factored]"
    assert "promoted from adamw[m=int4,v=factored]" in block.why and "strained" in block.why
    assert optimizer.metrics()["promotions"] == 1
    assert optimizer.plan.state_bytes == sum(
        held.numel() * held.element_size()
        for param, state in optimizer.state.items()
        for key, held in state.items()
        if torch.is_tensor(held)
    )
    assert next(iter(optimizer.state.values()))["m.age"] == 1 + EARLY[-1], "state is inherited"
    again = copy.deepcopy(optimizer)
    again.load_state_dict(optimizer.state_dict())
    assert again.plan.to_json() == optimizer.plan.to_json() and again.metrics()["promotions"] == 1


@pytest.mark.parametrize(
    "settings",
    [{"promote": False}, {"forbid": "sgd"}, {"candidates": ["adamw[m=int4,v=factored]", "adamw-32"]}],
    ids=str,
)
def test_nothing_is_promoted_where_that_was_not_meant(settings):
    optimizer = strained_run(**settings)
    assert [str(block.configuration) for block in optimizer.plan.blocks] == ["adamw[m=int4,v=factored]"]
    assert optimizer.metrics()["promotions"] == 0


def test_strain_shows_in_the_first_step_of_what_was_measured():
    """Of the small GPT, as it is and with the gradients that docs/results/strained.md is about."""
    text = corpora.load()
    for factor, is_strained in ((1, False), (1000, True)):
        make = strained.with_plan("adamw[m=int4,v=factored]")
        found = strained.on_text(text, make, seed=0, steps=1, factor=factor, promotes=True)
        assert (found.first >= MANY, found.promotions) == (is_strained, int(is_strained))
        assert is_strained or found.first == 0


def test_a_warmup_is_looked_after_too():
    """Its plan is made without gradients, and fifty steps are enough to spoil weights."""
    model = nn.Sequential(nn.Linear(128, 64, bias=False), nn.Linear(64, 64, bias=False))
    optimizer = BAOC(model, memory=2.0, warmup=5, warmup_base="adamw[m=int4,v=factored]", quiet=True)
    for param in model.parameters():
        param.grad = torch.randn(param.shape)
        param.grad[:, ::64] = 1e4
    optimizer.step()
    assert optimizer.metrics()["warmup"] == 1 and optimizer.metrics()["promotions"] == 1
    assert {str(block.configuration) for block in optimizer.plan.blocks} == {"adamw[m=int8,v=factored]"}


def test_the_most_strained_is_promoted_first_and_only_into_room():
    shapes = {"a": (64, 128), "b": (64, 128), "c": (64, 128)}
    blocks = tuple(Block(name, parse("muon-4"), {name: shape}) for name, shape in shapes.items())
    extra = parse("muon-8").state_bytes((64, 128)) - parse("muon-4").state_bytes((64, 128))
    shares = {"a": 0.6, "b": 0.9, "c": 0.2}
    for room, expected in ((0, []), (extra, ["b"]), (2 * extra, ["b", "a"]), (9 * extra, ["b", "a"])):

        def fits(plan: Plan, most: int = Plan(blocks).state_bytes + room) -> bool:
            return plan.state_bytes <= most

        plan, told = promoted(Plan(blocks), shares, [parse("muon-8")], fits)
        assert [line.partition(":")[0] for line in told] == expected
        assert promoted(Plan(blocks), shares, None, fits)[0] == plan, "or anything"
        assert plan.state_bytes - Plan(blocks).state_bytes <= room

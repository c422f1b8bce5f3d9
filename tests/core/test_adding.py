"""A packed codec, a whole-matrix update rule and a planner are one class each, outside of the package.

They train, checkpoint, migrate, are estimated and planned, and no kernel mistakes them for something that it knows.
"""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import pytest
import torch
from torch import nn

import baoc
from baoc import BAOC, BlockOptimizer, EffectPlanner, PaperPlanner, Plan, parse, state_bytes
from baoc.core.plan import Block
from baoc.optim.kernels import eager
from baoc.tools.estimate import estimate
from tests import toys
from tests.cases import SHAPES, gradients, train
from tests.memory import PeakMemory

CONFIGURATIONS = ("polar[m=fp32]", "polar[m=int8]", "polar[m=nibble]", "adamw[m=nibble,v=int8]", "sgdm[m=halved]")
by_toy = pytest.mark.parametrize("spelling", CONFIGURATIONS)


@pytest.fixture(autouse=True)
def _toys():
    with toys.registered():
        yield


class Net(nn.Module):
    """An embedding, hidden matrices of two shapes, a convolution, a stack of experts, norms and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(128, 64)
        self.hidden = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.conv = nn.Conv1d(64, 64, 3, padding=1)
        self.experts = nn.Parameter(torch.randn(3, 64, 64) / 8)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 128)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.hidden:
            x = x + torch.tanh(layer(self.norm(x)))
        x = x + self.down(torch.relu(self.up(x)))
        x = x + self.conv(x.mT).mT
        return self.head(x + torch.einsum("bsi,eio->bso", x, self.experts) / 3)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens = torch.randint(128, (8, 17), generator=torch.Generator().manual_seed(step % 4))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@by_toy
def test_it_trains_and_holds_what_it_promised(spelling):
    model = Net()
    optimizer = BlockOptimizer(model, lr=1e-2, plan=spelling)
    losses = trained(model, optimizer, range(40))
    assert losses[-1] < 0.7 * losses[0]
    assert state_bytes(optimizer) == optimizer.plan.state_bytes
    assert str(parse(spelling)) == spelling


def test_what_a_mechanism_does_not_suit_gets_its_fallback():
    """Vectors by their shape, embeddings and heads by their role, which a module knows."""
    plan = BlockOptimizer(Net(), plan="polar[m=int8]").plan
    given = {name: str(block.configuration) for block in plan.blocks for name in block.parameters}
    others = {name for name, configuration in given.items() if configuration == "adamw[m=fp32,v=fp32]"}
    assert others == {"embed.weight", "head.weight", *(name for name in given if name.endswith("bias")), "norm.weight"}
    assert given["conv.weight"] == given["experts"] == given["up.weight"] == "polar[m=int8]"
    by_hand = Plan((Block("all", parse("polar[m=int8]"), {"bias": (64,), "weight": (64, 64)}),))
    assert by_hand.state_bytes == 8 * 64 + parse("sgdm-8").state_bytes((64, 64)), "a bias in its block is AdamW's"


def test_settings_belong_to_their_mechanism():
    model = Net()
    optimizer = BlockOptimizer(model, plan="polar", polar_steps=1)
    assert optimizer.param_groups[0]["polar_steps"] == 1
    with pytest.raises(ValueError, match=r"invalid polar_steps: 0\. It must be a whole number >= 1"):
        BlockOptimizer(model, plan="polar", polar_steps=0)
    outcomes = []
    for steps in (1, 6):
        twin = Net()
        trained(twin, BlockOptimizer(twin, plan="polar", polar_steps=steps), range(2))
        outcomes.append(twin.up.weight.detach())
    assert not torch.equal(*outcomes)


def test_equal_shapes_are_finished_in_one_batch(monkeypatch):
    seen = []
    finish = toys.Polar.finish
    monkeypatch.setattr(toys.Polar, "finish", lambda self, x, s: (seen.append(tuple(x.shape)), finish(self, x, s))[1])
    results = []
    for most in (eager.BATCH_NUMEL, 1):
        monkeypatch.setattr(eager, "BATCH_NUMEL", most)
        model = Net()
        trained(model, BlockOptimizer(model, plan="polar[m=int8]"), range(2))
        results.append(dict(model.named_parameters()))
    assert sorted(seen[:4]) == [(1, 64, 96), (1, 64, 192), (1, 96, 64), (6, 64, 64)]
    for one, other in zip(results[0].values(), results[1].values()):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@by_toy
def test_a_checkpoint_resumes_to_the_bit(spelling):
    model = Net()
    optimizer = BlockOptimizer(model, lr=1e-2, plan=spelling)
    trained(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    for plan in (None, spelling):
        file.seek(0)
        twin, (origin, original) = copy.deepcopy(model), copy.deepcopy((model, optimizer))
        resumed = BlockOptimizer(twin, lr=1e-2, plan=plan)
        resumed.load_state_dict(torch.load(file, weights_only=True))
        assert resumed.plan == optimizer.plan
        assert trained(origin, original, range(3, 6)) == trained(twin, resumed, range(3, 6))


@pytest.mark.parametrize("known", ["adamw-32", "adamw-8", "adafactor", "sgdm-8"])
@by_toy
def test_a_migration_there_and_back_keeps_the_length_of_updates(spelling, known):
    shape = (70, 96)
    for old, new in ((known, spelling), (spelling, known)):
        param = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
        optimizer = BlockOptimizer([param], lr=1e-3, weight_decay=0.0, plan=old)
        *first, last, following = gradients(shape, 32)
        train(optimizer, param, iter(first))
        before = _update_rms(optimizer, param, last)
        optimizer.set_plan(new)
        after = _update_rms(optimizer, param, following)
        shares_a_slot = {s.name for s in parse(old).mechanism.slots} & {s.name for s in parse(new).mechanism.slots}
        if shares_a_slot:
            assert before / 2 <= after <= before * 2, f"{old} -> {new}: {before:.3g} -> {after:.3g}"
        assert state_bytes(optimizer) == parse(new).state_bytes(shape)


def _update_rms(optimizer, param, grad) -> float:
    previous = param.detach().clone()
    param.grad = grad
    optimizer.step()
    return (param - previous).square().mean().sqrt().item()


@by_toy
def test_it_is_estimated(spelling):
    shapes = {name: tuple(param.shape) for name, param in Net().named_parameters()}
    [row] = estimate(shapes, [spelling])
    optimizer = BlockOptimizer(Net().named_parameters(), plan=spelling)
    assert row.state_bytes == optimizer.plan.state_bytes


def test_it_is_planned_and_the_plan_trains():
    """As a candidate among others, with gradients and without."""
    model = Net()
    candidates = ("adamw-8", "polar[m=nibble]", "adamw[m=nibble,v=int8]", "sgd")
    planner = PaperPlanner(risk="update", candidates=candidates, time=100.0, warmup=4, lr_match=True)
    optimizer = BAOC(model, lr=1e-2, memory=0.3, planner=planner)
    losses = trained(model, optimizer, range(30))
    assert losses[-1] < 0.8 * losses[0]
    assert optimizer.plan.state_bytes <= 0.3 * optimizer.plan.reference_bytes
    assert any("nibble" in str(block.configuration) for block in optimizer.plan.blocks)
    assert Plan.from_json(optimizer.plan.to_json()) == optimizer.plan
    for other in (replace(planner, risk="paper"), EffectPlanner(time=100.0, candidates=candidates)):
        again = baoc.make_plan(optimizer.statistics, memory=0.3, planner=other)
        assert again.state_bytes <= 0.3 * again.reference_bytes


def test_a_planner_of_ones_own_plans_replans_and_resumes():
    model, twin = Net(), Net()
    optimizer, resumed = (BAOC(each, lr=1e-2, memory=0.6, planner=toys.FirstThatFits()) for each in (model, twin))
    assert {block.configuration for block in optimizer.plan.blocks} == {parse("adamw-8")}
    trained(model, optimizer, range(3))
    assert optimizer.replan(memory=0.4).blocks[0].configuration == parse("adamw[m=int8,v=factored]")
    assert state_bytes(optimizer) == optimizer.plan.state_bytes <= 0.4 * optimizer.plan.reference_bytes
    twin.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.plan == optimizer.plan
    assert trained(model, optimizer, range(3, 6)) == trained(twin, resumed, range(3, 6))
    with pytest.raises(baoc.PlanError, match=r"no plan fits memory=0\.01"):
        optimizer.replan(memory=0.01)


@by_toy
def test_no_kernel_takes_it_for_what_it_knows(spelling):
    """Bitwise what the eager kernel does; under C code that trusts dtypes, these overran their memory."""
    for shape in [*SHAPES.values(), (64, 600)]:
        results = []
        for kernel in ("auto", "eager"):
            param = nn.Parameter(torch.ones(shape))
            optimizer = BlockOptimizer([param], lr=1e-2, plan=f"{spelling} else adamw-32", kernel=kernel)
            train(optimizer, param, gradients(shape, 3))
            results.append(param.detach())
        if parse(spelling).layout(shape).mechanism.name == "polar" or not parse(spelling).layout(shape).shares:
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)  # small tensors are fp32, which C code knows
        else:
            assert torch.equal(*results), shape


def test_a_mechanism_derived_from_a_known_one_is_not_taken_for_it():
    from baoc.core.mechanisms import MECHANISMS, AdamW

    class Backwards(AdamW):
        name = "backwards"

        def direction(self, grad, slots, scalars):
            return -super().direction(grad, slots, scalars)

    baoc.register_mechanism(Backwards())
    try:
        param = nn.Parameter(torch.zeros(64, 64))
        optimizer = BlockOptimizer([param], plan="backwards", kernel="native")
        train(optimizer, param, iter([torch.ones(64, 64)]))
        assert (param > 0).all()
    finally:
        del MECHANISMS["backwards"]


def test_a_packed_format_makes_no_copy_of_a_whole_state():
    param = nn.Parameter(torch.randn(2048, 1024))
    optimizer = BlockOptimizer([param], plan="sgdm[m=nibble]")
    train(optimizer, param, gradients((2048, 1024), 1))
    with PeakMemory() as memory:
        optimizer.step()
    assert memory.peak <= 24 * eager.TILE_NUMEL * 4 < param.numel() * 4


@pytest.mark.parametrize("broken", [float("inf"), 2e19])
def test_a_spike_does_not_take_its_matrix_with_it(broken):
    param = nn.Parameter(torch.ones(64, 96))
    optimizer = BlockOptimizer([param], plan="polar[m=nibble]")
    stream = list(gradients((64, 96), 3))
    stream[1][5, 7] = broken
    train(optimizer, param, iter(stream))
    assert (~param.isfinite()).sum() <= 1


def test_names_are_taken_once_and_spelled_in_small_letters():
    with pytest.raises(ValueError, match="codec 'int8' exists already"):
        baoc.register_codec(type("Mine", (toys.Nibble,), {"name": "int8"})())
    with pytest.raises(ValueError, match="update rule 'adamw' exists already"):
        baoc.register_mechanism(type("Mine", (toys.Polar,), {"name": "adamw"})())
    with pytest.raises(ValueError, match="must be lowercase letters"):
        baoc.register_mechanism(type("Mine", (toys.Polar,), {"name": "My-Muon"})())
    with pytest.raises(baoc.ConfigurationError, match="nibble cannot store 'v': it is linear"):
        parse("adamw[v=nibble]")

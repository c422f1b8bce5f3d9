"""Training of 16-bit parameters with their low bits in the state."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import Tensor, nn

from baoc import BlockOptimizer, Configuration, PlanError, parse, state_bytes
from baoc.core.codecs.weights import PARAM
from baoc.core.spec import Hyper, Reach
from baoc.optim.kernels.eager import EagerKernel
from baoc.optim.kernels.job import Job, advance_ages
from baoc.optim.kernels.native import NativeKernel
from baoc.optim.state import new_state
from tests.cases import WEIGHTS, by_configuration, gradients, train

SHAPE = (64, 80)
DTYPES = (torch.bfloat16, torch.float16)
REMAINDERS = ("16", "8")


def start(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Weights that stay above 2^-17, below which fp16 with its low bits is coarser than fp32."""
    weights = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    return torch.where(weights < 0, weights - 0.02, weights + 0.02).to(dtype)


def stream(steps: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [grad.to(dtype) for grad in gradients(SHAPE, steps)]


def joined(optimizer: BlockOptimizer, param: Tensor) -> Tensor:
    """The fp32 weight."""
    member = next(member for member in optimizer.members() if member.param is param)
    stored = member.layout.formats[-1]
    held = {name: optimizer.state[param][key] for name, key in stored.keys}
    return stored.decode({**held, PARAM: param.detach()}, slice(0, len(param)))


def trained(configuration: Configuration | str, steps: int = 4, dtype: torch.dtype = torch.bfloat16, **settings):
    param = nn.Parameter(start(dtype))
    settings = {"lr": 1e-4, "weight_decay": 0.1} | settings
    optimizer = BlockOptimizer([param], plan=configuration, **settings)
    train(optimizer, param, iter(stream(steps, dtype)))
    return optimizer, param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", ["eager", "native"])
@pytest.mark.parametrize(**by_configuration)
def test_sixteen_bits_train_as_fp32_parameters_do(configuration, kernel, dtype):
    """Bitwise, decay included, and for the state too."""
    wide = nn.Parameter(start(dtype).float())
    exact = BlockOptimizer([wide], lr=1e-4, weight_decay=0.1, plan=configuration, kernel=kernel)
    train(exact, wide, iter([grad.float() for grad in stream(4, dtype)]))
    optimizer, param = trained(configuration.with_weight("16"), dtype=dtype, kernel=kernel)
    assert torch.equal(joined(optimizer, param), wide.detach())
    for key in optimizer.members()[0].layout.buffers:
        if key != "w":
            assert torch.equal(optimizer.state[param][key], exact.state[wide][key]), key
    assert state_bytes(optimizer) == optimizer.plan.state_bytes == state_bytes(exact) + 2 * param.numel()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize(**by_configuration)
def test_the_native_kernel_agrees_with_the_eager_one(configuration, weight, dtype):
    """Elements may round the other way, where the two differ in the last bit before rounding; so may signs (Lion)."""
    spelled = configuration.with_weight(weight)
    ours, theirs = (trained(spelled, dtype=dtype, kernel=kernel) for kernel in ("native", "eager"))
    left, right = joined(*ours), joined(*theirs)
    step = {"16": 2.0**-20, "8": 2.0**-15}.get(weight, torch.finfo(dtype).eps)
    assert ((left - right).abs() > 2 * step * right.abs() + 1e-6).float().mean() < 1e-3
    assert (left != right).float().mean() < (1.0 if weight == "16" else 0.05)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight", WEIGHTS)
def test_every_code_takes_the_same_step(weight, dtype):
    """Tiny, infinite and undefined weights, at updates of all sizes, on every instruction set: bit for bit."""
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(256, 256)
    layout = parse("sgdw").with_weight(weight).layout(codes.shape)
    grads = list(gradients((256, 256), 3, dtype=dtype))
    results = []
    for kernel in (EagerKernel(), *map(NativeKernel, NativeKernel.isas())):
        param, state = codes.view(dtype).clone(), new_state(layout, codes.device)
        if "w" in state:
            state["w"].copy_(codes.flip(0))
        for grad, lr in zip(grads, (0.0, 1e-7, 1e-3)):
            job = Job.of(layout, param, grad, state, Hyper(lr=lr, weight_decay=0.0))
            kernel.run([job])
            advance_ages([job])
        lost = param.isnan()
        results.append([lost, *(held.masked_fill(lost, 0) for held in (param, state.get("w", param)))])
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))


@pytest.mark.parametrize("weight", WEIGHTS)
def test_channels_last_parameters(weight):
    results = []
    for kernel, memory_format in (("native", torch.channels_last), ("eager", torch.contiguous_format)):
        param = nn.Parameter(torch.ones(16, 12, 5, 5).bfloat16().to(memory_format=memory_format))
        optimizer = BlockOptimizer([param], plan=parse("adamw-16").with_weight(weight), kernel=kernel)
        train(optimizer, param, gradients((16, 12, 5, 5), 3, dtype=torch.bfloat16))
        results.append(joined(optimizer, param))
    torch.testing.assert_close(*results, rtol=2.0**-7 if weight in ("sr", "none") else 2.0**-14, atol=1e-6)


@pytest.mark.parametrize("weight", ["16", "8", "sr"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_updates_arrive(weight, dtype):
    """200 updates of 1e-5, each far below the last bit, move a weight as far as they should. torch loses them all."""
    moved = {}
    for codec in (weight, "none"):
        param = nn.Parameter(torch.full(SHAPE, 0.5, dtype=dtype))
        optimizer = BlockOptimizer([param], lr=1e-5, weight_decay=0.0, plan=parse("sgd").with_weight(codec))
        train(optimizer, param, iter([torch.ones(SHAPE, dtype=dtype)] * 200))
        moved[codec] = 0.5 - joined(optimizer, param).mean().item()
    assert moved["none"] == 0.0
    assert moved[weight] == pytest.approx(2e-3, rel=0.02)


@pytest.mark.parametrize("weight", ["16", "8", "sr"])
def test_decay_arrives_without_gradients(weight):
    param = nn.Parameter(torch.full(SHAPE, 0.7).bfloat16())
    optimizer = BlockOptimizer([param], lr=1e-3, weight_decay=0.05, plan=parse("sgdw").with_weight(weight))
    train(optimizer, param, iter([torch.zeros(SHAPE).bfloat16()] * 400))
    assert joined(optimizer, param).mean().item() == pytest.approx(0.69921875 * (1 - 5e-5) ** 400, rel=5e-4)


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("configuration", ["adamw-8", "muon-8", "sgd", "adafactor"])
def test_a_resumed_run_continues_bitwise(configuration, weight):
    spelled = parse(configuration).with_weight(weight)
    optimizer, param = trained(spelled)
    twin = nn.Parameter(param.detach().clone())
    resumed = BlockOptimizer([twin], lr=1e-4, weight_decay=0.1)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.plan.blocks[0].configuration == spelled
    for each, mine in ((optimizer, param), (resumed, twin)):
        train(each, mine, iter(stream(3)))
    assert torch.equal(param, twin) and torch.equal(joined(optimizer, param), joined(resumed, twin))


@pytest.mark.parametrize("inherit", [True, False])
@pytest.mark.parametrize("target", ["adamw[m=bf16,v=bf16,w=8]", "sgdm[m=int8,w=8]", "lion[m=int8,w=8]"])
def test_migration_keeps_the_weight(target, inherit):
    """The parameter does not change, the fp32 weight by less than 2^-15, and back in 16 bits by nothing more."""
    optimizer, param = trained("adamw[m=int8,v=int8,w=16]")
    before, narrow = joined(optimizer, param), param.detach().clone()
    optimizer.set_plan(target, inherit=inherit)
    after = joined(optimizer, param)
    assert torch.equal(param, narrow) and ((after - before).abs() <= 2.0**-15 * before.abs()).all()
    assert (after != param.float()).any()
    optimizer.set_plan("adamw[m=int8,v=int8,w=16]", inherit=inherit)
    assert torch.equal(joined(optimizer, param), after) and torch.equal(param, narrow)
    optimizer.set_plan("adamw[m=int8,v=int8,w=sr]", inherit=inherit)
    assert torch.equal(joined(optimizer, param), narrow.float())
    assert state_bytes(optimizer) == optimizer.plan.state_bytes


def test_fp32_parameters_are_refused():
    with pytest.raises(PlanError, match="no parameter is bf16 or fp16"):
        BlockOptimizer([nn.Parameter(torch.ones(64, 64))], plan="adamw[m=int8,v=int8,w=8]")
    param = nn.Parameter(torch.ones(64, 64).bfloat16())
    plan = BlockOptimizer([param], plan="adamw[w=8]").plan
    with pytest.raises(PlanError, match=r"'0.0' is torch.float32. Leave out w=8"):
        BlockOptimizer([nn.Parameter(torch.ones(64, 64))], plan=plan)


@pytest.mark.parametrize("weight", REMAINDERS)
def test_tiles_do_not_change_the_result(weight, monkeypatch):
    results = []
    for tile_numel in (1 << 16, 700):
        monkeypatch.setattr("baoc.optim.kernels.eager.TILE_NUMEL", tile_numel)
        results.append(joined(*trained(parse("adamw-8").with_weight(weight), kernel="eager")))
    assert torch.equal(*results)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.xdist_group("compile")
@pytest.mark.parametrize(
    ("weight", "dtype"),
    [*((weight, torch.bfloat16) for weight in ("16", "8", "sr")), ("16", torch.float16), ("none", torch.float16)],
    ids=str,
)
def test_compiled_equals_eager(weight, dtype):
    spelled = parse("adamw-16").with_weight(weight)
    ours, theirs = (trained(spelled, dtype=dtype, kernel=each) for each in ("compiled", "eager"))
    step = {"16": 2.0**-20, "8": 2.0**-15}.get(weight, torch.finfo(dtype).eps)
    left, right = joined(*ours), joined(*theirs)
    assert ((left - right).abs() <= 2 * step * right.abs() + 1e-6).all()
    assert (left != right).float().mean() < (1.0 if weight == "16" else 0.05)


def test_the_reach_of_a_configuration_does_not_change():
    for spelling in ("adamw-8", "adafactor", "muon-8"):
        reaches = {parse(spelling).with_weight(each).layout(SHAPE).reach for each in (*WEIGHTS, None)}
        assert len(reaches) == 1 and reaches <= set(Reach)

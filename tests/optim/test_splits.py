"""A split parameter trains as its pieces would, apart: on every kernel, on ranks, over checkpoints and migrations."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import baoc
from baoc import BAOC, BlockOptimizer, Split
from baoc.core.sharding import shard_of
from baoc.core.spec import Reach
from tests.cases import CONFIGURATIONS, gradients
from tests.memory import PeakMemory
from tests.ranks import together

MATRIX_RULES = [each for each in CONFIGURATIONS if each.mechanism.reach is Reach.MATRIX]
IN_FP32 = [each for each in MATRIX_RULES if all(codec in ("fp32", "mean", "row-mean") for _, codec in each.codec_names)]
CASES: dict[str, tuple[tuple[int, ...], Split]] = {
    "queries, keys and values": ((288, 96), Split((96, 96, 96))),
    "columns": ((96, 288), Split((96, 96, 96), dim=1)),
    "grouped queries": ((200, 96), Split((120, 40, 40))),
    "by head": ((288, 64), Split((24, 24, 48), repeat=3)),
    "experts": ((3, 160, 72), Split((80, 80))),
    "columns of experts in turn": ((3, 72, 160), Split((1, 1), dim=1, repeat=80)),
    "convolution": ((96, 12, 3, 3), Split((48, 48))),
}
FIXED_LENGTH = {"max_update_rms": 0.4, "update_rms": 1e9}
"""Muon and NorMuon: updates of one length, which depends on no number that all pieces share."""


def cut(x: Tensor, split: Split) -> list[Tensor]:
    """The pieces of a parameter, element by element."""
    dim = split.dim + (x.dim() == 3)
    step, start, pieces = sum(split.sizes), 0, []
    for size in split.sizes:
        index = [turn * step + start + each for turn in range(split.repeat) for each in range(size)]
        pieces.append(x.index_select(dim, torch.tensor(index)).contiguous())
        start += size
    return pieces


def start(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def settings_of(configuration: object) -> dict[str, float]:
    return {} if configuration.mechanism_name == "spectral" else FIXED_LENGTH  # type: ignore[attr-defined]


def train_both(configuration, shape, split, steps, kernel="eager", **settings) -> tuple[list[Tensor], list[Tensor]]:
    """What pieces of a split parameter become, and what parameters become that are these pieces."""
    fused = nn.Parameter(start(shape))
    apart = [nn.Parameter(piece) for piece in cut(start(shape), split)]
    common = {"lr": 1e-2, "kernel": kernel, **settings}
    one = BlockOptimizer([("fused", fused)], plan=configuration, split={"fused": split}, **common)
    others = BlockOptimizer(apart, plan=configuration, **common)
    assert one.plan.splits == {"fused": split}
    for grad in gradients(shape, steps):
        fused.grad = grad
        for param, piece in zip(apart, cut(grad, split)):
            param.grad = piece
        one.step()
        others.step()
    return cut(fused.detach(), split), [param.detach() for param in apart]


def is_of_whole_rows(configuration: object, split: Split) -> bool:
    """NorMuon keeps one number for each row of the parameter, so pieces that are columns share it."""
    return configuration.mechanism_name != "normuon" or split.dim == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("configuration", IN_FP32, ids=str)
def test_a_split_parameter_trains_as_its_pieces_do(configuration, case):
    shape, split = CASES[case]
    pieces, apart = train_both(configuration, shape, split, 4, **settings_of(configuration))
    for piece, other in zip(pieces, apart):
        same = torch.equal(piece, other)
        assert same is is_of_whole_rows(configuration, split), (piece - other).abs().max()


@pytest.mark.parametrize("case", [name for name, (_, split) in CASES.items() if split.dim == 0])
@pytest.mark.parametrize("configuration", MATRIX_RULES, ids=str)
def test_the_first_step_is_that_of_the_pieces_whatever_the_format(configuration, case):
    """Later ones differ, because groups of int8 and the order of rounding follow the whole parameter."""
    shape, split = CASES[case]
    pieces, apart = train_both(configuration, shape, split, 1, **settings_of(configuration))
    assert all(map(torch.equal, pieces, apart))


@pytest.mark.parametrize("kernel", ["auto", "compiled", "native"])
@pytest.mark.parametrize("configuration", MATRIX_RULES, ids=str)
def test_kernels_agree_on_splits(configuration, kernel):
    shape, split = CASES["grouped queries"]
    ours, _ = train_both(configuration, shape, split, 3, kernel)
    theirs, _ = train_both(configuration, shape, split, 3, "eager")
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_all_pieces_of_a_parameter_have_updates_of_one_length():
    """One number per parameter sets it: pieces with small gradients move as far as the others."""
    param = nn.Parameter(torch.zeros(288, 96))
    optimizer = BlockOptimizer([("qkv", param)], lr=1.0, weight_decay=0.0, plan="muon-32", split={"qkv": (96, 96, 96)})
    for grad in gradients((288, 96), 5):
        grad[:96] *= 1e-3
        param.grad = grad
        before = param.detach().clone()
        optimizer.step()
    rms = [each.square().mean().sqrt().item() for each in (param.detach() - before).split(96)]
    assert max(rms) < 1.1 * min(rms)


@pytest.mark.parametrize("configuration", MATRIX_RULES, ids=str)
def test_state_is_that_of_the_whole(configuration):
    shape, split = CASES["queries, keys and values"]
    params = [nn.Parameter(start(shape)) for _ in range(2)]
    one, other = (
        BlockOptimizer([("qkv", param)], plan=configuration, split=request)
        for param, request in zip(params, ({"qkv": split}, False))
    )
    assert one.plan.state_bytes == other.plan.state_bytes == baoc.state_bytes(one)
    held = [optimizer.state[param] for optimizer, param in zip((one, other), params)]
    assert {key: getattr(x, "shape", x) for key, x in held[0].items()} == {
        key: getattr(x, "shape", x) for key, x in held[1].items()
    }


@pytest.mark.parametrize(
    "split", [Split((512, 512, 512)), Split((1024, 256, 256)), Split((32, 32, 32), repeat=16)], ids=str
)
def test_the_workspace_is_what_the_plan_says(split):
    param = nn.Parameter(torch.randn(1536, 512))
    optimizer = BlockOptimizer([("qkv", param)], plan="muon-8", kernel="native", split={"qkv": split})
    for _ in range(2):
        param.grad = torch.randn(1536, 512)
        with PeakMemory() as memory:
            optimizer.step()
    assert memory.peak <= optimizer.plan.workspace_bytes + (1 << 20)


# ---- plans, checkpoints, migration ----


class Attention(nn.Module):
    num_heads, head_dim = 4, 24

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(96, 288), nn.Linear(96, 96), nn.LayerNorm(96)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.qkv(self.norm(x))[..., :96])


def model(*, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Attention(), Attention(), nn.Linear(96, 7))


def trained(net: nn.Module, optimizer: BlockOptimizer, steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        net(torch.randn(8, 96, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in net.parameters()]


NAMES = ("0.qkv.weight", "1.qkv.weight")
THIRDS = Split((96, 96, 96))
MUON = {"plan": "muon-8 else adamw-8"}


def baoc_of(net: nn.Module, **settings: object) -> BAOC:
    planner = baoc.EffectPlanner(candidates=("muon-8", "adamw-8"), time=math.inf, regime="scratch")
    return BAOC(net, memory=0.9, planner=planner, verbose=False, **settings)  # type: ignore[arg-type]


MAKERS = {"blocks": lambda net, **more: BlockOptimizer(net, **MUON, **more), "planner": baoc_of}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_splits_are_detected_given_or_turned_off(make):
    assert make(model()).plan.splits == dict.fromkeys(NAMES, THIRDS)
    assert make(model(), split=False).plan.splits == make(model(), split={}).plan.splits == {}
    assert make(model(), split={"1.qkv.*t": (192, 96)}).plan.splits == {NAMES[1]: Split((192, 96))}
    assert make(model(), split="heads").plan.splits == dict.fromkeys(NAMES, Split((24,) * 12))
    assert make(model().named_parameters()).plan.splits == {}  # names alone do not say how many heads there are


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_plan_shows_its_splits(make):
    assert "split: 2 tensors as 3 x (96, 96)" in str(make(model()).plan)
    assert "split:" not in str(make(model(), split=False).plan)


def test_a_given_plan_says_what_is_split():
    plan = BlockOptimizer(model(), **MUON).plan
    assert BlockOptimizer(model(), plan=plan).plan.splits == dict.fromkeys(NAMES, THIRDS)
    assert BlockOptimizer(model(), plan=plan.split({})).plan.splits == {}
    assert BlockOptimizer(model(), plan=plan, split=False).plan.splits == {}
    assert BlockOptimizer(model(), plan=plan.split({}), split=True).plan.splits == dict.fromkeys(NAMES, THIRDS)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_resumed_run_keeps_the_matrices_that_it_has(make):
    net = model()
    optimizer = make(net, split=False)
    trained(net, optimizer)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    expected = trained(net, optimizer)
    for request, splits in ((None, []), (True, list(NAMES)), ({NAMES[0]: (96, 192)}, [NAMES[0]])):
        again = model(seed=1)
        resumed = make(again, split=request)
        again.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        assert list(resumed.plan.splits) == splits
        found = trained(again, resumed)
        assert all(map(torch.equal, found, expected)) is (not splits)
        resumed.set_plan("muon-8 else adamw-8")
        assert list(resumed.plan.splits) == splits  # here too


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_run_with_splits_resumes_bitwise_under_other_names(make):
    net = model()
    optimizer = make(net)
    trained(net, optimizer)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    expected = trained(net, optimizer)
    again = model(seed=1)
    resumed = BlockOptimizer(again.parameters()) if make is not baoc_of else baoc_of(again.parameters())
    again.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert list(resumed.plan.splits.values()) == [THIRDS, THIRDS]
    assert all(map(torch.equal, trained(again, resumed), expected))


def test_splits_follow_changes_of_plans():
    net = model()
    optimizer = BlockOptimizer(net, plan="adamw-8")
    trained(net, optimizer)
    assert optimizer.plan.splits == {}
    for rule in ("muon-8", "normuon-8", "spectral"):
        optimizer.set_plan(f"{rule} else adamw-8")
        assert optimizer.plan.splits == dict.fromkeys(NAMES, THIRDS)
        trained(net, optimizer)
    optimizer.set_plan(optimizer.plan.split({}))
    assert optimizer.plan.splits == {}
    twin = copy.deepcopy(BlockOptimizer(model(), **MUON))
    assert twin.plan.splits == dict.fromkeys(NAMES, THIRDS)


def test_changing_splits_alone_keeps_the_state():
    net = model()
    optimizer = BlockOptimizer(net, **MUON)
    trained(net, optimizer)
    before = copy.deepcopy([optimizer.state[param] for param in net.parameters()])
    optimizer.set_plan(optimizer.plan.split({}))
    for held, param in zip(before, net.parameters()):
        for key, value in held.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state[param][key]))


def test_a_group_that_joins_later_is_split_by_patterns():
    first, second = (nn.Parameter(start((288, 96))) for _ in range(2))
    optimizer = BlockOptimizer([("a.qkv", first)], plan="muon-8", split={"*.qkv": (96, 96, 96)})
    optimizer.add_param_group({"params": [("b.qkv", second)]})
    assert optimizer.plan.splits == {"a.qkv": THIRDS, "b.qkv": THIRDS}


# ---- ranks ----

SHARDED = {name: CASES[name] for name in ("grouped queries", "columns", "by head", "experts")}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, (shape, _) in SHARDED.items():
            for twin in range(2):
                self.register_parameter(f"{name.replace(' ', '_')}_{twin}", nn.Parameter(start(shape)))


def on_rank(rank: int, is_sharded: bool) -> dict[str, dict[str, Tensor]]:
    found = {}
    for configuration in ("muon-32", "normuon-32", "spectral"):
        net = Net()
        if is_sharded:
            fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        splits = {f"{name.replace(' ', '_')}_*": split for name, (_, split) in SHARDED.items()}
        optimizer = BlockOptimizer(net, lr=1e-2, plan=configuration, split=splits)
        assert len(optimizer.plan.splits) == 2 * len(SHARDED)
        for step in range(3):
            for index, param in enumerate(net.parameters()):
                *_, grad = gradients(tuple(param.shape), step + 1, seed=index)
                shard = shard_of(param)
                param.grad = grad if shard is None else shard.wrap(grad[shard.rows].contiguous(), by_rows=True)
            optimizer.step()
        found[configuration] = {
            name: getattr(param.detach(), "full_tensor", param.detach)().clone()
            for name, param in net.named_parameters()
        }
    return found


@pytest.mark.xdist_group("ranks")
def test_ranks_split_as_one_process_does(tmp_path):
    whole = on_rank(0, False)
    for found in together(on_rank, 2, tmp_path, True):
        for configuration, params in whole.items():
            for name, param in params.items():
                torch.testing.assert_close(found[configuration][name], param, rtol=1e-4, atol=1e-4)

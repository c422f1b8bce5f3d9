"""FSDP2: ranks that hold rows of every parameter train as one process does, for every configuration."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as OnDim

from baoc import BlockOptimizer, Configuration, parse
from baoc.core.sharding import shard_of
from baoc.core.spec import Reach
from tests.cases import CONFIGURATIONS, gradients
from tests.memory import PeakMemory
from tests.ranks import together

SHAPES = {
    "matrix": (61, 83),
    "alike": (61, 83),
    "third": (61, 83),
    "convolution": (16, 12, 5, 5),
    "stack": (5, 31, 33),
    "fewer_rows_than_ranks": (2, 2100),
    "one_row": (1, 4500),
    "vector": (7,),
    "without_gradient": (40, 120),
}
STEPS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def sharded(model: nn.Module, mesh_shape: tuple[int, ...]) -> nn.Module:
    names = ("replicate", "shard")[-len(mesh_shape) :]
    return fully_shard(model, mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))


def set_gradients(model: nn.Module, step: int) -> None:
    for index, (name, param) in enumerate(model.named_parameters()):
        if name == "without_gradient":
            continue
        *_, grad = gradients(SHAPES[name], step + 1, seed=index)
        shard = shard_of(param)
        param.grad = grad if shard is None else shard.wrap(grad[shard.rows].contiguous(), by_rows=True)


def whole(value: Any) -> Any:
    """A copy, put together from all ranks."""
    return copy.deepcopy(value.full_tensor() if isinstance(value, DTensor) else value)


def outcome(model: nn.Module, optimizer: BlockOptimizer) -> dict[str, Any]:
    """Parameters and state, whole."""
    named = dict(model.named_parameters())
    state = {
        name: {key: whole(value) for key, value in optimizer.state[param].items()} for name, param in named.items()
    }
    return {"params": {name: whole(param.detach()) for name, param in named.items()}, "state": state}


def trained(model: nn.Module, configuration: Configuration) -> BlockOptimizer:
    optimizer = BlockOptimizer(model, lr=1e-2, plan=f"{configuration} else adamw-32")
    for step in range(STEPS):
        set_gradients(model, step)
        optimizer.step()
    return optimizer


def all_trained(rank: int, mesh_shape: tuple[int, ...], configurations: tuple[Configuration, ...]) -> dict[str, Any]:
    """What each configuration leaves on this rank."""
    found = {}
    for configuration in configurations:
        model = sharded(Net(), mesh_shape)
        optimizer = trained(model, configuration)
        found[str(configuration)] = {
            name: {"": held(param.detach()), **{key: held(value) for key, value in optimizer.state[param].items()}}
            for name, param in model.named_parameters()
        }
    return found


def held(value: Any) -> Any:
    """What is here, and whether it is rows of something larger."""
    return (value.to_local(), value.placements[-1].is_shard()) if isinstance(value, DTensor) else (value, False)


def joined(parts: list[tuple[Any, bool]], shards: int) -> Any:
    """What ranks hold between them; what more than one has must be the same."""
    for index, (value, is_rows) in enumerate(parts):
        twin = parts[index % shards if is_rows else 0][0]
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(twin))
    return torch.cat([value for value, _ in parts[:shards]]) if parts[0][1] else parts[0][0]


HSDP = tuple(map(parse, ("adamw-8", "adamw[m=int8,v=factored]", "muon-8", "sinkhorn")))  # one of each reach
MESHES = {(2,): CONFIGURATIONS, (3,): CONFIGURATIONS, (2, 2): HSDP}
CASES = [(mesh, configuration) for mesh, configurations in MESHES.items() for configuration in configurations]


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory) -> Callable[[tuple[int, ...]], list[dict[str, Any]]]:
    """What came out on each rank of a mesh, by configuration. They are started once for all of them."""

    @functools.cache
    def found(mesh_shape: tuple[int, ...]) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("ranks")
        return together(all_trained, math.prod(mesh_shape), folder, mesh_shape, MESHES[mesh_shape])

    return found


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("mesh_shape", "configuration"), CASES, ids=str)
def test_ranks_train_as_one_process_does(mesh_shape, configuration, on_ranks):
    model = Net()
    optimizer = trained(model, configuration)
    on_each = [found[str(configuration)] for found in on_ranks(mesh_shape)]
    for name, param in model.named_parameters():
        is_exact = optimizer.plan.block_of(name).configuration.layout(SHAPES[name]).reach is Reach.ROWS
        for key, value in {"": param.detach(), **optimizer.state[param]}.items():
            ours = joined([found[name][key] for found in on_each], mesh_shape[-1])
            assert_alike(ours, value, is_exact, f"{name} {key}")


def assert_alike(one: Any, other: Any, is_exact: bool, what: str) -> None:
    if is_exact or not isinstance(one, Tensor):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other)), what
    elif not one.is_floating_point():  # a code may be rounded to its neighbour
        assert (one.int() - other.int()).abs().max() <= 1, what
    else:
        tolerance = 2e-2 if one.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(one, other, rtol=tolerance, atol=1e-4, msg=lambda text: f"{what}: {text}")


def refusals(rank: int) -> dict[str, str]:
    """What the constructor says to placements that it does not follow."""
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    placed = {
        "columns": (flat, [OnDim(1)]),
        "replicated": (flat, [Replicate()]),
        "tensor parallel": (square, [OnDim(0), OnDim(1)]),
        "replicated last": (square, [OnDim(0), Replicate()]),
    }
    said = {}
    for name, (mesh, placements) in placed.items():
        param = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, placements))
        try:
            BlockOptimizer([("weight", param)])
            said[name] = ""
        except NotImplementedError as error:
            said[name] = str(error)
    return said


@pytest.mark.xdist_group("ranks")
def test_other_placements_are_refused_at_construction(tmp_path):
    for said in together(refusals, 4, tmp_path)[0].values():
        assert "'weight'" in said and "fully_shard on a mesh of one dim" in said and "another optimizer" in said


def workspaces(rank: int, plan: str) -> list[tuple[int, int]]:
    """The most bytes of a step beyond what is held, and what the plan says, for several and for few matrices."""
    found = []
    for count, shape in ((7, (300, 200)), (1, (700, 300)), (3, (9, 100, 120))):
        torch.manual_seed(0)
        model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for _ in range(count)])
        ranks = torch.distributed.get_world_size()
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        optimizer = BlockOptimizer(model, plan=plan, kernel="native")
        for _ in range(2):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            with PeakMemory() as memory:
                optimizer.step()
        found.append((memory.peak, optimizer.plan.workspace_bytes))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_workspace_of_a_rank_is_what_the_plan_says(ranks, tmp_path):
    for of_ranks in zip(*together(workspaces, ranks, tmp_path, "muon-8")):
        peak, said = max(peak for peak, _ in of_ranks), of_ranks[0][1]
        assert 0.8 * said <= peak <= said + (1 << 19), of_ranks

"""FSDP2: ranks that hold rows of every parameter train as one process does, for every configuration."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from baoc import BlockOptimizer, Configuration, parse
from baoc.core.sharding import local, shard_of
from baoc.core.spec import Reach
from tests.cases import CONFIGURATIONS, by_configuration, gradients
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
    state = {name: {key: whole(value) for key, value in optimizer.state[param].items()} for name, param in named.items()}
    return {"params": {name: whole(param.detach()) for name, param in named.items()}, "state": state}


def trained(model: nn.Module, configuration: Configuration) -> BlockOptimizer:
    optimizer = BlockOptimizer(model, lr=1e-2, plan=f"{configuration} else adamw-32")
    for step in range(STEPS):
        set_gradients(model, step)
        optimizer.step()
    return optimizer


def all_trained(rank: int, mesh_shape: tuple[int, ...], configurations: tuple[Configuration, ...]) -> dict[str, Any]:
    found = {}
    for configuration in configurations:
        model = sharded(Net(), mesh_shape)
        found[str(configuration)] = outcome(model, trained(model, configuration))
    return found if rank == 0 else {}


HSDP = tuple(map(parse, ("adamw-8", "adamw[m=int8,v=factored]", "muon-8", "sinkhorn")))
MESHES = {(2,): CONFIGURATIONS, (3,): CONFIGURATIONS, (2, 2): HSDP}


@pytest.fixture(scope="module", params=MESHES, ids=str)
def on_ranks(request, tmp_path_factory) -> dict[str, Any]:
    """What came out on several ranks, by configuration. They are started once for all of them."""
    mesh_shape = request.param
    folder = tmp_path_factory.mktemp("ranks")
    return together(all_trained, torch.Size(mesh_shape).numel(), folder, mesh_shape, MESHES[mesh_shape])[0]


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(**by_configuration)
def test_ranks_train_as_one_process_does(configuration, on_ranks):
    if str(configuration) not in on_ranks:
        pytest.skip("one of each kind is enough on a mesh of two dims")
    model = Net()
    optimizer = trained(model, configuration)
    alone, together = outcome(model, optimizer), on_ranks[str(configuration)]
    del alone["state"]["without_gradient"], together["state"]["without_gradient"]
    for name, shape in SHAPES.items():
        exact = optimizer.plan.block_of(name).configuration.layout(shape).reach is Reach.ROWS
        assert_alike(together["params"][name], alone["params"][name], exact, name)
        for key, value in alone["state"].get(name, {}).items():
            assert_alike(together["state"][name][key], value, exact, f"{name} {key}")


def assert_alike(one: Tensor, other: Tensor, exact: bool, what: str) -> None:
    if exact or not isinstance(one, Tensor):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other)), what
    elif not one.is_floating_point():  # a code may be rounded to its neighbour
        assert (one.int() - other.int()).abs().max() <= 1 or what.startswith("packed"), what
    else:
        tolerance = 2e-2 if one.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(one, other, rtol=tolerance, atol=1e-4, msg=lambda text: f"{what}: {text}")

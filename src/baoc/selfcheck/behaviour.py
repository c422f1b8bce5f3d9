"""What a GPU does by itself: steps that it leaves out, and steps in a CUDA graph. Both end as usual steps do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from baoc.optim.kernels.graphs import replaying
from baoc.optim.optimizer import BlockOptimizer
from baoc.selfcheck.equality import Equality, gradient

_SHAPE = (64, 272)
_STEPS = 5
_CONFIGURATIONS = ("adamw-8", "adamw[m=int8,v=factored]", "muon-8")


def compare_behaviour(device: torch.device) -> Iterator[Equality]:
    """Bit by bit, beside usual steps on the same device."""
    for configuration in _CONFIGURATIONS:
        yield _equality(configuration, "a step left out", lambda name: _left_out(name, device))
        if device.type == "cuda":
            yield _equality(configuration, "replayed", lambda name: _replayed(name, device))


def _equality(configuration: str, what: str, pair: Callable[[str], tuple[list[Tensor], list[Tensor]]]) -> Equality:
    try:
        expected, found = pair(configuration)
        apart = sum(not torch.equal(one, other) for one, other in zip(expected, found))
        said = f"{apart} of {len(expected)} tensors differ" if apart else "as promised"
    except Exception as error:  # one line of the report, not the end of it
        said = f"{type(error).__name__}: {error}".splitlines()[0]
    return Equality(f"{configuration}, {what}", "float32, float32", "bits", said, said == "as promised")


def _left_out(configuration: str, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Steps without those that were bad, and with them."""
    results = []
    for bad in ((), (0, 3)):
        param, optimizer = _made(configuration, device, on_nonfinite="skip")
        for step in range(_STEPS):
            param.grad = gradient(_SHAPE, step).to(device)
            if step in bad:
                param.grad[3, 77] = math.nan
            if bad or step not in (0, 3):
                optimizer.step()
        results.append(_held(param, optimizer))
    return results[0], results[1]


def _replayed(configuration: str, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Usual steps, and the last of them from a graph."""
    results = []
    for captures in (False, True):
        param, optimizer = _made(configuration, device)
        param.grad = torch.zeros_like(param)
        graph: torch.cuda.CUDAGraph | None = None
        for step in range(_STEPS):
            optimizer.param_groups[0]["lr"] *= 0.9
            param.grad.copy_(gradient(_SHAPE, step))
            if captures and step == 2:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    optimizer.step()
            if graph is None:
                optimizer.step()
            else:
                with replaying():
                    optimizer.step()
                graph.replay()
        results.append(_held(param, optimizer))
    return results[0], results[1]


def _made(configuration: str, device: torch.device, on_nonfinite: str = "step") -> tuple[nn.Parameter, BlockOptimizer]:
    start = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(1))
    param = nn.Parameter(start.to(device))
    return param, BlockOptimizer([param], 1e-2, plan=configuration, kernel="triton", on_nonfinite=on_nonfinite)


def _held(param: nn.Parameter, optimizer: BlockOptimizer) -> list[Tensor]:
    state = optimizer.state_dict()["state"][0]
    return [param.detach(), *(held if isinstance(held, Tensor) else torch.tensor(held) for held in state.values())]

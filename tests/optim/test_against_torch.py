"""fp32 configurations follow torch.optim's own optimizers step by step, decay and schedules included."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from baoc import BlockOptimizer
from tests.cases import SHAPES, gradients

DECAY = 0.1


class _Decoupled(torch.optim.SGD):
    """SGD with decoupled decay, which torch.optim does not have: decay first, then torch's own SGD."""

    def __init__(self, params, **settings):
        self._decay = settings.pop("weight_decay")
        super().__init__(params, **settings)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(1 - group["lr"] * self._decay)
        return super().step(closure)


PEERS = {
    "adamw-32": torch.optim.AdamW,
    "adam-32": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgdm-32": partial(torch.optim.SGD, momentum=0.9),
    "sgdw": _Decoupled,
    "sgdwm-32": partial(_Decoupled, momentum=0.9),
    "adafactor-32": torch.optim.Adafactor,
}

SCHEDULES = {
    "constant": None,
    "cosine": partial(CosineAnnealingLR, T_max=100),
    "one cycle": partial(OneCycleLR, max_lr=3e-2, total_steps=101),  # writes lr and momentum (or beta1)
}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("maximize", [False, True])
def test_fp32_follows_torch_for_100_steps(name, schedule, maximize):
    if schedule == "one cycle" and name == "adafactor-32":
        pytest.skip("torch.optim.Adafactor has no momentum for OneCycleLR to cycle")
    if schedule == "one cycle" and name in ("sgd", "sgdw"):
        pytest.skip("OneCycleLR would give torch's plain SGD a momentum")
    shapes = [shape for shape in SHAPES.values() if 0 not in shape]
    ours_params, peer_params = (
        [nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(i))) for i, shape in enumerate(shapes)]
        for _ in range(2)
    )
    settings = {"lr": 1e-2, "weight_decay": DECAY, "maximize": maximize}
    ours = BlockOptimizer(ours_params, plan=name, **settings)
    peer = PEERS[name](peer_params, **settings)
    schedulers = [SCHEDULES[schedule](o) for o in (ours, peer)] if SCHEDULES[schedule] else []
    streams = [gradients(shape, 100, seed=i) for i, shape in enumerate(shapes)]
    reach = [0.0] * len(shapes)
    for step, grads in enumerate(zip(*streams)):
        for mine, theirs, grad in zip(ours_params, peer_params, grads):
            mine.grad, theirs.grad = grad, grad.clone()
        ours.step()
        peer.step()
        for scheduler in schedulers:
            scheduler.step()
        for i, (mine, theirs) in enumerate(zip(ours_params, peer_params)):
            # fp32 sums in another order, over a hundred steps: errors are relative to what a parameter has been
            reach[i] = max(reach[i], theirs.abs().max().item())
            atol = 3e-6 * reach[i]
            torch.testing.assert_close(
                mine, theirs, rtol=1e-5, atol=atol, msg=lambda text, at=step: f"step {at}: {text}"
            )

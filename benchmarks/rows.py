"""The optimizers that are timed: ours and its peers. Peers are imported when they are built, and may be missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from baoc import BlockOptimizer, Budget, EffectPlanner, ModelFacts
from benchmarks.workloads import GPT2, SMALL

Params = Mapping[str, Parameter]

LR = 1e-6  # parameters are shared and stepped hundreds of times: their values must stay what they are
OURS = "baoc"
PEERS = ("torchao", "bitsandbytes")
CONFIGURATIONS = (
    "adamw-32",
    "adamw-16",
    "adamw-8",
    "sgdm-8",
    "sgdwm-8",
    "adamw[m=bf16,v=factored]",
    "adamw[m=int8,v=factored]",
    "adafactor",
    "sgd",
    "lion-8",
    "lion-4",
    "sgdwm-4",
    "adamw[m=int4,v=factored]",
    "adamw[m=int8,v=row-mean]",
    "adamw[m=int8,v=col-mean]",
)
BALANCED = ("colnorm", "colnorm-8", "sinkhorn", "sinkhorn-8")
"""For matrices alone."""
ITERATED = (
    "muon-8 else adamw[m=int8,v=factored]",
    "muon-4 else adamw[m=int4,v=factored]",
    "normuon-8 else adamw[m=int8,v=factored]",
    "spectral else colnorm",
)
"""With Newton-Schulz iterations: for the matrices of a model."""
BUDGETS = (0.5, 0.25)


@dataclass(frozen=True)
class Row:
    """One optimizer. Its name begins with its package."""

    name: str
    build: Callable[[Params], Optimizer]

    @property
    def package(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def uniform(configuration: str) -> Row:
    return Row(f"{OURS} {configuration}", partial(_uniform, configuration))


def planned(budget: float) -> Row:
    return Row(f"{OURS} plan at {budget:g}", partial(_planned, budget))


FUSED = Row("torch AdamW fused", lambda params: torch.optim.AdamW(params.values(), LR, fused=True))
"""What all others are compared with."""


def rows(workload: str) -> list[Row]:
    """All rows of a workload; plans are for models only."""
    return [
        *map(uniform, CONFIGURATIONS),
        *(map(uniform, BALANCED) if workload != SMALL else ()),
        *(map(uniform, ITERATED) if workload == GPT2 else ()),
        *(map(planned, BUDGETS) if workload == GPT2 else ()),
        FUSED,
        Row("torch AdamW foreach", lambda params: torch.optim.AdamW(params.values(), LR, foreach=True)),
        Row("torch Adafactor", lambda params: torch.optim.Adafactor(params.values(), LR)),
        Row("torchao AdamW8bit", partial(_torchao, "AdamW8bit")),
        Row("torchao AdamW4bit", partial(_torchao, "AdamW4bit")),
        Row("torchao AdamWFp8", partial(_torchao, "AdamWFp8")),
        Row("bitsandbytes AdamW8bit", _bitsandbytes),
    ]


def _uniform(configuration: str, params: Params) -> Optimizer:
    return BlockOptimizer(params.items(), LR, plan=configuration)


def _planned(budget: float, params: Params) -> Optimizer:
    """Use the default plan without Newton-Schulz iterations, which would hide everything else."""
    planner = EffectPlanner(forbid=("muon*", "normuon*", "spectral"))
    plan = planner.initial_plan(ModelFacts.of(params), Budget(budget))
    return BlockOptimizer(params.items(), LR, plan=plan)


def _torchao(name: str, params: Params) -> Optimizer:
    import torchao.optim

    torch.compiler.config.force_disable_caches = True  # or its first step would depend on who ran it before
    optimizer: Optimizer = getattr(torchao.optim, name)(params.values(), lr=LR, weight_decay=0.01)
    return optimizer


def _bitsandbytes(params: Params) -> Optimizer:
    import bitsandbytes

    optimizer: Optimizer = bitsandbytes.optim.AdamW8bit(params.values(), lr=LR, weight_decay=0.01)
    return optimizer

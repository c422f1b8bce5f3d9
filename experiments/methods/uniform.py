"""One configuration of ours for the whole model. Its spelling is the method's name."""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn

import baoc
from experiments.methods.base import Method, MethodError, Settings


def uniform(spelling: str) -> Method:
    """The method of a spelling, which settings of the optimizer may follow.

    >>> uniform("muon[m=int8] else adamw-16").label
    'muon-8 else adamw-16'
    >>> uniform("muon-8; update_rms=0.2").label
    'muon-8; update_rms=0.2'
    """
    first, *others = spelling.split(";")
    configuration, given = baoc.parse(first), arguments(spelling, others)

    def build(model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
        hyper = {"betas": settings.betas, "weight_decay": settings.weight_decay, **given}
        return baoc.BlockOptimizer(model, lr=lr, plan=configuration, **hyper)

    return Method(spelling, ";".join([configuration.alias, *others]), build, note="baoc")


def arguments(spelling: str, texts: list[str]) -> dict[str, Any]:
    """Settings of the optimizer in a method's name.

    >>> arguments("muon-8; update_rms=0.2", [" update_rms=0.2"])
    {'update_rms': 0.2}
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name.strip()] = ast.literal_eval(value.strip())
        except (SyntaxError, ValueError):
            raise MethodError(
                f"cannot read the setting {text.strip()!r} of {spelling!r}. Write it like 'muon-8; update_rms=0.2'."
            ) from None
    return found

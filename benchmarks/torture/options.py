"""Odd arguments, and other defaults of torch.

An argument of another type is refused at construction, by one of Python's usual errors, or the run trains, and its
checkpoint can be read with ``weights_only=True`` and resumed. With another default dtype or default device, a run ends
with the same weights, state and plan.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import random
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

import baoc
from baoc import BAOC, EffectPlanner, PaperPlanner, release_gradients
from benchmarks.torture.training import LOW_BITS, loss_of, make_model
from benchmarks.torture.trials import tried

KINDS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "numpy fp32": np.float32,
    "numpy fp64": np.float64,
    "numpy fp16": np.float16,
    "numpy int": np.int64,
    "numpy bool": np.bool_,
    "numpy array": np.array,
    "Decimal": lambda value: Decimal(str(value)),
    "Fraction": Fraction,
    "tensor": lambda value: torch.tensor(value, dtype=torch.float64),
    "bf16 tensor": lambda value: torch.tensor(value, dtype=torch.bfloat16),
    "int tensor": lambda value: torch.tensor(int(value)),
    "text": str,
    "bool": bool,
    "None": lambda value: None,
    "list": lambda value: [value],
    "complex": complex,
    "nan": lambda value: math.nan,
    "infinite": lambda value: math.inf,
    "huge": lambda value: 10**400,
    "negative": lambda value: -value - 1,
}
OWN: dict[str, Any] = {
    "lr": 1e-3,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "memory": 0.6,
    "host_memory": 0.5,
    "maximize": 0,
    "verbose": 0,
    "beta1": 0.9,
    "beta2": 0.99,
}
EFFECTS: dict[str, Any] = {"time": 2.0, "tolerance": 0.2, "tokens": 4096, "preference": 0.5, "replan_every": 2}
PAPER: dict[str, Any] = {
    "warmup": 2,
    "seed": 3,
    "sample_ratio": 0.01,
    "sample_floor": 16,
    "stable_within": 0.1,
    "replan_every": 2,
    "time": 2.0,
}
TOTAL: dict[str, Any] = {"total_memory": 400_000, "activations": 8192, "gradients": 1, "max_norm": 1.0}
GROUPS: dict[str, dict[str, Any]] = {"optimizer": OWN, "effects": EFFECTS, "paper": PAPER, "total": TOTAL}
_REFUSALS = (TypeError, ValueError)  # PlanError and ConfigurationError are ValueErrors


def _optimizer(group: str, name: str, value: Any, model: torch.nn.Module) -> BAOC:
    if group == "effects":
        return BAOC(model, memory=0.6, planner=EffectPlanner(**{name: value}), verbose=False)
    if group == "paper":
        return BAOC(model, memory=0.6, planner=PaperPlanner(**{"warmup": 2, name: value}), verbose=False)
    if group == "total":
        optimizer = BAOC(
            model, **{"total_memory": 400_000, "verbose": False, **({} if name == "max_norm" else {name: value})}
        )
        release_gradients(optimizer, value if name == "max_norm" else 1.0)
        return optimizer
    if name in ("beta1", "beta2"):
        betas = (value, 0.99) if name == "beta1" else (0.9, value)
        return BAOC(model, betas=betas, memory=0.6, verbose=False)
    return BAOC(model, **{"memory": 0.6, "verbose": False, name: value})


def odd_argument(group: str, draw: random.Random) -> str:
    """Pass one argument as another type, train, save, load."""
    name, kind = draw.choice(list(GROUPS[group])), draw.choice(list(KINDS))
    try:
        value = KINDS[kind](GROUPS[group][name])
        models = [make_model() for _ in range(2)]
        first, second = (_optimizer(group, name, value, model) for model in models)
    except _REFUSALS as error:
        assert "\n" not in str(error) or group == "optimizer", f"{name} as {kind}: {error}"
        return "refused"
    try:
        _train(models[0], first, range(3))
        if not all(param.isfinite().all() for param in models[0].parameters()):
            return "diverged"  # such as eps=0 where gradients are zero: as in torch, and nothing to resume
        file = io.BytesIO()
        torch.save({"model": models[0].state_dict(), "optimizer": first.state_dict()}, file)
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        models[1].load_state_dict(saved["model"])
        second.load_state_dict(saved["optimizer"])
        for model, optimizer in zip(models, (first, second)):
            _train(model, optimizer, range(3, 5))
        assert digest(models[0], first) == digest(models[1], second), "the resumed run differs"
    except Exception as error:
        raise AssertionError(f"{name}={value!r} ({kind}): {type(error).__name__}: {error}") from error
    return "accepted"


# ---- defaults of torch ----

PLANNERS: dict[str, Callable[[], Any]] = {
    "effects": EffectPlanner,
    "effects, replan": lambda: EffectPlanner(replan_every=2),
    "paper": lambda: PaperPlanner(warmup=3),
    "paper, replan": lambda: PaperPlanner(warmup=2, replan_every=2),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DEVICES = ("cpu", "meta")


@contextlib.contextmanager
def _defaults(dtype: torch.dtype, device: str) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def other_defaults(planner: str, draw: random.Random) -> str:
    """Train, save, load and change the budget with other defaults of torch; compare with a run without."""
    memory, steps = draw.choice((0.3, 0.5, 0.7)), draw.randrange(1, 5)
    dtype, device = draw.choice(DTYPES), draw.choice(DEVICES)
    weights = draw.choice((torch.float32, torch.bfloat16, torch.float16))
    kernel = draw.choice(("auto", "eager"))
    reads_gradients = "paper" in planner
    has_low_bits = weights is not torch.float32 and not reads_gradients and draw.random() < 0.5
    releases = not reads_gradients and draw.random() < 0.5

    def outcome(under: Callable[[], Any]) -> str:
        model, resumed = make_model(weights), make_model(weights)
        with under():
            first, second = (
                BAOC(each, memory=memory, planner=PLANNERS[planner](), kernel=kernel, verbose=False)
                for each in (model, resumed)
            )
            for each in (first, second):
                if has_low_bits:
                    each.set_plan(LOW_BITS)
                if releases:
                    release_gradients(each)
        _train(model, first, range(steps), under)
        with under():
            resumed.load_state_dict(model.state_dict())
            second.load_state_dict(first.state_dict())
            baoc.to_torch(second)
            second.metrics()
        _train(resumed, second, range(steps, steps + 3), under)
        return digest(resumed, second)

    is_same = outcome(lambda: _defaults(dtype, device)) == outcome(contextlib.nullcontext)
    assert is_same, f"{dtype} and {device} change a run of {weights} with kernel {kernel!r}"
    return f"equal with {str(dtype).removeprefix('torch.')} on {device}"


def _train(
    model: torch.nn.Module, optimizer: BAOC, steps: range, under: Callable[[], Any] = contextlib.nullcontext
) -> None:
    """Make steps; only updates run under other defaults, which would change the model and its data."""
    for step in steps:
        loss = loss_of(model, step)
        with under():
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        optimizer.zero_grad()


def digest(model: torch.nn.Module, optimizer: BAOC) -> str:
    """Return a hash of the weights, the state and the plan."""
    values: list[Any] = [*model.parameters(), *(optimizer.state[param] for param in model.parameters())]
    found = hashlib.sha256(optimizer.plan.to_json().encode())
    found.update(b"".join(map(_bytes, values)))
    return found.hexdigest()


def _bytes(value: Any) -> bytes:
    if isinstance(value, dict):
        return b"".join(_bytes(value[key]) for key in sorted(value))
    if isinstance(value, Tensor):
        return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return repr(value).encode()


def run_arguments(times: int, seed: int = 0, names: list[str] | None = None) -> dict[str, Any]:
    """Try ``times`` arguments."""
    return tried(times, seed, names or list(GROUPS), odd_argument)


def run_defaults(times: int, seed: int = 0, names: list[str] | None = None) -> dict[str, Any]:
    """Try ``times`` runs under other defaults."""
    return tried(times, seed, names or list(PLANNERS), other_defaults)

"""The state dicts of ``torch.optim``'s own optimizers, read as ours and written from ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from baoc.core.configuration import Configuration, parse
from baoc.core.sharding import HOST
from baoc.core.spec import DEFAULT_BETAS
from baoc.optim import conversion
from baoc.optim.groups import Group
from baoc.optim.members import Member
from baoc.optim.state import ParamState, is_fresh

MATURE_AGE = 1000
"""The age of the momentum of ``torch.optim.SGD``, which does not count steps: older than its memory."""


def is_torch_entry(entry: dict[str, Any]) -> bool:
    """Return whether a saved state was written by a torch.optim optimizer."""
    return not entry.keys().isdisjoint({"exp_avg", "momentum_buffer", "row_var", "variance"})


def read_entry(entry: dict[str, Any], name: str) -> tuple[Configuration, ParamState]:
    """Return a torch.optim state as an fp32 configuration and its state."""
    step = int(entry["step"]) if "step" in entry else MATURE_AGE
    if "exp_avg" in entry:
        if "max_exp_avg_sq" in entry:
            raise ValueError(
                f"parameter {name!r} was trained with amsgrad=True, which has no counterpart here. Load it into "
                "torch.optim, or drop 'max_exp_avg_sq' from its state to go on without."
            )
        m, v = _fp32(entry["exp_avg"]), _fp32(entry["exp_avg_sq"])
        return parse("adamw-32"), {"m": m, "m.age": step, "v": v, "v.age": step}
    if "momentum_buffer" in entry:
        if entry["momentum_buffer"] is None:
            return parse("sgd"), {}
        return parse("sgdm-32"), {"m": _fp32(entry["momentum_buffer"]), "m.age": step}
    age = torch.tensor(step, dtype=torch.float32, device=HOST)
    if entry.get("variance") is not None:
        return parse("adafactor[v=fp32]"), {"v": _fp32(entry["variance"]), "v.age": age}
    row, col = _fp32(entry["row_var"]).squeeze(-1), _fp32(entry["col_var"]).squeeze(-2)
    return parse("adafactor-32"), {"v.row": row, "v.col": col, "v.age": age}


def read_group(group: Group) -> Group:
    """Return a torch.optim param group with our names for its settings. Our own groups pass through."""
    read = dict(group)
    if "momentum" in read and "betas" not in read:
        if read.get("nesterov") or read.get("dampening"):
            raise ValueError(
                "SGD with nesterov momentum or dampening has no counterpart here. Go on with torch.optim.SGD, or set "
                "nesterov=False and dampening=0 in the checkpoint's param groups."
            )
        read["betas"] = (read["momentum"], DEFAULT_BETAS[1])
    if "d" in read and isinstance(read.get("eps"), (tuple, list)):
        read["clip_threshold"], read["adafactor_eps"] = read.pop("d"), tuple(read.pop("eps"))
    return read


class HasMembers(Protocol):
    """What :func:`to_torch` needs from an optimizer."""

    @property
    def state(self) -> Mapping[Tensor, ParamState]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def members(self) -> tuple[Member, ...]: ...


def to_torch(optimizer: HasMembers, kind: str = "adamw") -> dict[str, Any]:
    """Return a state dict that one of torch's own optimizers can load, whatever the plan is.

    State is decoded to fp32; fp32 slots share memory with the optimizer. Learning-rate multipliers are dropped, since
    torch's optimizers have none.

    Args:
        optimizer: a ``BlockOptimizer``.
        kind: ``"adamw"``, ``"adam"``, ``"sgd"`` or ``"adafactor"``.

    Raises:
        ValueError: if ``kind`` is unknown.

    Example:
        >>> from baoc import BlockOptimizer
        >>> weight = nn.Parameter(torch.ones(8, 8))
        >>> ours, theirs = BlockOptimizer([weight], plan="adamw-8"), torch.optim.AdamW([weight])
        >>> weight.grad = torch.ones(8, 8)
        >>> ours.step()
        >>> theirs.load_state_dict(to_torch(ours))
        >>> round(theirs.state[weight]["exp_avg"][0, 0].item(), 6)
        0.1
    """
    if kind not in _TORCH_FORMS:
        raise ValueError(f"unknown torch optimizer {kind!r}. Choose one of {', '.join(_TORCH_FORMS)}.")
    form = _TORCH_FORMS[kind]
    packed = optimizer.state_dict()["param_groups"]
    keys = [key for group in packed for key in group["params"]]
    state = {}
    for key, member in zip(keys, optimizer.members()):
        held = optimizer.state.get(member.param)
        if held and not is_fresh(held):
            layout = parse(form.configuration).layout(member.shape, rows=member.place.rows)
            converted = conversion.convert(conversion.holding_of(member, held), layout, member.state_device)
            entry = form.write(converted)
            if member.param.is_complex():
                entry = {name: torch.view_as_complex(t) if t.dim() else t for name, t in entry.items()}
            state[key] = entry
    defaults = form.optimizer([nn.Parameter(torch.zeros(1, dtype=torch.float32, device=HOST))]).defaults
    return {"state": state, "param_groups": [_written_group(group, defaults) for group in packed]}


def _written_group(group: Group, defaults: dict[str, Any]) -> Group:
    written = {key: group.get(key, default) for key, default in defaults.items()}
    if "momentum" in defaults:
        written["momentum"] = group["betas"][0]
    if "d" in defaults:
        written["d"], written["eps"] = group["clip_threshold"], group["adafactor_eps"]
    return written | {key: group[key] for key in ("params", "param_names") if key in group}


def _fp32(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.detach().to(torch.float32)


def _write_adam(state: ParamState) -> dict[str, Any]:
    step = torch.tensor(state["v.age"], dtype=torch.float32, device=HOST)
    return {"step": step, "exp_avg": state["m"], "exp_avg_sq": state["v"]}


def _write_sgd(state: ParamState) -> dict[str, Any]:
    return {"momentum_buffer": state["m"]}


def _write_adafactor(state: ParamState) -> dict[str, Any]:
    if "v" in state:
        return {"step": state["v.age"], "variance": state["v"]}
    return {"step": state["v.age"], "row_var": state["v.row"].unsqueeze(-1), "col_var": state["v.col"].unsqueeze(-2)}


class _TorchForm(NamedTuple):
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    configuration: str
    write: Callable[[ParamState], dict[str, Any]]


_TORCH_FORMS = {
    "adamw": _TorchForm(torch.optim.AdamW, "adamw-32", _write_adam),
    "adam": _TorchForm(torch.optim.Adam, "adam-32", _write_adam),
    "sgd": _TorchForm(torch.optim.SGD, "sgdm-32", _write_sgd),
    "adafactor": _TorchForm(torch.optim.Adafactor, "adafactor-32", _write_adafactor),
}

"""Every method of the paper's comparison behind one small interface.

>>> [name for name in names() if name.startswith("adamw")]
['adamw32', 'adamw16', 'adamw8', 'adamw8-torchao', 'adamw8-bitsandbytes']
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
>>> optimizer = get("by-size@0.5").build(model, 1e-3, Settings(weight_decay=0.1))
>>> optimizer.plan.state_bytes <= 0.5 * optimizer.plan.reference_bytes
True
"""

from __future__ import annotations

import math
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

import torch  # noqa: F401 - the docstring example needs it

from baoc import ConfigurationError
from baoc.planners.base import AUTO
from baoc.tools.models.resolve import call_function
from experiments.methods import adam_mini, adamw, budgeted, by_role, cosmos, galore, muon, spam
from experiments.methods.base import Method, MethodError, Settings
from experiments.methods.uniform import uniform

__all__ = ["Method", "MethodError", "Settings", "get", "load", "names"]

_FIXED: dict[str, Method] = {
    method.name: method for family in (adamw, adam_mini, galore, spam, muon, cosmos) for method in family.METHODS
}
_BUDGETED: dict[str, Callable[[float], Method]] = {
    "baoc": budgeted.baoc_at,
    "baoc-paper": budgeted.baoc_paper_at,
    "by-type": budgeted.by_type_at,
    "by-size": budgeted.by_size_at,
}
_DEFAULT_SHARE = 0.5


def names() -> list[str]:
    """Return all methods. Those with a budget have the paper's default, half of AdamW16's state; any share works."""
    return [*_FIXED, *(f"{family}@{_DEFAULT_SHARE:g}" for family in _BUDGETED)]


def get(name: str) -> Method:
    """Return the method of a name: ``muon``, ``baoc@0.25``, ``baoc@auto``, or your own, ``file.py:function``.

    A configuration is a name too, and so are several of them, by role or parameter.

    >>> get("baoc@0.25").label, get("muon-8 else adamw-16").label, get("hidden=muon-8; embedding=colnorm").label
    ('baoc default 0.25', 'muon-8 else adamw-16', 'hidden=muon-8; embedding=colnorm')
    """
    file, _, function = name.rpartition(":")
    if file.endswith(".py"):
        return load(file, function)
    family, at, share = name.partition("@")
    if name == f"baoc@{AUTO}":
        return budgeted.baoc_at(AUTO)
    if at and family in _BUDGETED:
        return _BUDGETED[family](0.0 if family == "baoc" and share == "0" else _share(name, share))
    if name in _FIXED:
        return _FIXED[name]
    try:
        return by_role.by_role(name) if by_role.is_by_role(name) else uniform(name)
    except ConfigurationError as error:
        close = get_close_matches(name, names(), n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        known = f"Known: {', '.join(names())} (any share after @)"
        raise MethodError(f"there is no method {name!r}.{hint} {known}. Nor is it a configuration: {error}") from None


def load(path: str | Path, function: str = "method") -> Method:
    """Return your own method: what a function without arguments in a Python file returns."""
    method = call_function(Path(path), function)
    if not isinstance(method, Method):
        raise MethodError(f"{path}:{function} returned {type(method).__name__}; it must return a Method.")
    return method


def _share(name: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not (math.isfinite(share) and share > 0):
        raise MethodError(f"{text!r} in {name!r} is not a share of AdamW16's state: write a number above 0, like 0.5.")
    return share

"""From what a person types to a model on the meta device, which has shapes and no memory."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any

import torch
from torch import nn

from baoc.models import ALIASES, MODELS
from baoc.models.config_file import find_config, from_config_file
from baoc.models.packages import ModelError


def resolve(model: str) -> nn.Module:
    """The model of a name, a config file or a folder with one, or a ``file.py:function``, on the meta device.

    >>> next(resolve("vit").parameters()).device
    device(type='meta')
    """
    file, colon, function = model.rpartition(":")
    if (name := ALIASES.get(model, model)) in MODELS:
        build = MODELS[name]
    elif colon and file.endswith(".py"):
        return _from_function(Path(file), function)
    elif model.endswith(".py"):
        return _from_function(Path(model), "")
    elif Path(model).exists():
        build = partial(from_config_file, find_config(Path(model)))
    else:
        raise ModelError(_not_found(model))
    with explained(f"{model} cannot be built"), torch.device("meta"):
        return build()


def call_function(path: Path, name: str, failure: str = "failed") -> Any:
    """What a function without arguments in a person's own file returns; whatever goes wrong there is one line."""
    if not path.is_file():
        raise ModelError(f"there is no file {str(path)!r}.")
    with importable(path.parent):
        with explained(f"{path} cannot be imported", path):
            module = load_file(path)
        function = getattr(module, name, None) if name else None
        if not callable(function):
            raise ModelError(_no_function(path, name, module))
        with explained(f"{path}:{name} {failure}", path):
            return function()


def _from_function(path: Path, name: str) -> nn.Module:
    with torch.device("meta"):
        result = call_function(path, name, "failed on the meta device")
    return _as_module(result, f"{path}:{name}")


def _as_module(result: Any, source: str) -> nn.Module:
    """What a function returned, read as a model: itself, its ``.model``, or its first element."""
    if not isinstance(result, nn.Module):
        candidates = (
            getattr(result, "model", None),
            result[0] if isinstance(result, (tuple, list)) and result else None,
        )
        result = next((candidate for candidate in candidates if isinstance(candidate, nn.Module)), result)
    if not isinstance(result, nn.Module):
        raise ModelError(
            f"{source} returned {_kind(result)}. It must return an nn.Module, an object with one as .model, or a tuple "
            "that starts with one."
        )
    return result


def load_file(path: Path) -> ModuleType:
    """Import a Python file of the user's."""
    spec = importlib.util.spec_from_file_location(f"_baoc_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # always so for a file that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Let a file import its neighbours, as it can when Python runs it."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


@contextmanager
def explained(failure: str, file: Path | None = None) -> Iterator[None]:
    """Whatever goes wrong in other people's code becomes one line, with the place in ``file`` where it did."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if file and Path(frame.filename).resolve() == file.resolve()]
        place = f" (line {lines[-1]})" if lines else ""
        reason = shorten(str(error), width=300, placeholder=" ...")
        raise ModelError(f"{failure}{place}: {type(error).__name__}: {reason}") from error


def _not_found(model: str) -> str:
    names = ", ".join(MODELS)
    if model.endswith(".json") or model.startswith((".", "/", "~")):
        return f"there is no file or folder {model!r}."
    wanted = model.lower().rpartition("/")[2]
    close = get_close_matches(wanted, MODELS, n=2, cutoff=0.5)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return (
        f"unknown model {model!r}.{hint} Known: {names}; or pass a config.json, a folder that holds one, or "
        "file.py:function (nothing is downloaded)."
    )


def _no_function(path: Path, name: str, module: ModuleType) -> str:
    functions = [
        key
        for key, value in vars(module).items()
        if callable(value) and not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    has = f"It has {', '.join(functions)}." if functions else "It has none."
    if not name:
        return f"which function of {str(path)!r} returns the model? Write {path}:function. {has}"
    return f"{str(path)!r} has no function {name!r}. {has}"


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"

"""Build a model on the meta device from a name, a ``config.json`` or a Python function.

Tensors on the meta device have shapes and no memory.
"""

from __future__ import annotations

import importlib.util
import json
import os
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
from torch.overrides import TorchFunctionMode

from baoc.tools.models import ALIASES, MODELS, ModelError, optional_package

CONFIG = "config.json"
_HUB_KEYS = frozenset(
    (
        "auto_map",  # code of a model repository
        "custom_pipelines",
        "attn_implementation",  # may name a repository with kernels
        "_attn_implementation",
        "_attn_implementation_internal",
        "experts_implementation",
        "_experts_implementation",
        "_experts_implementation_internal",
        "use_pretrained_backbone",  # weights
        "pretrained",  # arguments of timm.create_model: weights, and a file that it unpickles
        "pretrained_cfg",
        "pretrained_cfg_overlay",
        "checkpoint_path",
    )
)


def resolve(model: str) -> nn.Module:
    """Build a model on the meta device.

    Args:
        model: A name of :data:`~baoc.tools.models.MODELS`, a ``config.json``, a folder that contains one, or
            ``file.py:function``, where the function takes no arguments and returns the model.

    Returns:
        The model.

    Raises:
        ModelError: If the model cannot be found or built.

    Example:
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
    with explained(f"{model} cannot be built"), torch.device("meta"), _WithoutRandomNumbers():
        return build()


class _WithoutRandomNumbers(TorchFunctionMode):
    """Leave out random numbers on the meta device: they have no values, and torch imports its compiler for them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensor: Any = args[0] if args else (kwargs or {}).get("tensor")
        if getattr(func, "__name__", "") in ("normal_", "uniform_") and tensor.is_meta:
            return tensor
        return func(*args, **(kwargs or {}))


def call_function(path: Path, name: str, failure: str = "failed") -> Any:
    """Call a function in a user's Python file.

    Args:
        path: The Python file.
        name: The name of a function without arguments.
        failure: What the error message says if the call raises.

    Returns:
        What the function returns.

    Raises:
        ModelError: If the file or the function does not exist, or if it raises. The message is one line.
    """
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
    with torch.device("meta"), _WithoutRandomNumbers():
        result = call_function(path, name, "failed on the meta device")
    return _as_module(result, f"{path}:{name}")


def _as_module(result: Any, source: str) -> nn.Module:
    """Return the model in a function's result: the result itself, its ``.model``, or its first element."""
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
    """Import a user's Python file as a module."""
    spec = importlib.util.spec_from_file_location(f"_baoc_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # never None for a file that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module by name
    spec.loader.exec_module(module)
    return module


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Let a file import modules from its own folder, as ``python file.py`` does."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


@contextmanager
def explained(failure: str, file: Path | None = None) -> Iterator[None]:
    """Turn any exception of user or library code into a one-line ModelError with the line number in ``file``."""
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
    if Path(model).suffix[1:].isalpha() or model.startswith((".", "/", "~")):  # model.stats, but not llama-3.1-8b
        return f"there is no file or folder {model!r}."
    wanted = model.lower().rpartition("/")[2]
    close = get_close_matches(wanted, MODELS, n=2, cutoff=0.5)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    return (
        f"unknown model {model!r}.{hint} Known models: {names}. You can also pass a config.json, a folder that "
        "contains one, or file.py:function. Nothing is downloaded."
    )


def _no_function(path: Path, name: str, module: ModuleType) -> str:
    functions = [
        key
        for key, value in vars(module).items()
        if callable(value) and not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]
    has = f"It has {', '.join(functions)}." if functions else "It has no functions."
    if not name:
        return f"which function of {str(path)!r} returns the model? Write {path}:function. {has}"
    return f"{str(path)!r} has no function {name!r}. {has}"


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def find_config(path: Path) -> Path:
    """Return the path of a config file, given the file or the folder that contains it.

    Raises:
        ModelError: If the folder contains no ``config.json``.

    Example:
        >>> str(find_config(Path("model/config.json")))
        'model/config.json'
    """
    if not path.is_dir():
        return path
    if (path / CONFIG).is_file():
        return path / CONFIG
    parts = sorted(str(inner.parent) for inner in path.glob(f"*/{CONFIG}"))
    hint = f" These folders have one: {', '.join(parts)}." if parts else ""
    raise ModelError(f"the folder {str(path)!r} has no {CONFIG}.{hint}")


def from_config_file(path: Path) -> nn.Module:
    """Build the model that a transformers or diffusers config file describes, on the default device.

    The weights are random. Only this file is read: keys that would load weights or code from a model hub are ignored,
    and the hub client is in offline mode while the model is built.

    Args:
        path: The ``config.json``.

    Returns:
        The model.

    Raises:
        ModelError: If the file is not the config of a model, or its model class is unknown.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "config.json")
        ...     _ = path.write_text('{"model_type": "gpt2", "n_layer": 2, "n_embd": 24, "n_head": 2}')
        ...     type(from_config_file(path)).__name__
        'GPT2LMHeadModel'
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{str(path)!r} is not a config file: it is not JSON ({error}).") from None
    except OSError as error:
        raise ModelError(f"cannot read {str(path)!r}: {error.strerror}.") from None
    content = _without_hub_keys(content)
    with _offline():
        if isinstance(content, dict) and "_class_name" in content:
            return _from_diffusers(content, path)
        if isinstance(content, dict) and "model_type" in content:
            return _from_transformers(content, path)
    raise ModelError(
        f'{str(path)!r} is not the config of a model: it has neither "model_type" (transformers) nor '
        '"_class_name" (diffusers).'
    )


def _without_hub_keys(content: Any) -> Any:
    """Remove keys, at any depth, that make transformers load weights or code from a model hub.

    >>> _without_hub_keys({"n_layer": 2, "auto_map": {}, "text_config": {"_attn_implementation": "user/kernel"}})
    {'n_layer': 2, 'text_config': {}}
    """
    if isinstance(content, dict):
        return {key: _without_hub_keys(value) for key, value in content.items() if key not in _HUB_KEYS}
    if isinstance(content, list):
        return [_without_hub_keys(value) for value in content]
    return content


def _use_random_backbones(config: Any) -> None:
    """Turn off pretrained backbones in a config and in the configs inside it: some classes default to them."""
    if hasattr(config, "use_pretrained_backbone"):
        config.use_pretrained_backbone = False
    for value in list(vars(config).values()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            _use_random_backbones(value)


@contextmanager
def _offline() -> Iterator[None]:
    """Keep the Hugging Face hub client offline.

    The client reads the environment variable when it is imported, so its constant is set as well.
    """
    variable = "HF_HUB_OFFLINE"
    try:
        hub: Any = importlib.import_module("huggingface_hub.constants")
    except ModuleNotFoundError:  # then neither transformers nor diffusers is installed
        yield
        return
    before, was_offline = os.environ.get(variable), hub.HF_HUB_OFFLINE
    os.environ[variable], hub.HF_HUB_OFFLINE = "1", True
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = was_offline
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _from_diffusers(content: dict[str, Any], path: Path) -> nn.Module:
    model_class = _class_in("diffusers", content["_class_name"], path)
    if not issubclass(model_class, nn.Module):
        raise ModelError(
            f"{str(path)!r} describes a {model_class.__name__}, which is not a model. Pass the config.json of a part "
            "that is trained, such as 'unet/config.json' or 'transformer/config.json'."
        )
    model: nn.Module = model_class.from_config(content)
    return model


def _from_transformers(content: dict[str, Any], path: Path) -> nn.Module:
    transformers = optional_package("transformers")
    model_type, known = content["model_type"], transformers.CONFIG_MAPPING
    if model_type not in known:
        close = get_close_matches(str(model_type), list(known.keys()), n=3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        version = transformers.__version__
        raise ModelError(f"transformers {version} does not know the model_type {model_type!r} in {str(path)!r}.{hint}")
    config = known[model_type].from_dict(content)
    _use_random_backbones(config)
    if architectures := content.get("architectures"):
        model = _class_in("transformers", architectures[0], path)(config)
    else:
        model = _auto_class(transformers, config).from_config(config)
    model.tie_weights()
    built: nn.Module = model
    return built


def _auto_class(transformers: Any, config: Any) -> Any:
    """Return the first auto class that supports a config, language models first."""
    kinds = (
        (transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
        (transformers.AutoModelForSeq2SeqLM, transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
    )
    return next((auto for auto, mapping in kinds if type(config) in mapping), transformers.AutoModel)


def _class_in(package: str, name: str, path: Path) -> Any:
    module = optional_package(package)
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise ModelError(
            f"{str(path)!r} names the class {name!r}, which {package} {module.__version__} does not have. Upgrade "
            f"{package}, or build the model in a function of your own and pass file.py:function."
        )
    return found

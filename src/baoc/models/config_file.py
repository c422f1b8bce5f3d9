"""Models from the ``config.json`` that transformers and diffusers write. The file is all that is read."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from baoc.models.packages import ModelError, optional_package

CONFIG = "config.json"


def find_config(path: Path) -> Path:
    """The config file itself, or the one in a folder.

    >>> str(find_config(Path("model/config.json")))
    'model/config.json'
    """
    if not path.is_dir():
        return path
    if (path / CONFIG).is_file():
        return path / CONFIG
    parts = sorted(str(inner.parent) for inner in path.glob(f"*/{CONFIG}"))
    hint = f" Its parts do: {', '.join(parts)}." if parts else ""
    raise ModelError(f"the folder {str(path)!r} has no {CONFIG}.{hint}")


def from_config_file(path: Path) -> nn.Module:
    """Build the model that a config file describes, with fresh weights on the default device.

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
    if isinstance(content, dict) and "_class_name" in content:
        return _from_diffusers(content, path)
    if isinstance(content, dict) and "model_type" in content:
        return _from_transformers(content, path)
    raise ModelError(
        f'{str(path)!r} is not the config of a model: it has neither "model_type" (transformers) nor '
        '"_class_name" (diffusers).'
    )


def _from_diffusers(content: dict[str, Any], path: Path) -> nn.Module:
    model_class = _class_in("diffusers", content["_class_name"], path)
    if not issubclass(model_class, nn.Module):
        raise ModelError(
            f"{str(path)!r} describes a {model_class.__name__}, which is not a model. Pass the config.json of a part "
            "that is trained, such as the one in 'unet' or 'transformer'."
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
    if architectures := content.get("architectures"):
        model = _class_in("transformers", architectures[0], path)(config)
    else:
        model = _auto_class(transformers, config).from_config(config)
    model.tie_weights()
    built: nn.Module = model
    return built


def _auto_class(transformers: Any, config: Any) -> Any:
    """The first kind of model that transformers has for a config, language models first."""
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

"""Where pretrained weights are: a folder, the Hugging Face cache, or the hub. Nothing is downloaded here."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from experiments.packages import need
from experiments.workloads.base import Options

HUB = "hub"
"""The value of ``Options.pretrained`` that means each size's published weights."""
_MARKS = ("config.json", "model_index.json")  # of a model and of a diffusers pipeline
_PATIENCE = 5.0  # seconds


def source(size: str, published: str | None, options: Options) -> str | None:
    """Return the folder or hub id of a size's weights; None for random weights.

    A folder with a folder for this size gives that one. A folder of such folders has none for a model that the paper
    trains from scratch.

    >>> source("gpt2", "openai-community/gpt2", Options(pretrained="hub"))
    'openai-community/gpt2'
    >>> source("gpt2", "openai-community/gpt2", Options(pretrained="my/gpt"))
    'my/gpt'
    """
    given = options.pretrained
    if not given:
        return None
    if given == HUB:
        return published
    folder = Path(given).expanduser()
    if (folder / size).exists():
        return str(folder / size)
    if folder.is_dir() and published is None and any(is_model(one) for one in folder.iterdir()):
        return None  # a folder of folders
    return given


def is_model(folder: Path) -> bool:
    """Whether a folder holds a model, not folders of models."""
    return any((folder / name).is_file() for name in _MARKS)


def absence(where: str) -> str | None:
    """Return why weights cannot be had, in one line; None if they can. The answer takes seconds at most."""
    path = Path(where).expanduser()
    if path.is_file() or path.is_dir():
        if path.is_file() or is_model(path):
            return None
        return f"the weights {where!r} are missing: the folder has no {' and no '.join(_MARKS)}."
    if where.startswith((".", "/", "~")) or where.count("/") != 1:
        return f"the weights {where!r} are missing: there is no such folder."
    names = ("config.json", "unet/config.json")
    if any(_is_cached(where, name, "model") for name in names):
        return None
    reason = reachable(where, "model")
    if reason is None:
        return None
    return f"the weights {where!r} are missing: {reason}. Give a folder: --pretrained DIR."


def _is_cached(repo: str, name: str, kind: str) -> bool:
    hub = need("huggingface_hub", "pretrained weights")
    return isinstance(hub.try_to_load_from_cache(repo, name, repo_type=kind), str)


@lru_cache(maxsize=64)  # several workloads share weights and data
def reachable(repo: str, kind: str) -> str | None:
    """Return why the hub does not give a repository; None if it does. One short request, no retries."""
    if is_offline():
        return "the hub is switched off by HF_HUB_OFFLINE"
    if _unreachable():
        return "the hub cannot be reached"
    hub = need("huggingface_hub", "the hub")
    name = ".gitattributes"  # every repository has it, and a gated one does not give it away
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(repo, name, repo_type=kind), timeout=_PATIENCE)
    except hub.errors.GatedRepoError:
        return "the hub gives it only to accounts with access: ask for it on its page, then `hf auth login`"
    except hub.errors.EntryNotFoundError:
        return None
    except hub.errors.RepositoryNotFoundError:
        return "the hub has no such repository"
    except Exception as error:  # of many types, from several packages
        return f"the hub does not answer ({type(error).__name__})"
    return None


def is_offline() -> bool:
    """Whether the user has switched off the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


@lru_cache(maxsize=1)
def _unreachable() -> bool:
    """Ask once: a machine without a network should not wait for every repository."""
    hub = need("huggingface_hub", "the hub")
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url("openai-community/gpt2", "config.json"), timeout=_PATIENCE)
    except hub.errors.HfHubHTTPError:
        return False  # it answered
    except Exception:  # of many types, from several packages
        return True
    return False

"""Packages that only some models need."""

from __future__ import annotations

import importlib
from types import ModuleType


class ModelError(ValueError):
    """A model that cannot be found or built."""


def optional_package(name: str) -> ModuleType:
    """Import a package of the extra ``models``, or say how to get it.

    >>> optional_package("json").__name__
    'json'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ModelError(f"this model needs {name}, which is not installed: pip install 'baoc[models]'") from None

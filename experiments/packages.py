"""Packages of the extra ``experiments``. Only some workloads and methods need one, and import it when they do."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from baoc.tools.models import ModelError


class PackageError(ModelError):
    """A package that is not installed."""


def need(package: str, purpose: str) -> ModuleType:
    """Import a package, or say how to get it.

    >>> need("json", "reading").__name__
    'json'
    >>> need("no_such_package", "the digits dataset")
    Traceback (most recent call last):
    experiments.packages.PackageError: the digits dataset needs no_such_package, which is not installed: pip install 'baoc[experiments]'
    """  # noqa: E501
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        absent = (error.name or package).partition(".")[0]  # it, or a package that it needs itself
        if installed(absent):
            raise
        raise PackageError(not_installed(purpose, absent)) from None


def installed(package: str) -> bool:
    """Whether it could be imported; it is not."""
    return importlib.util.find_spec(package) is not None


def not_installed(purpose: str, *packages: str) -> str:
    """What to tell a person who lacks them."""
    return f"{purpose} needs {', '.join(packages)}, which is not installed: pip install 'baoc[experiments]'"

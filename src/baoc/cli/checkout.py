"""The experiments are not installed with the package: commands that run them import them from a clone."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import baoc
from baoc.cli.common import UsageError

REPOSITORY = Path(baoc.__file__).resolve().parents[2]
"""Where an editable install has its clone."""


def load(module: str) -> ModuleType:
    """``experiments.<module>`` of the clone that baoc was installed from, or else of the current folder.

    >>> load("workloads").__name__
    'experiments.workloads'
    """
    for folder in (REPOSITORY, Path.cwd()):
        if (folder / "experiments" / "runs" / "__init__.py").is_file():
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
            return importlib.import_module(f"experiments.{module}")
    raise UsageError(
        "this command needs a clone of baoc's repository, which has the experiments. In the clone: "
        "pip install -e '.[experiments]', then run it there."
    )

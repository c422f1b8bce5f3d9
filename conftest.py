"""What pytest does not collect: modules whose package is not installed."""

from __future__ import annotations

import importlib.util

_TRITON = "src/baoc/optim/kernels/triton"
collect_ignore_glob = [] if importlib.util.find_spec("triton") else [f"{_TRITON}/device/*.py", f"{_TRITON}/launch.py"]

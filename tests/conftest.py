from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

# Tests run side by side on few cores. Set before any fixture runs: sums of fp32 numbers depend on the threads.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """No test may depend on another's random numbers."""
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def without_compiling() -> Iterator[None]:
    """Torchao compiles for each shape, which would take most of the time."""
    with torch.compiler.set_stance("force_eager"):
        yield

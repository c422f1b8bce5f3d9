from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiments.tiny_workload import WORKLOAD


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """Return the path of a workload file."""
    path = tmp_path / "tiny.py"
    path.write_text(WORKLOAD)
    return str(path)

"""The scripts in examples/ run as their first lines say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import baoc

ROOT = Path(__file__).parents[2]


def torchrun(ranks: int, script: str, *args: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(baoc.__file__).parents[1])}
    run = subprocess.run(
        [*command, str(ROOT / "examples" / script), *args], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.xdist_group("ranks")
def test_fsdp2_trains_on_two_ranks_and_resumes_with_three(tmp_path):
    settings = ("--save-every=3", f"--checkpoints={tmp_path}")
    first = torchrun(2, "fsdp2.py", "--steps=4", *settings)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
    later = torchrun(3, "fsdp2.py", "--steps=12", *settings)
    assert "resuming from step 4 on 3 ranks" in later
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", first + later)]
    assert losses[-1] < losses[0]
    assert "on a rank" in first and "on a rank" in later

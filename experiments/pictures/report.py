"""The page of ``baoc report`` for the demo's GPT: two plans and a run, in a browser without a window."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import baoc
from baoc.tools.report import Run, RunLog
from baoc.tools.report.explorer import Sources, write
from experiments import corpus as corpora
from experiments.demo.training import DECAY, LR
from experiments.tiny_gpt import train

STEPS, SHRUNK = 200, 120
BUDGET, LATER = 0.25, 0.1
SIZE = "1280,1240"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000")


def draw(path: Path, steps: int = STEPS) -> None:
    """Train, write the page, and take its picture.

    Raises:
        FileNotFoundError: Chromium is not installed.
    """
    browser = shutil.which("chromium")
    if browser is None:
        raise FileNotFoundError("the picture of a report needs the command chromium, which is not installed")
    with TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        write(_sources(Path(folder) / "run.jsonl", steps), str(page))
        taken = [f"--window-size={SIZE}", f"--user-data-dir={folder}/profile", f"--screenshot={path.absolute()}"]
        subprocess.run([browser, *FLAGS, *taken, page.as_uri()], check=True, capture_output=True)


def _sources(log: Path, steps: int) -> Sources:
    torch.set_num_threads(1)

    def ours(model: torch.nn.Module) -> torch.optim.Optimizer:
        return baoc.BAOC(model, lr=LR, weight_decay=DECAY, memory=BUDGET, verbose=False)

    logged: RunLog | None = None
    for step, loss, _, optimizer in train(corpora.load(), ours, seed=0, steps=steps):
        assert isinstance(optimizer, baoc.BAOC)
        if logged is None:
            logged, before = RunLog(log, optimizer), optimizer.plan
        logged.step(step, loss)
        if step == SHRUNK * steps // STEPS:
            optimizer.replan(memory=LATER)
    assert logged is not None
    logged.close()
    return Sources("small GPT", plans={"plan.json": before}, run=Run.load(log))

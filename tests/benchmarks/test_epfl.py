"""The EPFL benchmark with our entries: what can be tested without their code."""

from __future__ import annotations

import doctest
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import baoc
from benchmarks.epfl import page, running, source
from benchmarks.epfl.__main__ import main
from experiments.runs import Row, Store

MAIN = """
import argparse
import torch
from far_away.training import train

def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt", default="adamw", choices=["adamw"])
    parser.add_argument("--lr", type=float)
    parser.add_argument("--datasets_dir")
    parser.add_argument("--results_base_folder")
    return parser.parse_args(), parser

def main(args, parser):
    args.beta1, args.beta2, args.weight_decay = 0.9, 0.95, 0.1
    model = torch.nn.Sequential(torch.nn.Embedding(64, 80), torch.nn.LayerNorm(80), torch.nn.Linear(80, 64))
    param_name_mapping = dict(model.named_parameters())
    no_decay = [param_name_mapping["1.weight"], param_name_mapping["1.bias"]]
    decay = [p for p in model.parameters() if p.dim() == 2] + [param_name_mapping["2.bias"]]
    group_specs = [{"params": decay}, {"params": no_decay, "weight_decay": 0.0}]
    text = open(args.datasets_dir + "/shakespeare/raw.txt").read()
    if args.opt == "adamw":
        opt = torch.optim.AdamW(group_specs, lr=args.lr)
    train(model, opt, text)
"""
TRAINING = """
import torch

def eval(model, text):
    return len(text), model(torch.arange(4)).square().mean().item()

def train(model, opt, text):
    model(torch.arange(4)).square().mean().backward()
    opt.step()
    print("not shown", eval(model, text))
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder with what we need of their code."""
    (tmp_path / "src" / "far_away").mkdir(parents=True)
    (tmp_path / "src" / "main.py").write_text(MAIN)
    (tmp_path / "src" / "far_away" / "training.py").write_text(TRAINING)
    (tmp_path / "text.txt").write_text("To be")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("far_away")]:
        del sys.modules[name]


def test_our_entry_is_one_branch_of_theirs(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = source.load(theirs, {"baoc@auto": source.budgeted("auto")})
    outcomes = {opt: source.run(module, theirs / "text.txt", opt, ["--lr=0.001"]) for opt in ("adamw", "baoc@auto")}
    for outcome in outcomes.values():
        assert outcome.accuracy == len("To be") and outcome.loss > 0 and outcome.parameters == 2 * 64 * 80 + 2 * 80 + 64
    assert outcomes["baoc@auto"].state_bytes < outcomes["adamw"].state_bytes == pytest.approx(8 * 10464, rel=0.01)
    assert not capsys.readouterr().out


def test_docstring_examples() -> None:
    assert doctest.testmod(source).failed == doctest.testmod(running).failed == 0


def test_their_groups_keep_their_settings_and_get_names() -> None:
    model = nn.Sequential(nn.Embedding(64, 80), nn.LayerNorm(80))
    named = dict(model.named_parameters())
    groups = [{"params": [named["0.weight"]]}, {"params": [named["1.weight"], named["1.bias"]], "weight_decay": 0.0}]
    found = source.named_groups(groups, named)
    assert [[name for name, _ in group["params"]] for group in found] == [["0.weight"], ["1.weight", "1.bias"]]
    optimizer = baoc.BAOC(found, lr=1e-3, weight_decay=0.1, verbose=False)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-3, 1e-3], total_steps=4, cycle_momentum=False)
    assert optimizer.param_groups[0]["lr"] < 1e-3 and schedule is not None


def test_what_is_not_their_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").touch()
    given = ["--source", str(tmp_path), "--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "runs")]
    assert main(given) == 2 and "epfml/llm-optimizer-benchmark" in capsys.readouterr().err
    with pytest.raises(source.SourceError, match="once, and has it 0x"):
        source.patched("opt = None\n")
    assert main(["--tables-only", "--output", str(tmp_path / "none")]) == 2


def made_up(opt: str, seed: int, rung: int, loss: float) -> Row:
    run = running.Run(opt, seed, rung)
    row = {"key": run.key, "opt": opt, "seed": seed, "rung": rung, "lr": run.lr, "iterations": running.ITERATIONS}
    return {**row, "loss": loss, "accuracy": 0.5, "seconds": 40.0, "state_bytes": 800, "parameters": 100}


def test_best_learning_rates_are_inside_the_grid() -> None:
    results = running.Results(made_up("adamw", 0, rung, loss) for rung, loss in enumerate((3.0, 2.0, 1.0)))
    assert results.best_rung("adamw") == 2 and results.beyond("adamw") == [3]
    results = running.Results(made_up("adamw", 0, rung, loss) for rung, loss in enumerate((3.0, 1.0, 2.0)))
    assert results.best_rung("adamw") == 1 and results.beyond("adamw") == [] and results.best_rung("soap") is None


def test_arguments_are_theirs() -> None:
    arguments = running.Run("soap", seed=1, rung=1).arguments
    assert "--lr=0.003" in arguments and "--seed=1" in arguments and "--data_seed=1338" in arguments
    assert set(running.PROTOCOL) <= set(arguments) and "--beta2=0.999" in arguments


def test_the_page_says_what_loses_first(tmp_path: Path) -> None:
    rows = [made_up("adamw", 0, rung, loss) for rung, loss in enumerate((3.0, 2.0, 3.0))]
    rows += [made_up("baoc@auto", 0, rung, loss) for rung, loss in enumerate((3.0, 1.9, 3.0))]
    rows += [made_up("soap", 0, rung, loss) for rung, loss in ((1, 1.9), (2, 1.8), (3, 2.0))]
    rows += [made_up("baoc@0.05", 0, 1, 2.1)]
    with Store(tmp_path / "epfl").writing("epfl") as store:
        for row in rows:
            store.add(row)
    assert main(["--tables-only", "--output", str(tmp_path / "epfl")]) == 0
    lines = (tmp_path / "epfl.md").read_text().splitlines()
    lost = lines.index("## What loses")
    assert lines[lost + 2] == "- `baoc@0.05` is worse than AdamW at AdamW's learning rate: +5.00%."
    assert "- `soap` is better than `baoc@auto`, each at its best: +5.56%." in lines
    assert (
        "Not tuned yet, so left out of what is at its own best: `d-muon`, `adopt`, `baoc@0.25`, `baoc@0.05`." in lines
    )
    assert lost < lines.index("## At AdamW's best learning rate")
    assert "| **`baoc@auto`** | 0.003 | 8.00 | 1.9000 | 50.0 | -5.00 | 1 | 40 |" in lines
    assert page.text([]).startswith("# The EPFL benchmark")

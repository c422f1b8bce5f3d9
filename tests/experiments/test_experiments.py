"""The experiments: what there is, their variants, and the commands that run them."""

from __future__ import annotations

import doctest
import importlib
import json
import logging
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import baoc
import experiments.ablation
import experiments.finetune
import experiments.frontier
import experiments.runs
import experiments.zoo
from baoc.tools.cli import hide_known_messages
from experiments import methods, normalised, packages, workloads
from experiments.commands import main
from experiments.runs import (
    EXPERIMENTS,
    Request,
    RunError,
    RunOptions,
    Store,
    StoreError,
    tables,
    train_cell,
    variants,
)
from tests.experiments.tiny_workload import cell_for

pytestmark = pytest.mark.usefixtures("without_compiling")


def test_all_experiments_name_what_there_is() -> None:
    for one in EXPERIMENTS.values():
        assert {name for names in one.workloads.values() for name in names} <= set(workloads.names())
        assert all(methods.get(name).label for name in one.methods)
        for variant in (*one.variants, *one.more_variants):
            assert variants.method_of("baoc-paper@0.5", variant).label.endswith(variant)
        assert set(one.columns) <= set(tables.COLUMNS)


@pytest.mark.parametrize("variant", variants.VARIANTS)
def test_every_variant_trains(variant: str, tiny: str) -> None:
    row = train_cell(cell_for(tiny, "baoc-paper@0.8", variant), RunOptions())
    assert row["error"] is None and row["diverged_at"] is None
    assert row["label"] == f"BAOC (paper) 0.8, {variant}"


@pytest.mark.parametrize(("variant", "restarts"), [("online", True), ("online+inherit", False)])
def test_only_the_restarting_variant_forgets(variant: str, restarts: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 192)
    optimizer = variants.method_of("baoc-paper@0.8", variant).build(model, 1e-3, methods.Settings(steps=20, warmup=3))
    assert isinstance(optimizer, baoc.BAOC)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()

    def youngest() -> int:
        return min(int(value) for key, value in optimizer.state[model.bias].items() if "age" in key)

    train(7)  # plans after steps 3 and 7
    assert optimizer.plan.settings["warmup_steps"] == 7
    assert youngest() == 7  # the first plan inherits, and the second is the same
    before = optimizer.plan
    another = optimizer._run.settings.changed(memory=2.0)  # so that the next plan differs
    optimizer._run = optimizer._run.changed(settings=another)
    train(4)
    assert optimizer.plan.state_bytes > before.state_bytes
    assert youngest() == (0 if restarts else 11)


@pytest.mark.parametrize("name", ["muon", "baoc@0.5"])
def test_a_variant_that_a_method_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(RunError, match=f"'{name}' has no variant 'gamma=0.9'"):
        variants.method_of(name, "gamma=0.9")


def test_requests_are_checked_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no experiment 'fixed'\. There are exp1, exp2"):
        Request("fixed")
    with pytest.raises(RunError, match=r"no scale 'huge'\. There are small, paper"):
        Request("exp1", scale="huge")
    with pytest.raises(RunError, match=r"no variant 'gamma=7'\. It has s=1%, .*gamma=0\.9"):
        Request("diagnostics", variants=("gamma=7",))
    with pytest.raises(RunError, match="seeds is 0"):
        Request("exp2", seeds=0)
    with pytest.raises(RunError, match="only the paper's planner has variants"):
        Request("online", methods=("muon",), variants=("online",))
    with pytest.raises(StoreError, match="no finished runs"):
        experiments.runs.tables_of(Request("exp2", tmp_path / "nowhere"))


# ---- the command line ----


def refused(argv: list[str], capsys: pytest.CaptureFixture[str], *words: str) -> None:
    try:
        code = main(argv)
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert len(captured.err.splitlines()) == 1 and captured.err.startswith("python -m experiments")
    for word in words:
        assert word in captured.err


def test_the_commands_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    listed = capsys.readouterr().err.split()
    for name in ("paper", "states", "workloads", "train", "record", "statemem"):
        assert name in listed
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        assert f"python -m experiments {name}" in capsys.readouterr().out


def test_an_interrupt_says_how_to_go_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(request: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(experiments.runs, "tables_of", interrupted)
    assert main(["paper", "exp2", "--tables-only"]) == 130
    assert "The same command goes on from the last checkpoint." in capsys.readouterr().err


def test_the_module_runs_as_the_command_and_help_loads_no_other_library() -> None:
    code = (
        "import contextlib, runpy, sys\n"
        "sys.argv = ['', 'paper', '--help']\n"
        "with contextlib.suppress(SystemExit): runpy.run_module('experiments', run_name='__main__')\n"
        "sys.exit(not {'bitsandbytes', 'diffusers', 'matplotlib', 'torchao', 'transformers'}.isdisjoint(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0 and found.stderr == ""
    assert found.stdout.startswith("usage: python -m experiments paper")


def test_the_commands_refuse_in_one_line(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(["papr"], capsys, "paper")
    refused(["paper", "exp4"], capsys, "exp1")
    refused(["paper", "exp2", "--workload", "gpt-smal/embedded"], capsys, "gpt-small/embedded")
    refused(["paper", "exp2", "--workload", tiny, "--method", "moun"], capsys, "Did you mean muon?")
    refused(["paper", "exp2", "--workload", tiny, "--variant", "gamma=0.9"], capsys, "has no variant")
    refused(["paper", "exp2", "--workload", "nowhere.py"], capsys, "nowhere.py")
    refused(["paper", "exp2", "--seeds", "0"], capsys, "at least 1")
    refused(["paper", "exp2", "--length", "7", "--workload", tiny], capsys, "at least 8")
    refused(["paper", "exp2", "--tables-only"], capsys, "no finished runs", "results/paper-small/exp2")
    refused(["workloads", "gpt-small"], capsys, "gpt-small")
    refused(["statemem", "--jsn"], capsys, "--jsn")
    refused(["train"], capsys, "NAME")
    refused(["train", "gpt-smal/embedded"], capsys, "gpt-small/embedded")
    refused(["train", tiny, "--lr", "0"], capsys, "above 0")
    refused(["train", tiny, "--device", "abacus"], capsys, "not a device")


def test_a_command_runs_an_experiment(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["paper", "online", "--workload", tiny, "--no-tuning", "--seeds", "1", "--output", str(tmp_path / "o")]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert "| BAOC (paper) 0.5, online+inherit |" in captured.out
    assert f"saved {tmp_path / 'o' / 'online' / 'table.md'}" in captured.out
    assert "variants: run 2 of 2, about 0 s left" in captured.err
    assert main([*argv, "--tables-only"]) == 0


def test_one_configuration_for_all_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    few = ["--steps", "2", "--seeds", "1", "--eval-batches", "1", "--length", "8", "--no-tuning"]
    spelling, output = "spectral else colnorm else adamw-32", tmp_path / "states"
    argv = ["states", "--workload", "gpt-small/embedded", "--method", spelling, *few, "--output", str(output)]
    assert main(argv) == 0
    assert f"\n| `{spelling}` | colnorm | 0.06 |" in capsys.readouterr().out


def test_the_constants_of_normalised_mechanisms(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    few = ["--steps", "2", "--seeds", "1", "--eval-batches", "1", "--fine-tuning", "0", "--length", "8"]
    argv = ["--workload", "gpt-small/embedded", *few, "--output", str(tmp_path / "constants")]
    normalised.main(argv)
    keys = [row["key"] for row in Store(tmp_path / "constants").rows]
    assert len(keys) == len({*keys}) == 1 + len(normalised.LENGTHS) + len(normalised.TRAINED)
    text = (tmp_path / "constants.md").read_text()
    assert all(f"\n| {name} |" in text for name in ("AdamW32", "0.4", "You Jiacheng x5", "Muon x3"))
    assert "| gpt-small/embedded | 1.00 |" in text  # AdamW's first update is a sign


def test_the_commands_that_only_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workloads"]) == 0
    assert "gpt-small/embedded" in capsys.readouterr().out
    assert main(["workloads", "--json"]) == 0
    assert {entry["name"] for entry in json.loads(capsys.readouterr().out)} == set(workloads.names())
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    assert main(["statemem"]) == 0
    assert "AdamW16" in capsys.readouterr().out


def test_only_known_complaints_of_other_packages_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    hide_known_messages()
    for message in ("Failed to load _C.so", "this model is not quantized"):
        logging.getLogger("torchao").warning(message)
    logging.getLogger("mine").warning("Failed to load my.so")
    assert caplog.messages == ["this model is not quantized", "Failed to load my.so"]


def test_docstring_examples() -> None:
    assert doctest.testmod(packages).failed == doctest.testmod(normalised).failed == 0
    for package in (
        experiments.runs,
        experiments.ablation,
        experiments.finetune,
        experiments.frontier,
        experiments.zoo,
    ):
        for found in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{found.name}")
            assert doctest.testmod(module).failed == 0


def test_statistics_are_recorded_and_planned_from(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.stats"
    assert main(["record", tiny, "--steps", "3", "--memory", "0.8", "--bf16-weights", "--output", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.err.count(", loss ") == 3 and f"saved {path}" in captured.out
    statistics = baoc.GradientStatistics.load(path)
    assert statistics.steps == 3
    plan = baoc.make_plan(statistics, 0.6, planner=baoc.PaperPlanner())
    assert plan.settings["warmup_steps"] == 3 and plan.state_bytes <= 0.6 * plan.reference_bytes


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (["--steps", "0"], "at least 1"),
        (["--memory", "0.0001"], "no plan fits"),
        (["--output", "nowhere/x.stats"], "no folder"),
        (["--batch-size", "0"], "at least 1"),
    ],
)
def test_a_recording_that_cannot_be_made_is_refused(
    changed: list[str], words: str, tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(["record", tiny, "--steps", "3", "--output", str(tmp_path / "x.stats"), *changed], capsys, words)

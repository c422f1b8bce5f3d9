"""The experiments: runs that are kept, go on and are never repeated, and what is made of them."""

from __future__ import annotations

import csv
import doctest
import importlib
import io
import json
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import experiments.runs
from baoc.cli import checkout, experiment, main
from baoc.plan import memory_budget
from experiments import methods, workloads
from experiments.runs import (
    EXPERIMENTS,
    Cell,
    Request,
    Row,
    RunError,
    RunOptions,
    Store,
    StoreError,
    report,
    run,
    runner,
    tables,
    train_cell,
    variants,
)
from experiments.runs.progress import Board
from experiments.runs.series import Series
from experiments.runs.summary import summarise
from experiments.runs.training import Progress, workload_of

WORKLOAD = """
import torch
from torch import nn
from experiments.workloads import LOSS, Workload

class Tiny(Workload):
    name, description, metric = "tiny", "an MLP", LOSS
    steps, batch_size, lr = 30, 8, 3e-3
    bad_step, bad_loss, seen, final = None, None, 0, None

    def build(self, *, seed, device="cpu", pretrained=None):
        torch.manual_seed(seed)
        layers = nn.Linear(64, 192), nn.ReLU(), nn.Dropout(0.1), nn.Linear(192, 64)
        return nn.Sequential(*layers).to(device)

    def train_batches(self, *, seed, start=0):
        while True:
            generator = torch.Generator().manual_seed(1000 * seed + start)
            yield {"x": torch.randn(self.batch_size, 64, generator=generator)}
            start += 1

    def loss(self, model, batch):
        loss = (model(batch["x"]) - batch["x"].roll(1, dims=-1)).square().mean()
        if model.training:
            Tiny.seen += 1
            if Tiny.seen == Tiny.bad_step:
                if Tiny.bad_loss is None:
                    raise RuntimeError("killed")
                return Tiny.bad_loss * loss
        return loss

    @torch.no_grad()
    def evaluate(self, model, split, max_batches=None):
        Tiny.final = {name: value.clone() for name, value in model.state_dict().items()}
        batch = next(self.train_batches(seed=77 + (split == "test")))
        try:
            return {"loss": self.loss(model.eval(), batch).item()}
        finally:
            model.train()
"""
STEPS = 30


@pytest.fixture(autouse=True, scope="module")
def _without_compiling() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A person's own workload."""
    path = tmp_path / "tiny.py"
    path.write_text(WORKLOAD)
    return str(path)


def class_of(workload: str) -> Any:
    return type(workload_of(workload, workloads.Options()))


def request_for(tiny: str, tmp_path: Path, **changes: Any) -> Request:
    asked = {"workloads": (tiny,), "methods": ("adamw32", "baoc@0.5"), "seeds": 1, "tuning": False}
    return Request("fixed-budget", output=tmp_path / "out", **{**asked, **changes})


def cell_for(tiny: str, method: str, variant: str = "") -> Cell:
    return Cell(tiny, method, seed=0, lr_factor=1.0, steps=STEPS, variant=variant)


def rows_in(request: Request) -> list[Row]:
    return Store(request.folder).rows


# ---- one run after another ----


def test_rows_are_complete(tiny: str, tmp_path: Path) -> None:
    request = request_for(tiny, tmp_path)
    files = run(request, io.StringIO())
    assert {file.name for file in files} >= {"table.md", "table.csv"}
    first, second = rows_in(request)
    assert (first["method"], second["method"]) == ("adamw32", "baoc@0.5")
    assert first.keys() == second.keys()
    for row in (first, second):
        scores = ("train_loss", "train_metric", "validation_loss", "validation_metric", "test_loss", "test_metric")
        assert all(0 < row[name] < 5 for name in scores)
        assert row["seconds"] > row["step_seconds"] > 0
        assert row["error"] is row["diverged_at"] is None
        assert row["peak_bytes"] is None or row["peak_bytes"] > 1e6
        assert (row["steps"], row["lr"], row["phase"]) == (STEPS, 3e-3, "final")
    weights, biases = 2 * 64 * 192, 64 + 192
    assert first["state_bytes"] == first["largest_state_bytes"] == 8 * (weights + biases) + 4 * 4  # and 4 steps
    assert first["reference_bytes"] == 4 * weights + 8 * biases
    assert first["plan"] is None
    assert second["largest_state_bytes"] <= memory_budget(0.5, second["reference_bytes"])
    assert sum(second["plan"]["shares"].values()) == pytest.approx(1.0)
    assert set(second["plan"]["blocks"].values()) == set(second["plan"]["shares"])
    assert not list((request.folder / "running").glob("*"))


def test_what_is_finished_is_not_trained_again(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_for(tiny, tmp_path, methods=("adamw32",))
    run(request, io.StringIO())
    before = rows_in(request)
    trained: list[str] = []
    monkeypatch.setattr(runner, "train_cell", lambda cell, *rest: trained.append(cell.key))
    run(request, io.StringIO())
    assert rows_in(request) == before and trained == []
    with pytest.raises(TypeError):  # our stand-in gives no row
        run(request_for(tiny, tmp_path, methods=("adamw32",), seeds=2), io.StringIO())
    assert len(trained) == 1 and "seed=1" in trained[0]


def test_runs_of_another_experiment_are_copied_where_they_are_the_same(tiny: str, tmp_path: Path) -> None:
    request = request_for(tiny, tmp_path, methods=("adamw32",))
    run(request, io.StringIO())
    (trained,) = rows_in(request)
    kind = class_of(tiny)
    kind.seen = 0
    sweep = replace(request, experiment="sweep", output=tmp_path / "sweep", reuse=(request.folder,))
    run(sweep, io.StringIO())
    assert kind.seen == 0 and rows_in(sweep) == [trained]
    other = replace(sweep, output=tmp_path / "other", options=RunOptions(eval_batches=1))
    run(other, io.StringIO())
    assert kind.seen == STEPS
    with pytest.raises(StoreError, match=r"there is no runs\.jsonl in .*nowhere"):
        run(replace(sweep, reuse=(tmp_path / "nowhere",)), io.StringIO())


RESUMED = [name for name in EXPERIMENTS["fixed-budget"].methods if not methods.get(name).missing]


@pytest.mark.parametrize("method", RESUMED)
def test_a_killed_run_goes_on_and_ends_where_it_would_have(method: str, tiny: str, tmp_path: Path) -> None:
    options, cell, folder = RunOptions(checkpoint_every=4), cell_for(tiny, method), tmp_path / "running"
    undisturbed = train_cell(cell, options)
    kind = class_of(tiny)
    final = kind.final
    for steps in (7, 19):  # of which the last 3 are lost; BAOC plans after 3
        kind.seen, kind.bad_step = 0, steps
        with pytest.raises(RuntimeError, match="killed"):
            train_cell(cell, options, folder=folder)
    kind.bad_step = None
    row = train_cell(cell, options, folder=folder)
    assert row["resumed"] == 2
    timed = {"seconds", "step_seconds", "peak_bytes", "resumed"}
    assert {name: row[name] for name in row.keys() - timed} == {
        name: undisturbed[name] for name in undisturbed.keys() - timed
    }
    assert all(torch.equal(kind.final[name], final[name]) for name in final)


def test_baoc_goes_on_in_its_warm_up(tiny: str, tmp_path: Path) -> None:
    options, cell, folder = RunOptions(checkpoint_every=2), cell_for(tiny, "baoc@0.5"), tmp_path / "running"
    undisturbed = train_cell(cell, options)
    kind = class_of(tiny)
    kind.seen, kind.bad_step = 0, 3
    with pytest.raises(RuntimeError, match="killed"):
        train_cell(cell, options, folder=folder)
    row = train_cell(cell, options, folder=folder)
    assert row["resumed"] == 1
    assert (row["plan"], row["test_loss"]) == (undisturbed["plan"], undisturbed["test_loss"])


def test_a_checkpoint_that_cannot_be_used_is_left_behind(tiny: str, tmp_path: Path) -> None:
    cell, folder, notes = cell_for(tiny, "adamw32"), tmp_path / "running", []
    folder.mkdir()
    (folder / "checkpoint.pt").write_bytes(b"not a checkpoint")
    row = train_cell(cell, RunOptions(), Progress(note=notes.append), folder)
    assert row["resumed"] == 0 and row["test_loss"] == train_cell(cell, RunOptions())["test_loss"]
    assert "starting over" in notes[0]


def test_a_run_that_diverges_ends_and_is_a_row(tiny: str, tmp_path: Path) -> None:
    kind = class_of(tiny)
    kind.seen, kind.bad_step, kind.bad_loss = 0, 5, float("nan")
    request = request_for(tiny, tmp_path, methods=("adamw32",))
    run(request, io.StringIO())
    (row,) = rows_in(request)
    assert row["diverged_at"] == kind.seen == 5
    assert row["train_loss"] is row["test_metric"] is None
    assert "0 of 1" in (request.folder / "table.md").read_text()


def test_a_budget_that_nothing_fits_is_a_row(tiny: str, tmp_path: Path) -> None:
    request = request_for(tiny, tmp_path, methods=("baoc@0.0001",), tuning=True, seeds=3)
    run(request, io.StringIO())
    (row,) = rows_in(request)  # other learning rates and seeds would not fit either
    assert "no plan fits" in row["error"]
    assert "does not fit" in (request.folder / "table.md").read_text()


# ---- the store ----


def test_a_torn_line_is_dropped(tmp_path: Path) -> None:
    with Store(tmp_path).writing("sweep") as store:
        store.add({"key": "a"})
    with open(store.path, "ab") as file:
        file.write(b'{"key": "b", "te')
    assert [row["key"] for row in Store(tmp_path).rows] == ["a"]
    with Store(tmp_path).writing("sweep") as store:
        store.add({"key": "c"})
    assert [row["key"] for row in Store(tmp_path).rows] == ["a", "c"]
    assert all(json.loads(line) for line in store.path.read_text().splitlines())


def test_other_settings_are_refused(tiny: str, tmp_path: Path) -> None:
    run(request_for(tiny, tmp_path, methods=("adamw32",)), io.StringIO())
    with pytest.raises(StoreError, match=r"steps 7 \(was 30\).*another --output"):
        run(request_for(tiny, tmp_path, methods=("adamw32",), steps=7), io.StringIO())


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with Store(tmp_path).writing("sweep"), pytest.raises(StoreError, match="another process"):  # noqa: SIM117
        with Store(tmp_path).writing("sweep"):
            pass


def test_a_folder_is_of_one_experiment(tmp_path: Path) -> None:
    with Store(tmp_path).writing("sweep"):
        pass
    with pytest.raises(StoreError, match=r"the experiment 'sweep'\. Give another"), Store(tmp_path).writing("online"):
        pass


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text("{}\nnonsense\n")
    with pytest.raises(StoreError, match=r"line 2 of .*runs\.jsonl"):
        Store(tmp_path)
    (tmp_path / "runs.jsonl").write_text("{}\n")
    with pytest.raises(StoreError, match="does not begin"):
        Store(tmp_path)


# ---- tuning ----


def test_validation_chooses_the_learning_rate_and_its_run_is_used_again(tiny: str, tmp_path: Path) -> None:
    request = request_for(tiny, tmp_path, methods=("adamw32",), tuning=True, seeds=2)
    run(request, io.StringIO())
    rows = rows_in(request)
    assert [(row["seed"], row["phase"]) for row in rows] == [(0, "tune"), (0, "tune"), (0, "tune"), (1, "final")]
    assert [row["lr_factor"] for row in rows[:3]] == list(methods.get("adamw32").lr_factors)
    best = min(rows[:3], key=lambda row: row["validation_metric"])
    assert rows[3]["lr_factor"] == best["lr_factor"]
    ((line,),) = summarise(rows).values()
    assert line.rows == (best, rows[3])
    assert line.at_edge == (best["lr_factor"] in (0.5, 2.0))


def test_variants_keep_the_learning_rate_of_the_default() -> None:
    series = Series("w", "baoc@0.5", 10, (0.5, 1.0, 2.0), (0, 1), ("online, restarting",))
    finals = [cell for cells in series.finals(2.0) for cell in cells]
    assert {cell.lr_factor for cell in finals} == {2.0}
    assert len(finals) == 4 and series.size == 3 + 3


# ---- experiments ----


def test_all_experiments_name_what_there_is() -> None:
    assert list(EXPERIMENTS) == list(experiment.NAMES)
    for one in EXPERIMENTS.values():
        assert set(one.workloads) <= set(workloads.names())
        assert all(name.endswith(("/embedded", "/digits")) for name in one.workloads)  # no download
        for method in one.methods:
            assert [variants.method_of(method, variant) for variant in ("", *one.variants)]
        assert set(one.columns) <= set(tables.COLUMNS)


@pytest.mark.parametrize("variant", variants.VARIANTS)
def test_every_variant_trains(variant: str, tiny: str) -> None:
    row = train_cell(cell_for(tiny, "baoc@0.8", variant), RunOptions())
    assert row["error"] is None and row["diverged_at"] is None
    assert row["label"] == f"BAOC 0.8, {variant}"


@pytest.mark.parametrize(("variant", "restarts"), [("online, restarting", True), ("online, inheriting", False)])
def test_only_the_restarting_variant_forgets(variant: str, restarts: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 192)
    optimizer = variants.method_of("baoc@0.8", variant).build(model, 1e-3, methods.Settings(steps=20, warmup=3))
    youngest = []
    for _ in range(8):  # plans after steps 3 and 7
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        held = optimizer.state.get(model.bias, {})
        youngest.append(min((int(value) for key, value in held.items() if "age" in key), default=None))
    assert optimizer.plan.settings["warmup_steps"] == 7
    assert youngest[2] == 3  # the first plan inherits
    assert (youngest[6] is None and youngest[7] == 1) if restarts else youngest[7] == 8


def test_requests_are_checked_before_anything_is_trained(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no experiment 'fixed'\. There are fixed-budget, sweep"):
        Request("fixed")
    with pytest.raises(RunError, match="seeds is 0"):
        Request("sweep", seeds=0)
    with pytest.raises(RunError, match="has no variant"):
        run(Request("online", tmp_path / "out", (tiny,), ("muon",)), io.StringIO())
    with pytest.raises(StoreError, match="no finished runs"):
        experiments.runs.tables_of(Request("sweep", tmp_path / "nowhere"))


# ---- tables and figures ----


def made_up(method: str, seed: int, test: float | None, **changes: Any) -> Row:
    return {
        "workload": "w",
        "method": method,
        "variant": "",
        "label": method,
        "seed": seed,
        "steps": 10,
        "lr": 1e-3,
        "lr_factor": 1.0,
        "lr_grid": [0.5, 1.0, 2.0],
        "phase": "final",
        "error": None,
        "metric": "perplexity",
        "higher_is_better": False,
        "diverged_at": None if test else 4,
        "plan": None,
        "state_bytes": 3 * 2**20,
        "reference_bytes": 6 * 2**20,
        "largest_state_bytes": 2**22,
        "peak_bytes": 2**24,
        "peak_kind": "VmHWM of the process",
        "seconds": 10.0 + seed,
        "step_seconds": 0.01,
        "train_loss": 2.0,
        "train_metric": 7.0,
        "validation_metric": test,
        "test_metric": test,
        **changes,
    }


def made_up_runs() -> list[Row]:
    tuned = [
        made_up("adamw16", 0, score, lr_factor=factor, lr=1e-3 * factor, phase="tune")
        for factor, score in ((0.5, 9.0), (1.0, 8.0), (2.0, 7.0))
    ]
    shares = {0.25: 9.0, 0.5: 7.5, 1.0: 6.0}
    swept = [made_up(f"{name}@{at}", 0, score) for name in ("baoc", "by-size") for at, score in shares.items()]
    return [
        *tuned,
        made_up("adamw16", 1, 9.0, lr_factor=2.0, lr=2e-3),
        *swept,
        made_up("muon", 0, 50.0),
        made_up("muon", 1, None),
        {**made_up("by-type@0.1", 0, None, phase="tune", diverged_at=None), "error": "no plan fits"},
    ]


def written(tmp_path: Path, name: str, rows: list[Row]) -> list[Path]:
    with Store(tmp_path).writing(name) as store:
        for row in rows:
            store.add({"key": "", **row})
    return report.write(Store(tmp_path), EXPERIMENTS[name])


def test_tables_have_means_and_spreads(tmp_path: Path) -> None:
    markdown, table, *_ = written(tmp_path, "sweep", made_up_runs())
    lines = {line.split("|")[1].strip(): line for line in markdown.read_text().splitlines() if line.startswith("|")}
    assert "8.0000 ± 1.4142" in lines["adamw16"]  # of 7 and 9: at the chosen learning rate, both seeds
    assert "10.500 ± 0.707" in lines["adamw16"] and "3.0000 ± 0.0000" in lines["adamw16"]
    assert "| 0.002† | 2 |" in lines["adamw16"]
    assert "**6.0000**" in lines["baoc@1.0"] and "**" not in lines["adamw16"]
    assert "| 1 of 2‡ |" in lines["muon"]
    assert "by-type@0.1 (does not fit)" in lines
    assert "Test perplexity" in lines["Method"]
    rows = {row["method"]: row for row in csv.DictReader(table.open())}
    assert float(rows["adamw16"]["test_mean"]) == 8.0 and rows["adamw16"]["lr_at_edge"] == "True"
    assert float(rows["adamw16"]["test_std"]) == pytest.approx(2**0.5)
    assert rows["muon"]["diverged"] == "1" and rows["by-type@0.1"]["error"] == "no plan fits"


def test_accuracy_is_in_percent_and_the_highest_is_best(tmp_path: Path) -> None:
    scores = {"a": 0.5, "b": 0.6}
    rows = [made_up(name, 0, at, metric="accuracy", higher_is_better=True) for name, at in scores.items()]
    text = written(tmp_path, "fixed-budget", rows)[0].read_text()
    assert "Test accuracy (%)" in text and "**60.000**" in text and "50.000" in text


def test_variants_are_compared_with_the_default(tmp_path: Path) -> None:
    rows = [
        made_up("baoc@0.5", 0, 7.0, plan={"blocks": {"all": "adamw-8"}, "shares": {"adamw-8": 1.0}}),
        made_up("baoc@0.5", 0, 7.5, variant="no SGD", label="no SGD", plan={"blocks": {}, "shares": {"adamw-16": 1.0}}),
    ]
    text = written(tmp_path, "diagnostics", rows)[0].read_text()
    assert "| 100.00 |" in text and "Peak is VmHWM of the process." in text


@pytest.mark.parametrize("name", ["fixed-budget", "sweep"])
def test_figures_are_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    *_, figure = written(tmp_path, name, made_up_runs())
    assert figure.name == f"{EXPERIMENTS[name].figure}.png"
    assert figure.read_bytes().startswith(b"\x89PNG") and figure.stat().st_size > 10_000


# ---- what a person sees ----


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_says_what_is_left() -> None:
    series = Series("w", "muon", 100, (1.0,), (0, 1, 2))
    stream, now = Terminal(), [0.0]
    board = Board([series], stream, clock=lambda: now[0])
    cell, other, _ = series.finals(1.0)[0]
    board.begin(cell, "Muon")
    board.step(50, 100, 2.5)
    now[0] = 60.0
    board.end(cell)
    board.begin(other, "Muon")
    first, bar, last, _ = stream.getvalue().split("\n")
    assert first == "cell 1 of 3: w, Muon, seed 0, lr x1"
    assert "[###############...............] 50/100, loss 2.5" in bar
    assert last == "cell 2 of 3, about 2 min left: w, Muon, seed 1, lr x1"


def test_progress_is_plain_lines_elsewhere() -> None:
    stream = io.StringIO()
    board = Board([], stream)
    for step in range(1, 101):
        board.step(step, 100, float("nan") if step == 100 else 1.0)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4 and lines[-1] == "  step 100/100, loss not finite"


def refused(argv: list[str], capsys: pytest.CaptureFixture[str], *words: str) -> None:
    try:
        code = main(argv)
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert len(captured.err.splitlines()) == 1 and captured.err.startswith("baoc")
    for word in words:
        assert word in captured.err


def test_the_command_refuses_in_one_line(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(["experiment", "fixd"], capsys, "fixed-budget")
    refused(["experiment", "sweep", "--workload", "gpt-smal/embedded"], capsys, "gpt-small/embedded")
    refused(["experiment", "sweep", "--workload", tiny, "--method", "moun"], capsys, "Did you mean muon?")
    refused(["experiment", "sweep", "--workload", "nowhere.py"], capsys, "nowhere.py")
    refused(["experiment", "sweep", "--seeds", "0"], capsys, "at least 1")
    refused(["experiment", "sweep", "--tables-only"], capsys, "no finished runs", "results/sweep")
    monkeypatch.setattr(checkout, "REPOSITORY", tmp_path)
    refused(["experiment", "sweep"], capsys, "needs a clone")
    refused(["statemem"], capsys, "needs a clone")


def test_the_command_runs_an_experiment(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["experiment", "online", "--workload", tiny, "--no-tuning", "--seeds", "1", "--output", str(tmp_path / "o")]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert "| BAOC 0.5, online, restarting |" in captured.out and f"saved {tmp_path / 'o' / 'table.md'}" in captured.out
    assert "cell 3 of 3, about" in captured.err
    assert main([*argv, "--tables-only"]) == 0


def test_the_commands_that_only_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["workloads"]) == 0
    assert "gpt-small/embedded" in capsys.readouterr().out
    assert main(["workloads", "--json"]) == 0
    assert {entry["name"] for entry in json.loads(capsys.readouterr().out)} == set(workloads.names())
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    assert main(["statemem"]) == 0
    assert "AdamW16" in capsys.readouterr().out


def test_docstring_examples() -> None:
    for found in pkgutil.iter_modules(experiments.runs.__path__):
        module = importlib.import_module(f"experiments.runs.{found.name}")
        assert doctest.testmod(module).failed == 0

"""Runs that are kept, go on where they were killed and are never repeated."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baoc.core.budget import memory_budget
from experiments import methods
from experiments.runs import EXPERIMENTS, RunOptions, Store, StoreError, batch, run, train_cell
from experiments.runs.series import Series
from experiments.runs.summary import summarise
from experiments.runs.training import Progress
from tests.experiments.tiny_workload import STEPS, cell_for, class_of, request_for, rows_in

pytestmark = pytest.mark.usefixtures("without_compiling")


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
    monkeypatch.setattr(batch, "train_cell", lambda cell, *rest: trained.append(cell.key))
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
    sweep = replace(request, experiment="exp2", output=tmp_path / "sweep", reuse=(request.folder,))
    run(sweep, io.StringIO())
    assert kind.seen == 0 and rows_in(sweep) == [trained]
    other = replace(sweep, output=tmp_path / "other", options=RunOptions(eval_batches=1))
    run(other, io.StringIO())
    assert kind.seen == STEPS
    with pytest.raises(StoreError, match=r"there is no runs\.jsonl in .*nowhere"):
        run(replace(sweep, reuse=(tmp_path / "nowhere",)), io.StringIO())


RESUMED = [name for name in EXPERIMENTS["exp1"].methods if not methods.get(name).missing]


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
    with Store(tmp_path).writing("exp2") as store:
        store.add({"key": "a"})
    with open(store.path, "ab") as file:
        file.write(b'{"key": "b", "te')
    assert [row["key"] for row in Store(tmp_path).rows] == ["a"]
    with Store(tmp_path).writing("exp2") as store:
        store.add({"key": "c"})
    assert [row["key"] for row in Store(tmp_path).rows] == ["a", "c"]
    assert all(json.loads(line) for line in store.path.read_text().splitlines())


def test_other_settings_are_refused(tiny: str, tmp_path: Path) -> None:
    run(request_for(tiny, tmp_path, methods=("adamw32",)), io.StringIO())
    with pytest.raises(StoreError, match=r"steps 7 \(was 30\).*another --output"):
        run(request_for(tiny, tmp_path, methods=("adamw32",), steps=7), io.StringIO())


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with Store(tmp_path).writing("exp2"), pytest.raises(StoreError, match="another process"):  # noqa: SIM117
        with Store(tmp_path).writing("exp2"):
            pass


def test_a_folder_is_of_one_experiment(tmp_path: Path) -> None:
    with Store(tmp_path).writing("exp2"):
        pass
    with pytest.raises(StoreError, match=r"the experiment 'exp2'\. Give another"), Store(tmp_path).writing("online"):
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


def test_all_are_trained_at_adamw32s_learning_rate_before_their_own_is_sought(tiny: str, tmp_path: Path) -> None:
    stream = io.StringIO()
    request = replace(request_for(tiny, tmp_path, methods=("lion-8",), tuning=True, seeds=2), experiment="states")
    run(request, stream)
    rows = rows_in(request)
    assert [row["method"] for row in rows[:8]] == ["adamw32"] * 6 + ["lion-8"] * 2
    means = {
        factor: sum(row["validation_metric"] for row in rows[:6] if row["lr_factor"] == factor)
        for factor in methods.get("adamw32").lr_factors
    }
    assert {row["lr_factor"] for row in rows[6:8]} == {min(means, key=means.__getitem__)}
    adamw32, lion = summarise(rows)[tiny]
    assert len(adamw32.rows) == len(lion.rows) == 2 and adamw32.is_tuned and lion.is_tuned
    seen = stream.getvalue()
    run(request, stream)
    assert stream.getvalue() == seen and rows_in(request) == rows


def test_variants_keep_the_learning_rate_of_the_default() -> None:
    series = Series("w", "baoc-paper@0.5", 10, (0.5, 1.0, 2.0), (0, 1), ("online",))
    finals = [cell for cells in series.finals(2.0) for cell in cells]
    assert {cell.lr_factor for cell in finals} == {2.0}
    assert len(finals) == 4

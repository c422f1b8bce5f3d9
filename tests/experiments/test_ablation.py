"""The ablation and the frontier: which runs they have, and what is made of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import ablation, frontier, methods, momentum, workloads
from experiments.ablation import catalog as swaps
from experiments.ablation.effects import Effects
from experiments.commands import main
from experiments.frontier import catalog, page
from experiments.frontier.lines import best_factor, budgeted, lines_of
from experiments.frontier.running import MOST_BEYOND, is_clear
from experiments.runs import Cell, Row, RunOptions, Store, StoreError
from experiments.runs.batch import Job, run_all

pytestmark = pytest.mark.usefixtures("without_compiling")


def of_tiny(tiny: str) -> ablation.Setting:
    return ablation.Setting(tiny, 6, roles=("hidden", "head"), blocks=("0.weight",))


# -- lists of runs


@pytest.mark.parametrize("workers", [1, 2])
def test_a_list_of_runs_is_trained_once(workers: int, tiny: str, tmp_path: Path) -> None:
    jobs = [Job(Cell(tiny, method, 0, 1.0, 2)) for method in ("adamw32", "hidden=spectral", "adamw32")]
    with Store(tmp_path / "out").writing("some") as store:
        run_all(jobs, store, workers)
        assert {row["method"] for row in store.rows} == {"adamw32", "hidden=spectral"}
        run_all(jobs, store, workers)
    assert len(Store(tmp_path / "out").rows) == 2
    assert all(row["phase"] == "final" and row["lr_grid"] == [1.0] for row in store.rows)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux who is alive")
def test_no_process_outlives_the_one_that_was_asked(tiny: str, tmp_path: Path) -> None:
    code = f"""
from experiments.runs import Cell, Store
from experiments.runs.batch import Job, run_all
if __name__ == "__main__":
    with Store({str(tmp_path / "out")!r}).writing("some") as store:
        run_all([Job(Cell({tiny!r}, "adamw32", seed, 1.0, 10**6)) for seed in range(2)], store, 2)
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, str(script)], env=environment) as parent:
        workers = _wait_for(lambda: found if len(found := _children(parent.pid)) >= 2 else [])
        parent.kill()
    assert workers and _wait_for(lambda: not [pid for pid in workers if _is_alive(pid)])


def _children(pid: int) -> list[int]:
    """Those that train: another, which only cleans up, ends by itself."""
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def _is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def _wait_for(found: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < end:
        time.sleep(0.2)
    return value


def test_runs_with_other_settings_are_refused(tiny: str, tmp_path: Path) -> None:
    cell = Cell(tiny, "adamw32", 0, 1.0, 2)
    with Store(tmp_path / "out").writing("some") as store:
        run_all([Job(cell)], store)
        with pytest.raises(StoreError, match="other settings"):
            run_all([Job(cell, RunOptions(eval_batches=3))], store)


# -- the ablation


def test_what_the_ablation_swaps_is_there() -> None:
    assert {setting.workload for setting in ablation.SETTINGS} <= {*workloads.names()}
    for job in swaps.jobs(ablation.SETTINGS, 1, RunOptions()):
        methods.get(job.cell.method)


@pytest.mark.parametrize("setting", [one for one in ablation.SETTINGS if one.blocks], ids=lambda one: one.workload)
def test_blocks_of_the_ablation_are_parameters(setting: ablation.Setting) -> None:
    pytest.importorskip("transformers")
    params = dict(workloads.get(setting.workload).build(seed=0, device="meta").named_parameters())
    assert len({*setting.blocks}) == len(setting.blocks) and {*setting.blocks} <= {*params}


def test_all_workloads_get_a_seed_before_any_gets_the_next() -> None:
    jobs = list(swaps.jobs(ablation.SETTINGS, 2, RunOptions()))
    for method in ("hidden=muon-8", "hidden=colnorm"):
        seeds = [cell.seed for cell in dict.fromkeys(job.cell for job in jobs) if cell.method == method]
        assert seeds == sorted(seeds)
    assert {job.options.workload.batch_size for job in jobs if job.cell.workload.startswith("unet")} == {4}


def test_the_ablation_makes_its_page(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"hidden": ("spectral", "adamw-8"), "head": ("colnorm",)}
    monkeypatch.setattr("experiments.ablation.catalog.CONFIGURATIONS", few)
    monkeypatch.setattr("experiments.ablation.effects.CONFIGURATIONS", few)
    monkeypatch.setattr("experiments.ablation.page.CONFIGURATIONS", few)
    setting, folder = of_tiny(tiny), tmp_path / "ablation"
    ablation.train([setting], folder, 2, RunOptions())
    rows = Store(folder).rows
    assert len(rows) == 2 * (1 + 3 + 2)
    path = ablation.write([setting], folder, RunOptions(), ["some", "command"])
    text = path.read_text(encoding="utf-8")
    effects = Effects(rows)
    swapped = effects.of(setting, "hidden", "spectral")
    assert swapped is not None and set(swapped.differences) == {0, 1} and swapped.bytes_per_parameter < 0.01
    assert f"| `spectral` | 0.00 | {swapped.text} |" in text
    eight = effects.of(setting, "hidden", "adamw-8")
    assert eight is not None and 2 < eight.bytes_per_parameter < 2.1
    assert "| gradient norm |" in text and "*ceiling*" in text and "`some command`" in text
    kept = (folder / "metrics.json").read_text()
    monkeypatch.setattr("experiments.ablation.metrics.of_blocks", None)
    assert ablation.write([setting], folder, RunOptions(), ["some", "command"]).read_text(encoding="utf-8") == text
    assert (folder / "metrics.json").read_text() == kept


def test_a_page_of_nothing_is_an_error(tmp_path: Path) -> None:
    for write in (lambda: ablation.write([], tmp_path, RunOptions()), lambda: frontier.write([], tmp_path)):
        with pytest.raises(StoreError, match="no finished runs"):
            write()


# -- the frontier

SETTING = frontier.Setting("gpt-small/embedded", 10, targets={0.25: -1.0, 1.0: -5.0})


def made_up(method: str, seed: int, test: float, held: int = 100, factor: float = 1.0, **changes: Any) -> Row:
    row: Row = {
        **SETTING.cell(method, seed, factor).fields,
        "lr": 1e-3 * factor,
        "lr_grid": [factor],
        "error": None,
        "diverged_at": None,
        "settings": RunOptions().settings,
        "validation_loss": test,
        "test_loss": test,
        "state_bytes": held,
        "largest_state_bytes": held,
        "reference_bytes": 400,
        "parameters": 100,
        "plan": None,
    }
    return {**row, **changes}


def made_up_runs() -> list[Row]:
    rows = [
        made_up("adamw32", 0, loss, 800, factor, lr_grid=[0.5, 1.0, 2.0]) for factor, loss in ((0.5, 5.0), (2.0, 4.5))
    ]
    rows += [made_up("adamw32", seed, 4.0 + seed, 800, lr_grid=[0.5, 1.0, 2.0]) for seed in range(3)]
    for seed, noise in enumerate((0.0, 0.01, -0.01)):
        best = 4.0 + seed + noise
        rows.append(made_up("baoc@0.25", seed, 0.95 * best, 90, plan={"expected_loss": -7.5}))
        rows.append(made_up("baoc@1", seed, 0.97 * best, 390))
        rows.append(made_up("lion-8", seed, 0.9 * best, 95))
        rows.append(made_up("adamw-8", seed, 0.8 * best, 200))
    rows.append(made_up("by-type@0.25", 0, 1.0, error="no plan fits"))
    return rows


def test_the_frontiers_checks() -> None:
    text = page.text([SETTING], made_up_runs(), ["some", "command"])
    assert re.search(r"\| gpt-small/embedded \| 0\.25 \| -1\.0 \| -[45]\.\d\d ± 0\.\d\d \| met \|", text)
    assert re.search(r"\| gpt-small/embedded \| 1 \| -5\.0 \| -[23]\.\d\d ± 0\.\d\d \| missed by [12]\.\d\d \|", text)
    assert "- gpt-small/embedded at 0.25: `lion-8` by " in text  # it fits, and `adamw-8` does not
    assert "at 0.25: `adamw-8`" not in text and "at 1: `adamw-8` by " in text
    assert "- gpt-small/embedded: 1 is worse than 0.25 by " in text
    assert "- Heu-1 (by type) 0.25: no plan fits" in text
    assert re.search(r"\| baoc default 0\.25 \| -7\.50 \| -[45]\.\d\d ± 0\.\d\d \| \+2\.\d\d \|", text)


def test_a_method_is_judged_at_its_own_learning_rate_or_at_adamw32s() -> None:
    rows = made_up_runs()
    assert best_factor(rows, SETTING, "adamw32") == 1.0
    rows += [made_up("muon", 0, loss, factor=factor, lr_grid=[1.0, 2.0]) for factor, loss in ((1.0, 3.9), (2.0, 3.5))]
    lines = {line.method: line for line in lines_of(SETTING, rows)}
    assert lines["muon"].mean == pytest.approx(-12.5) and lines["muon"].factor == "x2†"
    assert lines["baoc@1"].factor == "x1" and len(lines["baoc@1"].rows) == 3
    assert list(budgeted([*lines.values()])) == [0.25, 1.0]


def test_two_seeds_are_enough_where_the_difference_is_clear() -> None:
    rows = [row for row in made_up_runs() if row["seed"] < 2]
    assert is_clear(rows, SETTING, "adamw-8") and not is_clear(rows, SETTING, "adamw32")
    assert not is_clear(rows[:2], SETTING, "adamw-8")


def test_what_the_frontier_compares_is_there() -> None:
    chosen = frontier.Chosen()
    for name in (*chosen.at_one_lr, *chosen.peers):
        methods.get(name)
    assert {*catalog.UNIFORM} <= {*chosen.at_one_lr} and {*catalog.OURS} <= {*chosen.ours}
    for setting in frontier.SETTINGS:
        assert setting.workload in workloads.names() and {*setting.targets} <= {*frontier.BUDGETS}


def test_the_frontier_trains_and_draws(tiny: str, tmp_path: Path) -> None:
    setting = replace(SETTING, workload=tiny, steps=3)
    chosen = frontier.Chosen(("baoc@0.25", "colnorm"), ("adamw8",), ())
    frontier.train([setting], chosen, tmp_path / "frontier", 2, RunOptions())
    rows = Store(tmp_path / "frontier").rows
    count = {name: sum(row["method"] == name for row in rows) for name in ("baoc@0.25", "colnorm", "adamw8")}
    assert count == {"baoc@0.25": 2, "colnorm": 2, "adamw8": 4}
    factor = best_factor(rows, setting, "adamw32")
    tried = [row["lr_factor"] for row in rows if row["method"] == "adamw32"]
    assert min(tried) < factor < max(tried) or len({*tried}) == 3 + MOST_BEYOND, "its best is at an edge"
    assert {row["lr_factor"] for row in rows if row["method"] in ("baoc@0.25", "colnorm")} == {factor}
    files = frontier.write([setting], tmp_path / "frontier", ["some", "command"])
    assert "| baoc default 0.25 |" in files[0].read_text(encoding="utf-8")
    assert [path.name for path in files[1:]] in ([], ["frontier.png"])


@pytest.mark.parametrize("command", ["ablation", "frontier"])
def test_a_workload_that_an_experiment_does_not_have(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--workload", "gpt2/alpaca"])
    assert "gpt-small/alpaca-gsm8k" in capsys.readouterr().err


# -- how fast momentum rises


def test_rises_are_compared_with_none_seed_by_seed(tiny: str, tmp_path: Path) -> None:
    settings = [momentum.Setting(tiny, 2)]
    with Store(tmp_path / "momentum").writing("momentum") as store:
        run_all(momentum.jobs(settings, 2, RunOptions()), store)
        assert len(store.rows) == 2 * len(momentum.RISES)
        told = momentum.page(settings, store, 3, "some command").splitlines()
    losses = {(row["method"], row["seed"]): row["test_loss"] for row in store.rows}
    without, rising = (
        [losses[settings[0].cell(rise, seed).method, seed] for seed in range(2)] for rise in momentum.RISES[:2]
    )
    mean = sum(100 * (ours / other - 1) for ours, other in zip(rising, without)) / 2
    assert f"| {mean:+.2f}" in told[-1], "two of three seeds are there"

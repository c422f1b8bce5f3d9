"""What is made of finished runs: tables, figures and pages."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from baoc.planners.effect_table import EffectTable
from experiments.ablation.table import table
from experiments.runs import EXPERIMENTS, Row, Store, paper_page, report

RESULTS = Path(__file__).parents[2] / "docs" / "results"


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
    markdown, table, *_ = written(tmp_path, "exp2", made_up_runs())
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
    text = written(tmp_path, "exp1", rows)[0].read_text()
    assert "Test accuracy (%)" in text and "**60.000**" in text and "50.000" in text


def test_methods_are_compared_with_the_reference_seed_by_seed(tmp_path: Path) -> None:
    scores = {("adamw16", 0): 10.0, ("adamw16", 1): 20.0, ("muon", 0): 9.0, ("muon", 1): 19.0, ("muon", 2): 1.0}
    rows = [made_up(name, seed, score) for (name, seed), score in scores.items()]
    text = written(tmp_path, "exp1", rows)[0].read_text()
    assert "against adamw16 (%)" in text
    assert "| -7.50 ± 3.54 |" in text  # of -10% and -5%; seed 2 has no partner


def test_accuracies_are_compared_in_points(tmp_path: Path) -> None:
    scores = {"adamw16": 0.5, "muon": 0.6}
    rows = [made_up(name, 0, at, metric="accuracy", higher_is_better=True) for name, at in scores.items()]
    text = written(tmp_path, "exp1", rows)[0].read_text()
    assert "against adamw16 (points)" in text and "| +10.00 |" in text


def test_the_page_compares_at_one_learning_rate_and_at_each_ones_own(tmp_path: Path) -> None:
    about = {"workload": "gpt-small/embedded", "parameters": 2**20, "settings": {"batch_size": 4, "eval_batches": None}}
    losses = {  # by method, lr factor and seed; AdamW32's best lr is that of the mean, not of seed 0
        "adamw32": {0.5: (8.0, 8.0), 1.0: (4.0, 5.0), 2.0: (3.0, 9.0)},
        "muon-8 else adamw-8": {0.5: (3.0,), 1.0: (4.4, 4.5), 2.0: (2.0, 2.0)},
        "sinkhorn": {1.0: (6.0,)},
    }
    rows = [
        made_up(name, seed, loss, **about, lr_factor=factor, phase="final" if seed and name != "adamw32" else "tune")
        | {"test_loss": loss}
        for name, grid in losses.items()
        for factor, scores in grid.items()
        for seed, loss in enumerate(scores)
    ]
    folder = tmp_path / "states"
    page = written(folder, "states", rows)[0]
    assert page == tmp_path / "states.md"
    text = page.read_text()
    assert "python -m experiments states --workload gpt-small/embedded --steps 10 --batch-size 4 --output" in text
    assert "1.0M parameters, 10 steps of 4 examples; AdamW32's lr is 0.001 (1 times the workload's)." in text
    assert "| adamw32 | adamw-32 | 3.00 | 1000, 10.0 | 4.500 ± 0.500 | - | 2 | x1 | 4.500 ± 0.500 | - | 2 |" in text
    muon = "| 4.450 ± 0.050 | +0.0 ± 10.0 | 2 | x2† | 2.000 ± 0.000 | -55.0 ± 5.0 | 2 |"
    assert f"| `muon-8 else adamw-8` | adamw-8 | 3.00 | 1000, 10.0 {muon}" in text
    assert "| `sinkhorn` | sinkhorn | 3.00 | 1000, 10.0 | 6.000 | +50.0 | 1 | - | - | - | - |" in text
    page.write_text(text + "\n## Reading\n\nMuon wins.\n")
    report.write(Store(folder), EXPERIMENTS["states"])
    assert page.read_text() == text + "\n## Reading\n\nMuon wins.\n"


def test_the_overview_has_workloads_side_by_side(tmp_path: Path) -> None:
    rows = [
        *(made_up("adamw16", seed, 8.0) for seed in (0, 1)),
        *(made_up("muon", seed, 4.0 + 2 * seed) for seed in (0, 1)),
        made_up("adamw16", 0, 5.0, workload="other"),
        made_up("spam", 0, None, workload="other"),
    ]
    (overview,) = [file for file in written(tmp_path, "exp1", rows) if file.name == "overview.md"]
    lines = overview.read_text().splitlines()
    assert "| Method | w | other |" in lines and "| adamw16 | 8, 50% | 5, 50% |" in lines
    assert "| muon | 5 (-37.5 ± 17.7), 50% |  |" in lines and "| spam |  | diverged |" in lines


def test_choices_are_written_down(tmp_path: Path) -> None:
    def planned(seed: int, last: str, share: float) -> Row:
        blocks = {"h.0": "adamw[m=int8,v=int8]", "head": last}
        shares = {"adamw[m=int8,v=int8]": 1 - share, last: share}
        return made_up("baoc@0.5", seed, 7.0, plan={"blocks": blocks, "shares": shares})

    files = written(tmp_path, "exp1", [made_up("adamw32", 0, 7.0), planned(0, "sgd", 0.5), planned(1, "sgdw", 0.1)])
    (choices,) = [file.read_text() for file in files if file.name == "choices.md"]
    assert "| Method | adamw-8 | sgd | sgdw |" in choices and "| baoc@0.5 | 70.0 | 25.0 | 5.0 |" in choices
    assert "| 0, 1 | `h.0` | adamw-8 |" in choices and "| 0, 1 | `head` | sgd or sgdw |" in choices
    assert not any("choices" in file.name for file in written(tmp_path / "b", "exp1", [made_up("muon", 0, 7.0)]))


def test_variants_are_compared_with_the_default(tmp_path: Path) -> None:
    def varied(seed: int, test: float, variant: str, configuration: str, **changes: Any) -> Row:
        plan = {"blocks": {"all": configuration}, "shares": {configuration: 1.0}}
        label = f"BAOC{variant and f', {variant}'}"
        return made_up("baoc-paper@0.5", seed, test, variant=variant, label=label, plan=plan, **changes)

    rows = [
        *(varied(seed, 7.0, "", "adamw-8") for seed in (0, 1)),
        *(varied(seed, 7.5, "no-SGD", "adamw-16") for seed in (0, 1)),
        *(varied(seed, 7.0, "gamma=0.2", "adamw-8", same_plan=True) for seed in (0, 1)),
        varied(0, 7.0, "gamma=0.9", "adamw-8", same_plan=True),
        varied(1, 8.0, "gamma=0.9", "adamw-16"),
    ]
    text = written(tmp_path, "diagnostics", rows)[0].read_text()
    assert "| 100.00 ± 0.00 |" in text and "Peak is VmHWM of the process." in text
    assert "| BAOC, gamma=0.2 (same plan) |" in text
    assert "| BAOC, gamma=0.9 (same plan, 1 of 2 seeds) |" in text
    assert "| BAOC, no-SGD |" in text


def test_the_page_has_what_the_paper_says_and_what_is_seen(tmp_path: Path) -> None:
    half = 45 * 2**20

    def seeds(method: str, scores: tuple[float, ...], **changes: Any) -> list[Row]:
        about = {"reference_bytes": 2 * half, "state_bytes": half, "settings": SETTINGS}
        return [made_up(method, seed, score, **{**about, **changes}) for seed, score in enumerate(scores)]

    rows = [
        *seeds("adamw16", (10.0, 11.0, 12.0), state_bytes=2 * half),
        *seeds("adamw8", (10.0, 11.0, 12.0)),
        *seeds("by-type@0.5", (9.0, 9.9, 10.8)),
        *seeds("baoc-paper@0.5", (10.0, 11.0, 12.01), seconds=30.0),
    ]
    written(tmp_path / "paper" / "exp1", "exp1", rows)
    page = paper_page.write(tmp_path / "paper")
    text = page.read_text()
    assert page == tmp_path / "paper.md"
    said = [line.split(" | ") for line in text.splitlines() if line.endswith((" | no |", " | yes |"))]
    assert [verdict.rstrip(" |") for *_, verdict in said] == ["no", "no", "yes", "yes", "yes"]  # negatives first
    by_claim = {claim.strip("| "): seen for claim, seen, _ in said}
    assert by_claim["its test score is better than Heu-1's"].startswith("w 11.1 ± 0.0% worse")
    assert "% longer" in by_claim["less state does not cost wall-clock time (against AdamW16)"]
    assert by_claim["BAOC holds at most half of AdamW16's state"] == "w 50.0% of AdamW16's state"
    assert "python -m experiments paper exp1 --workload w --steps 10 --seeds 3 --batch-size 4 --method adamw16" in text
    page.write_text(text + "\n## Reading\n\nIt is slower.\n")
    assert paper_page.write(tmp_path / "paper").read_text() == text + "\n## Reading\n\nIt is slower.\n"


def test_runs_above_their_budget_are_marked_and_prove_nothing(tmp_path: Path) -> None:
    """After the warm-up no plan may fit. Training goes on with AdamW16, whose score is not the paper's method's."""
    about = {"reference_bytes": 2**20, "settings": SETTINGS}
    rows = [
        made_up("baoc-paper@0.5", 0, 10.0, state_bytes=2**19, **about),
        made_up("baoc-paper@0.5", 0, 9.0, state_bytes=2**20, variant="no-SGD", label="no-SGD", **about),
    ]
    table = written(tmp_path / "paper" / "diagnostics", "diagnostics", rows)[0].read_text()
    assert "| no-SGD§ |" in table and "§ no plan fits the budget after the warm-up" in table
    text = paper_page.write(tmp_path / "paper").read_text()
    assert "| without SGD it is better (UNet) | w no plan fits the budget | no |" in text


def test_one_seed_has_no_spread(tmp_path: Path) -> None:
    rows = [made_up("adamw16", 0, 10.0), made_up("adamw8", 0, 9.0)]
    written(tmp_path, "exp1", rows)
    assert "9 (-10.0), 50%" in (tmp_path / "overview.md").read_text()


SETTINGS = {"batch_size": 4, "length": None, "pretrained": None, "eval_batches": None}


@pytest.mark.parametrize("name", ["exp1", "exp2"])
def test_figures_are_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    *_, figure = written(tmp_path, name, made_up_runs())
    assert figure.name == f"{EXPERIMENTS[name].figure}.png"
    assert figure.read_bytes().startswith(b"\x89PNG") and figure.stat().st_size > 10_000


def test_the_effect_table_that_ships_is_made_of_stored_runs() -> None:
    rows, zoo = (Store(RESULTS / name, must_exist=True).rows for name in ("ablation", "zoo"))
    made = EffectTable.from_json(table(rows, zoo).to_json())  # numbers in a file are rounded
    assert made.effects == EffectTable.load().effects

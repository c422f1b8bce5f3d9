"""The arithmetic of the benchmarks, and that the page can be made from numbers. Nothing here is timed."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys

import numpy as np
import pytest
import torch

from baoc import BlockOptimizer
from baoc.planners.paper.coordinates import sample_counts
from baoc.solve import Problem
from benchmarks import figure, planning, report, solve, statistics, step, targets
from benchmarks.rows import BALANCED, CONFIGURATIONS, FUSED, Row, planned, rows, uniform
from benchmarks.timing import interleaved, paired_ratio
from benchmarks.traffic import bytes_moved
from benchmarks.workloads import GPT2, SMALL, WORKLOADS, matrices, parameters

ROWS, COLUMNS = 512, 1024
GROUPS = COLUMNS // 256


def stepped(build) -> torch.optim.Optimizer:
    optimizer = build(parameters({"weight": (ROWS, COLUMNS)}))
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "configuration, expected",  # bytes per parameter: the parameter twice, gradients, state twice
    [
        ("sgd", 8 + 4),
        ("adamw-32", 8 + 4 + 2 * 8),
        ("adamw-16", 8 + 4 + 2 * 4),
        ("adamw-8", 8 + 4 + 2 * (2 + 2 * GROUPS / COLUMNS)),
        ("sgdm-8", 8 + 4 + 2 * (1 + GROUPS / COLUMNS)),
        ("adamw[m=bf16,v=factored]", 8 + 2 * 4 + 2 * (2 + 4 / ROWS + 4 / COLUMNS)),
        ("adafactor", 12 + 3 * 4 + 3 * (4 / ROWS + 4 / COLUMNS)),
        ("adafactor[v=bf16]", 12 + 2 * 4 + 3 * 2),
        ("lion-4", 8 + 4 + 2 * (0.5 + 4 / 64)),
        ("colnorm", 8 + 2 * 4),
        ("sinkhorn", 8 + 6 * 4),
    ],
)
def test_bytes_moved_by_ours(configuration, expected):
    moved = bytes_moved(stepped(uniform(configuration).build))
    ages = 3 * 4  # a counter of four bytes, where age is state
    assert moved == pytest.approx(expected * ROWS * COLUMNS, abs=ages)


def test_a_peer_moves_what_our_configuration_of_the_same_kind_moves():
    adafactor = next(row for row in rows(GPT2) if row.name == "torch Adafactor")
    for peer, ours in ((FUSED, "adamw-32"), (adafactor, "adafactor")):
        assert bytes_moved(stepped(peer.build)) == pytest.approx(bytes_moved(stepped(uniform(ours).build)), abs=100)


def test_a_planned_row_is_within_its_budget():
    optimizer = planned(0.5).build(parameters({"a.weight": (128, 128), "b.weight": (256, 64)}))
    assert isinstance(optimizer, BlockOptimizer)
    assert optimizer.plan.state_bytes <= 0.5 * optimizer.plan.reference_bytes


def test_workloads_have_the_sizes_they_are_named_for():
    _, gpt2 = WORKLOADS[GPT2]
    shapes = gpt2()
    assert len(shapes) == 148
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 124_439_808
    for size in step.SWEEP_SIZES:
        made = sum(torch.Size(shape).numel() for shape in matrices(int(size)).values())
        assert made == pytest.approx(size, rel=0.01)


def test_rounds_pair_up_when_a_slow_action_sits_out():
    samples = interleaved({"a": lambda: None, "b": lambda: None}, repeats=5, seconds_each=0.0)
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3}
    assert paired_ratio([4.0, 9.0, 2.0], [2.0, 3.0])["median"] == 2.5


def test_bad_input_is_an_error_that_helps():
    with pytest.raises(ValueError, match="matches no row"):
        step.run(only="no such row", workloads=[SMALL])
    with pytest.raises(ValueError, match="at least 1"):
        step.run(repeats=0)


def test_a_peer_that_is_missing_is_a_row_that_says_so():
    _, record = step._start(Row("nosuchpackage AdamW", lambda params: pytest.fail("was built")), {})
    assert record["status"] == step.NOT_INSTALLED
    assert step.NOT_INSTALLED in step.workload_table({"rows": [record]})


# ---- targets and the page ----


def measured(name: str, seconds: float) -> dict:
    times = {"median": seconds, "low": seconds, "high": seconds}
    return {
        "name": name,
        "status": step.MEASURED,
        "first_seconds": 0.25,
        "seconds": [seconds] * 3,
        "step": times,
        "ratio": times,
        "plan": {"adamw-8": 0.75, "sgd": 0.25} if "plan" in name else {},
        "bytes_per_parameter": 16.0,
        "bandwidth_share": 0.5,
        "extra_peak_bytes": 1 << 20,
    }


@pytest.fixture
def results() -> dict:
    ours = [*map(uniform, (*CONFIGURATIONS, *BALANCED)), planned(0.5), planned(0.25)]
    times = {row.name: 0.06 for row in ours} | {FUSED.name: 0.1, "torchao AdamW8bit": 3.0}
    missing = {"name": "bitsandbytes AdamW8bit", "status": step.NOT_INSTALLED, "seconds": []}
    sweep_times = {row.name: {"median": 0.01, "low": 0.01, "high": 0.02} for row in step.SWEEP_ROWS}
    case = {
        "blocks": 12,
        "configurations": 21,
        "time": "slack",
        "seconds": 0.001,
        "seconds_range": [0.001, 0.002],
        "relative_gap": 0.0,
        "passes": 9,
        "core_blocks": 2,
        "states": 5,
        "highs_seconds": 0.02,
        "highs_relative_gap": 0.0,
        "highs_finished": True,
        "objective_less_highs": 0.0,
        "agree": True,
    }
    of_classes = {
        "classes": 4,
        "tensors": 100,
        "configurations": 11,
        "time": "slack",
        "seconds": 0.001,
        "gap": 0.0,
        "frontier_points": 40,
        "frontier_seconds": 0.01,
        "highs_seconds": 0.02,
        "agree": True,
    }
    return {
        "command": "python -m benchmarks.report --output performance.md",
        "quick": False,
        "machine": {
            "processor": "An Example",
            "cores": 2,
            "threads": 2,
            "python": "3.11",
            "torch": "2.13.0",
            "packages": {"torchao": "0.18.0", "bitsandbytes": None},
        },
        "step": {
            "bandwidth": 5e10,
            "repeats": 3,
            "workloads": {
                GPT2: {
                    "title": "GPT2-small",
                    "tensors": 148,
                    "parameters": 124_439_808,
                    "other_load": 0.01,
                    "rows": [*(measured(name, seconds) for name, seconds in times.items()), missing],
                }
            },
            "sweep": [
                {"parameters": 10**5, "seconds": sweep_times},
                {"parameters": 10**6, "seconds": sweep_times},
            ],
        },
        "solve": {
            "solve": [case, case | {"blocks": 100, "highs_finished": False, "agree": None}],
            "classes": [of_classes],
            "frontier": [],
        },
        "planning": {
            "rows": [{"what": "a plan", "first": 0.2, "median": 0.1, "low": 0.1, "high": 0.3}],
            "targets": [{"what": "a plan", "measured": 0.1, "limit": 1.0, "unit": "s", "outcome": targets.PASS}],
        },
        "statistics": {
            "model": "gpt2-small",
            "tokens": [1, 128],
            "rounds": 3,
            "other_load": 0.0,
            "pass_seconds": {"median": 1.0, "low": 1.0, "high": 1.0},
            "sampling": [
                {
                    "ratio": ratio,
                    "coordinates": 1_000,
                    "seconds": {"median": ratio, "low": ratio, "high": ratio},
                    "share_of_pass": {"median": ratio, "low": ratio, "high": ratio},
                    "bytes": 4_000,
                    "share_of_parameters": ratio,
                }
                for ratio in (0.001, 0.01)
            ],
            "end_of_warmup": [],
            "targets": [
                {"what": "sampling is cheap", "measured": 0.1, "limit": 1.0, "unit": "%", "outcome": targets.PASS}
            ],
        },
    }


def outcomes(results: dict) -> dict[str, str]:
    return {verdict.what: verdict.outcome for verdict in targets.judge(results["step"])}


def test_targets_are_judged_by_the_worst_row(results):
    found = outcomes(results)
    momentum = "momentum SGD with int8 state against torch's fused AdamW"
    assert found[momentum] == targets.PASS
    assert found["AdamW with int8 state: faster than torchao's"] == targets.PASS
    assert found["AdamW with int8 state: faster than bitsandbytes'"] == targets.UNKNOWN
    assert found["extra peak memory in a step, largest of ours"] == targets.PASS

    slower = copy.deepcopy(results)
    row = next(row for row in slower["step"]["workloads"][GPT2]["rows"] if row["name"] == "baoc sgdwm-8")
    row["seconds"] = [0.081] * 3
    assert outcomes(slower)[momentum] == targets.MISS


def test_a_target_is_not_met_by_rows_that_were_left_out(results):
    workload = results["step"]["workloads"][GPT2]
    workload["rows"] = [row for row in workload["rows"] if row["name"] != "baoc sgdm-8"]
    assert outcomes(results)["momentum SGD with int8 state against torch's fused AdamW"] != targets.PASS


def test_the_page_is_made_from_numbers(results, tmp_path, monkeypatch):
    numbers, output = tmp_path / "performance.json", tmp_path / "performance.md"
    numbers.write_text(json.dumps(results))
    monkeypatch.setattr(sys, "argv", ["report", "--output", str(output), "--from", str(numbers)])
    report.main()
    text = output.read_text()
    for expected in (
        results["command"],
        "An Example, 2 cores",
        "Not installed: bitsandbytes",
        step.table(results["step"]),
        solve.table(results["solve"]),
        planning.table(results["planning"]),
        statistics.table(results["statistics"]),
        "| a plan | <= 1 s | 0.1 s | pass |",
        "| sampling is cheap | <= 1 % | 0.1 % | pass |",
        "(performance.png)",
        "(performance.json)",
    ):
        assert expected in text
    assert "measure again" not in text
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_highs_agrees_on_classes_and_on_their_tensors():
    """The class problem is the paper's problem with equal blocks: both give the same optimum."""
    pytest.importorskip("highspy")
    problem = solve.class_instance(3, 11, solve.BINDING)
    counts = np.asarray(problem.counts) % 4 + 1
    budget = int(counts @ problem.memory[:, 1]) // 2
    problem = dataclasses.replace(problem, counts=counts, memory_budget=budget, time_budget=0.9 * float(counts.sum()))
    single = Problem(
        *(np.repeat(each, counts, axis=0) for each in (problem.cost, problem.memory, problem.time)),
        problem.memory_budget,
        problem.time_budget / counts.sum(),
    )
    assert solve.highs(problem).objective == pytest.approx(solve.highs(single).objective)
    assert solve.solve_classes(problem).objective == pytest.approx(solve.highs(problem).objective)


def test_planning_is_measured(monkeypatch):
    monkeypatch.setattr(planning, "TENSORS", 40)
    monkeypatch.setattr(planning, "LLAMA", "gpt2-small")
    monkeypatch.setattr(planning, "POINTS", 3)
    pytest.importorskip("transformers")
    result = planning.run(quick=True)
    assert [row["key"] for row in result["rows"]] == list(planning.MOST_SECONDS)
    assert all(0 < row["low"] <= row["median"] <= row["high"] for row in result["rows"])
    assert len(list(planning.many_tensors(40).parameters())) == 40


def test_a_run_saves_what_it_has_after_each_part(tmp_path, monkeypatch):
    class Benchmark:
        def __init__(self, part: str) -> None:
            self.part = part

        def run(self, quick: bool) -> dict:
            if self.part == "planning":
                raise KeyboardInterrupt
            return {"quick": quick}

    monkeypatch.setattr(report, "_benchmark", Benchmark)
    numbers = tmp_path / "performance.json"
    with pytest.raises(KeyboardInterrupt):
        report.measure(True, "a command", numbers)
    saved = report.load(numbers)
    assert saved["step"] == saved["solve"] == {"quick": True}
    assert saved["command"] == "a command"


def test_the_command_names_no_folder_of_this_machine(tmp_path):
    assert report._command(tmp_path / "page.md", True) == "python -m benchmarks.report --output page.md --quick"
    inside = report._command(report.Path("docs/results/performance.md"), False)
    assert inside == "python -m benchmarks.report --output docs/results/performance.md"


def test_the_page_warns_of_a_busy_machine(results):
    results["step"]["workloads"][GPT2]["other_load"] = 0.5
    assert "measure again" in report.page(results, None, "numbers.json")


def test_the_figure_has_a_panel_for_each_part(results):
    assert [panel.y_label for panel in figure.panels(results)] == ["step time (ms)", "solve time (s)", "time (ms)"]
    assert figure.panels({"step": {"sweep": []}}) == []


def test_the_figure_marks_what_was_not_finished(results):
    panel = next(panel for panel in figure.panels(results) if panel.x_label == "blocks")
    assert {series.label: series.open_at for series in panel.series} == {
        "baoc, time slack": (),
        "HiGHS, time slack": (1,),
    }


def test_numbers_of_something_else_are_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("[1]")
    with pytest.raises(report.ReportError, match="does not hold"):
        report.load(path)


def test_the_end_of_the_warmup_is_split_into_its_stages():
    shapes = {"embed.weight": (600, 64), "fc.weight": (128, 64), "fc.bias": (128,), "head.weight": (600, 64)}
    made = statistics.synthetic_statistics(shapes)
    assert {name: len(record.second) for name, record in made.records.items()} == sample_counts(shapes)
    first, cached = statistics._time_ends("small", made, 1, synthetic=True)
    for row in (first, cached):
        assert all(row[stage] > 0 for stage in statistics.STAGES), "a stage that nothing is counted for"
        assert sum(row[stage] for stage in statistics.STAGES) == pytest.approx(row["total"])

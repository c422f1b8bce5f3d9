"""``baoc plan``, ``explain``, ``frontier``, ``diff``, ``calibrate`` and ``measure`` as a person uses them."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baoc import GradientStatistics, ModelFacts, PaperPlanner, Plan, make_plan, parse
from baoc.planners.paper.problem import PAPER
from baoc.planners.paper.risk import RISKS
from baoc.planners.paper.times import UpdateTimes, signature
from baoc.planners.paper.units import structural_units
from baoc.tools.cli import main
from baoc.tools.report import explorer

WORKLOAD = """
import torch
from torch import nn

def make():
    print("building")
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 96), nn.ReLU(), nn.LayerNorm(96), nn.Linear(96, 50))
    batches = [torch.randint(0, 50, (16,)) for _ in range(4)]
    return model, batches, lambda model, batch: nn.functional.cross_entropy(model(batch), (batch + 1) % 50)

class Workload:
    def __init__(self):
        self.model, self.batches, self.loss = make()

def make_one_shot():
    model, batches, loss = make()
    return model, iter(batches), loss

def make_empty():
    model, _, loss = make()
    return model, [], loss

def make_broken():
    model, batches, _ = make()
    def loss(model, batch):
        return model(batch.float())
    return model, batches, loss

def make_model():
    return make()[0]

def make_two():
    return make()[:2]

def make_registered():
    from baoc import register_risk
    @register_risk("mine-of-the-test")
    def mine(metrics, configuration, settings):
        return {"precision": 32 / configuration.switches.bits if configuration.switches.bits else 99.0}
    return make()
"""


PAPERS = ("--planner", "paper", "--time", "50")
"""Plans with a block for every part of the small workload, whose risks gradients decide."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a workload, its gradient statistics, and two plans of it."""
    folder = tmp_path_factory.mktemp("plans")
    (folder / "w.py").write_text(WORKLOAD)
    torch.set_num_threads(1)
    source, files = (
        f"{folder / 'w.py'}:make",
        ("-o", f"{folder / 'a.json'}", "--statistics-out", f"{folder / 'w.stats'}"),
    )
    assert main(["plan", source, "--memory", "40%", "--steps", "12", *PAPERS, *files]) == 0
    assert main(["plan", f"{folder / 'w.stats'}", "--memory", "1.2", *PAPERS, "-o", f"{folder / 'b.json'}"]) == 0
    return folder


@pytest.fixture
def run(saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Run a command in that folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(saved)
    capsys.readouterr()

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(list(argv))
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def refused(result: tuple[int, str, str], *words: str) -> None:
    code, out, err = result
    assert code == 2 and out == ""
    last = err.splitlines()[-1]
    assert last.startswith("baoc") and "Traceback" not in err
    for word in words:
        assert word in last, last


# ---- baoc plan ----


def test_plan_of_a_workload_trains_nothing(saved: Path, run: Any):
    code, out, err = run("plan", "w.py:make", "--memory", "40%", "-o", "c.json")
    assert code == 0
    assert "building" in err and "building" not in out and "warm-up" not in err
    plan = Plan.load(saved / "c.json")
    assert str(plan) in out and "saved the plan to c.json" in out
    assert plan.state_bytes <= 0.4 * plan.reference_bytes
    assert plan.settings["planner"] == "effects" and plan.settings["tokens"] == 16, "counted in one batch"
    plan.check(GradientStatistics.load(saved / "w.stats").shapes)


def test_the_papers_planner_warms_up(saved: Path, run: Any):
    code, out, err = run("plan", "w.py:make", "--memory", "40%", *PAPERS, "--steps", "12", "--json")
    assert code == 0 and "warm-up: step 10/12, loss" in err and "warm-up: step 12/12" in err
    plan = Plan.from_json(out)
    assert plan == Plan.load(saved / "a.json"), "same source and options, same plan"
    assert (plan.settings["planner"], plan.settings["warmup_steps"]) == ("paper", 12)


def test_no_budget_is_auto_and_a_budget_is_a_ceiling(run: Any):
    auto = Plan.from_json(run("plan", "vit", "--json")[1])
    assert auto.settings["memory_budget"] is None
    assert Plan.from_json(run("plan", "vit", "--memory", "auto", "--json")[1]) == auto
    assert Plan.from_json(run("plan", "vit", "--memory", "200%", "--json")[1]).state_bytes <= auto.state_bytes
    smallest = Plan.from_json(run("plan", "vit", "--memory", "0", "--json")[1])
    assert smallest.state_bytes < 0.05 * smallest.reference_bytes


@pytest.mark.parametrize("function", ["Workload", "make_one_shot", "make_empty", "make_model"])
def test_what_a_function_may_return(function: str, run: Any):
    code, out, _ = run("plan", f"w.py:{function}")
    assert code == 0 and "not saved: add -o" in out


def test_a_one_shot_iterator_is_used_up(run: Any):
    code, _, err = run("plan", "w.py:make_one_shot", *PAPERS, "--steps", "6")
    assert code == 0 and "the statistics cover 4 steps instead of 6" in err


def test_a_risk_that_the_file_registers(run: Any):
    code, _, _ = run("plan", "w.py:make_registered", *PAPERS, "--steps", "2", "--risk", "mine-of-the-test")
    assert code == 0
    del RISKS["mine-of-the-test"]


@pytest.mark.parametrize("options", [(), PAPERS], ids=["effects", "paper"])
def test_plan_from_statistics_as_json_is_a_plan(options: tuple[str, ...], run: Any):
    code, out, err = run("plan", "w.stats", "--memory", "60%", *options, "--forbid", "sgd*", "--json")
    assert code == 0 and "not saved" in err
    plan = Plan.from_json(out)
    assert plan.state_bytes <= 0.6 * plan.reference_bytes
    assert not any(str(block.configuration).startswith("sgd") for block in plan.blocks)


def test_forbid_by_pattern(run: Any):
    options = (*PAPERS, "--memory", "2.0", "--granularity", "tensor", "--json")
    plan = Plan.from_json(run("plan", "w.stats", *options, "--forbid", "0.*=adamw[m=fp32,v=fp32]")[1])
    free = Plan.from_json(run("plan", "w.stats", *options)[1])
    spelled = {name: str(p.block_of("0.weight").configuration) for name, p in (("free", free), ("forbidden", plan))}
    assert spelled["free"] == "adamw[m=fp32,v=fp32]" != spelled["forbidden"]
    assert str(plan.block_of("4.weight").configuration) == "adamw[m=fp32,v=fp32]"


@pytest.mark.parametrize("source", ["w.py:make", "w.stats", "vit"])
def test_dry_run_plans_from_shapes_alone(source: str, run: Any):
    code, out, err = run("plan", source, "--memory", "0.5", *PAPERS, "--dry-run", "--wide")
    assert code == 0 and "no gradients seen yet" in out and "warm-up" not in err
    assert run("plan", "w.py:make_broken", "--dry-run")[0] == 0, "its loss is never called"


def test_a_plan_of_measured_effects_says_what_it_predicts(run: Any):
    code, out, _ = run("plan", "vit", "--tolerance", "1")
    assert code == 0 and "against AdamW32, from scratch" in out and "parameters and" in out
    longer = run("plan", "vit", "--tolerance", "1", "--planned-steps", "1000000", "--json")[1]
    assert json.loads(longer)["settings"]["planned_tokens"] == 1_000_000 * json.loads(longer)["settings"]["tokens"]
    assert max(map(len, out.splitlines())) <= 80
    tuned = run("plan", "vit", "--memory", "10%", "--regime", "finetune", "--wide")[1]
    assert "in fine-tuning" in tuned and "least predicted loss" in tuned
    short = json.loads(run("plan", "vit", "--tokens", "64", "--json")[1])
    assert short["settings"]["tokens"] == 64 and short["settings"]["time"] <= 2.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("w.py", ["which function", "make_two"]),
        ("w.py:nope", ["no function 'nope'"]),
        ("none.py:make", ["no file 'none.py'"]),
        ("w.py:make_two", ["(Sequential, list)", "(model, batches, loss_fn)"]),
        ("w.py:make_model --planner paper", ["a Sequential", "(model, batches, loss_fn)"]),
        ("w.py:make_broken", ["the loss", "line"]),
        ("w.py:make_broken --planner paper --steps 2", ["the loss", "line"]),
        ("w.py:make_empty --planner paper", ["no batches"]),
        ("nothing", ["unknown model 'nothing'"]),
        ("none.stats", ["no file or folder 'none.stats'"]),
        ("vit --planner paper", ["no data to train on", "--dry-run"]),
        ("vit --planner papers", ["invalid choice", "effects"]),
        ("w.py:make --steps 3", ["--steps is an option of --planner paper"]),
        ("w.py:make --statistics-out x", ["--statistics-out is an option of --planner paper"]),
        ("w.stats --planner paper --statistics-out x", ["warm-up", "file.py:function"]),
        ("w.py:make --planner paper --dry-run --statistics-out x", ["--dry-run"]),
        ("w.stats -o no/such.json", ["no folder 'no'"]),
        ("w.stats --memory 40Q", ["cannot read the budget"]),
        ("w.stats --memory 40", ["memory=40 is 40 bytes", "'40%'"]),
        ("w.stats --memory 4095", ["memory=4095 is 4095 bytes", "0.5"]),
        ("w.stats --memory 40% --host-memory 1", ["host_memory=1 is one byte"]),
        ("w.stats --host-memory 1GiB", ["memory='auto' sets no limit"]),
        ("w.stats --risk paper", ["--risk is an option of --planner paper"]),
        ("w.stats --planner paper --tokens 64", ["--tokens is an option of --planner effects"]),
        ("w.stats --planner paper --risk x", ["unknown risk model"]),
        ("w.stats --planner paper --granularity x", ["unknown granularity"]),
        ("w.stats --gamma x", ["not a number"]),
        ("w.stats --time 0", ["not a number above 0"]),
        ("w.stats --steps 0", ["at least 1"]),
        ("w.stats --tokens 0", ["at least 1"]),
        ("w.stats --table none.json", ["cannot read the effect table 'none.json'"]),
        ("w.stats --table a.json", ["not an effect table"]),
        ("w.stats --forbid =sgd", ["PATTERN=CONFIGURATION"]),
        ("w.stats --forbid nope", ["names no candidate"]),
        ("w.stats --forbid nope.*=sgd*", ["names no"]),
        ("w.stats --forbid *", ["every configuration is forbidden"]),
        ("w.stats --planner paper --time 50 --forbid sgd* --memory 0.001", ["no plan fits"]),
        ("w.stats --forbid sgd* --forbid colnorm* --forbid spectral* --memory 0.001", ["no plan fits"]),
    ],
)
def test_plan_refuses_in_one_line(arguments: str, words: list[str], run: Any):
    refused(run("plan", *arguments.split()), *words)


# ---- baoc explain ----


def test_explain_a_plan(saved: Path, run: Any):
    code, out, _ = run("explain", "a.json")
    plan = Plan.load(saved / "a.json")
    assert code == 0 and str(plan) in out
    assert "allowed" in out and "would lower the risk by about" in out and "more time would not lower" in out
    assert "proven optimal within the budgets" in out
    content = json.loads(run("explain", "a.json", "--json")[1])
    assert content["state_bytes"] == plan.state_bytes
    assert sum(entry["blocks"] for entry in content["configurations"].values()) == len(plan.blocks)


@pytest.mark.parametrize("memory", ["auto", "8%"])
def test_explain_says_what_was_proven_and_what_was_given_up(memory: str, saved: Path, run: Any):
    run("plan", "vit", "--memory", memory, "-o", "effects.json")
    plan = Plan.load(saved / "effects.json")
    out = " ".join(run("explain", "effects.json")[1].split())
    bound = f"proven: no plan within the budgets is predicted to be better than {plan.settings['bound']:+.2f}%"
    assert f"loss: {plan.settings['objective']:+.2f}%" in out and bound in out
    assert plan.settings["expected_source"] in out
    assert ("given up for a simpler plan; proven" in out) == (plan.settings["given_up"] >= 0.005)
    assert ("used, no limit" in out) == (memory == "auto") and "for a training step" in out
    assert json.loads(run("explain", "effects.json", "--json")[1])["settings"] == dict(plan.settings)


def test_explain_a_budget_of_each_rank(saved: Path, run: Any):
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    make_plan(model, "20KiB/rank", ranks=8).save(saved / "ranks.json")
    out = run("explain", "ranks.json")[1]
    assert "used on all ranks, 20.0 KiB allowed on each" in out and "OVER" not in out


def test_explain_a_block(saved: Path, run: Any):
    block = Plan.load(saved / "a.json").blocks[0]
    code, out, _ = run("explain", "a.json", block.name)
    assert code == 0
    for text in (*block.parameters, "50 x 64", str(block.configuration), "under AdamW16", block.why, *block.risk):
        assert text in out
    assert run("explain", "a.json", "0.weight")[1] == out == run("explain", "a.json", "0.w*")[1]
    content = json.loads(run("explain", "a.json", block.name, "--json")[1])
    assert sum(tensor["state_bytes"] for tensor in content["tensors"]) == block.state_bytes


def test_explain_a_plan_made_or_edited_by_hand(saved: Path, run: Any):
    Plan.uniform("adamw-8", {"weight": (64, 64)}).save(saved / "hand.json")
    assert "written by hand" in run("explain", "hand.json")[1]
    assert "unknown" in run("explain", "hand.json", "all")[1]
    plan = Plan.load(saved / "a.json")
    edited = [replace(b, configuration=Plan.uniform("adamw-32", {}).blocks[0].configuration) for b in plan.blocks]
    Plan(tuple(edited), plan.settings).save(saved / "edited.json")
    assert "OVER the budget" in run("explain", "edited.json")[1]


def test_explain_refuses_in_one_line(saved: Path, run: Any):
    refused(run("explain", "a.json", "0.weigt"), "0.weight")
    refused(run("explain", "a.json", "none.json"), "closest")
    Plan(tuple(replace(b, parameters={}, name=n) for n in "ab" for b in Plan.uniform("sgd", {}).blocks)).save(
        "two.json"
    )
    refused(run("explain", "two.json", "*"), "matches 2 blocks")
    refused(run("explain", "none.json"), "No such file", "none.json")
    refused(run("explain", "w.stats"), "not a plan file")
    text = (saved / "a.json").read_text()
    for name, content, words in [
        (
            "unknown.json",
            text.replace('"configuration": "', '"configuration": "x'),
            ["unknown.json", "unknown update rule"],
        ),
        ("broken.json", text[:-10], ["broken.json", "not JSON"]),
        ("blocks.json", '{"format": "baoc.plan", "version": 1, "blocks": 5}', ["blocks.json"]),
        ("shape.json", text.replace('"shape"', "0").replace("50,", '"x",', 1), ["shape.json"]),
    ]:
        (saved / name).write_text(content)
        refused(run("explain", name), *words)


# ---- baoc frontier ----


def test_frontier(saved: Path, run: Any):
    code, out, _ = run("frontier", "w.stats", "--points", "8", *PAPERS)
    assert code == 0 and "8 budgets from" in out and "<- knee" in out and "####" in out
    content = json.loads(run("frontier", "w.stats", "--points", "8", *PAPERS, "--json")[1])
    points = content["points"]
    assert len(points) == 8 and points[-1]["memory_budget"] == 2 * content["reference_bytes"]
    risks = [point["risk"] for point in points]
    assert risks == sorted(risks, reverse=True) and risks[-1] < 0.01
    assert all(point["state_bytes"] <= point["memory_budget"] for point in points)
    assert 0 < content["knee"] < 7


def test_frontier_of_a_model_shows_predicted_losses(run: Any):
    code, out, _ = run("frontier", "vit", "--points", "6")
    assert code == 0 and "6 budgets from" in out and "loss" in out and "risk" not in out
    points = json.loads(run("frontier", "vit", "--points", "6", "--json")[1])["points"]
    assert all(point["state_bytes"] <= point["memory_budget"] for point in points)
    assert points[-1]["risk"] < points[0]["risk"]
    assert "no time limit" in run("frontier", "vit", "--points", "2", "--time", "inf")[1]


def test_frontier_of_a_plan_is_that_of_its_model_and_a_report_agrees(saved: Path, run: Any):
    run("plan", "vit", "--memory", "25%", "-o", "of_a_model.json")
    # a plan knows only the splits that its rules use, so times may differ, and the limit must not matter here
    unlimited = [json.loads(run("frontier", name, "--time", "inf", "--json")[1]) for name in ("of_a_model.json", "vit")]
    of_plan, of_model = [[(p["state_bytes"], p["risk"]) for p in each["points"]] for each in unlimited]
    assert of_plan == of_model
    content = json.loads(run("frontier", "of_a_model.json", "--json")[1])
    page = explorer.content(explorer.Sources("vit", plans={"a": Plan.load(saved / "of_a_model.json")}))
    at = content["points"][content["knee"]]
    assert page["frontier"][0]["bytes"] == content["points"][0]["state_bytes"]
    assert page["frontier"][page["knee"]]["bytes"] == at["state_bytes"]


def test_the_frontier_starts_at_the_smallest_budget_that_can_be_met(run: Any):
    content = json.loads(run("frontier", "w.stats", "--points", "3", *PAPERS, "--forbid", "sgd*", "--json")[1])
    first = content["points"][0]
    assert first["memory_budget"] == first["state_bytes"] > 0


def test_frontier_refuses_in_one_line(run: Any, monkeypatch: pytest.MonkeyPatch):
    refused(run("frontier", "none.stats"), "no file or folder 'none.stats'")
    refused(run("frontier", "a.json", "--planner", "paper"), "'a.json' is a plan")
    Path("text.txt").write_text("hello")
    refused(run("frontier", "text.txt"), "'text.txt' is not a file of gradient statistics.")
    refused(run("frontier", "vit", "--planner", "paper"), "no data to train on")
    refused(run("frontier", "w.stats", "--forbid", "*"), "every configuration is forbidden")
    refused(run("frontier", "w.stats", "--points", "1"), "at least 2")
    refused(run("frontier", "w.stats", "--time", "1e-9"), "less than the forward and backward passes")
    refused(run("frontier", "w.stats", *PAPERS[:2], "--time", "1e-9", "--forbid", "sgd*"), "no plan is within")
    refused(run("frontier", "w.stats", "--plot", "x.bmp"), ".png")
    real = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    refused(run("frontier", "w.stats", "--plot", "x.png"), "pip install 'baoc[plot]'")


@pytest.mark.parametrize("name", ["x.png", "x.svg"])
def test_frontier_plot(saved: Path, run: Any, name: str):
    pytest.importorskip("matplotlib")
    code, out, _ = run("frontier", "w.stats", "--points", "5", "--plot", name)
    assert code == 0 and f"saved the plot to {name}" in out
    assert (saved / name).read_bytes().startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")


# ---- baoc diff ----


def test_diff(saved: Path, run: Any):
    code, out, _ = run("diff", "a.json", "b.json")
    assert code == 0 and " -> " in out and "tensors differ" in out and "state:" in out
    content = json.loads(run("diff", "a.json", "b.json", "--json")[1])
    change = next(change for change in content["changes"] if "configuration" in change["what"])
    before, after = Plan.load(saved / "a.json"), Plan.load(saved / "b.json")
    name = change["parameter"]
    assert change["before"]["configuration"] == str(before.block_of(name).configuration)
    assert change["after"]["configuration"] == str(after.block_of(name).configuration)


def test_diff_of_equal_plans(run: Any):
    code, out, _ = run("diff", "a.json", "a.json")
    assert code == 0 and out.startswith("no difference")
    assert json.loads(run("diff", "a.json", "a.json", "--json")[1])["changes"] == []


def test_diff_of_different_parameters(saved: Path, run: Any):
    Plan.uniform("adamw-16", {"old": (64, 64), "both": (64, 64), "same": (4,)}).save(saved / "one.json")
    Plan.uniform("adamw-16", {"new": (8,), "both": (64, 32), "same": (4,)}).save(saved / "other.json")
    code, out, _ = run("diff", "one.json", "other.json")
    assert code == 0 and "same" not in out
    assert "(64, 64) -> (64, 32)" in out
    assert "1 in shape, 1 only in the first plan, 1 only in the second plan" in out
    refused(run("diff", "one.json", "w.stats"), "w.stats")


# ---- baoc calibrate ----


def test_calibrate_and_plan_by_it(saved: Path, run: Any):
    tried = ("--configuration", "muon-8", "--configuration", "adamw-8")
    code, out, err = run("calibrate", "w.py:make", "--steps", "4", "--repeats", "1", *tried, "-o", "mine.json")
    assert code == 0 and "muon-8" in out and "saved the effect table" in out
    again = run("calibrate", "w.py:make", "--steps", "4", "--repeats", "1", *tried, "-o", "mine.json", "--json")
    assert {row["configuration"] for row in json.loads(again[1])["effects"]} >= {"muon-8", "adamw-8"}
    assert "run 1/" in err and "building" in err and "building" not in out
    assert "tokens per hidden parameter" in out and max(map(len, out.splitlines())) <= 80
    plan = Plan.from_json(run("plan", "w.stats", "--table", "mine.json", "--memory", "200%", "--json")[1])
    assert "expected_loss" in plan.settings


def test_a_report_says_in_json_where_it_is(saved: Path, run: Any):
    code, out, _ = run("report", "a.json", "-o", "a.html", "--json")
    assert code == 0 and json.loads(out) == {"output": "a.html", "bytes": (saved / "a.html").stat().st_size}


def test_calibrate_refuses_in_one_line(run: Any):
    refused(run("calibrate", "w.py:make", "-o", "no/such.json"), "no folder 'no'")
    refused(run("calibrate", "w.py:make", "--configuration", "muonn", "-o", "t.json"), "Did you mean 'muon'")
    refused(run("calibrate", "w.py:make_empty", "-o", "t.json"), "no batches")
    refused(run("calibrate", "w.py:make_broken", "--steps", "4", "-o", "t.json"), "the loss", "line")
    refused(run("calibrate", "w.py:make", "--steps", "2", "-o", "t.json"), "at least 4")


# ---- baoc measure ----

FEW = ("--configuration", "adamw-8", "--configuration", "sgd")


def test_measure_and_plan_by_it(saved: Path, run: Any):
    code, out, err = run("measure", "w.py:make", "-o", "times.json")
    assert code == 0 and "building" in err and "building" not in out
    lines = out.splitlines()
    assert lines[0].split() == ["ratio", "to", "adamw-16", "least", "mean", "most"]
    assert lines[2].split() == ["adamw-16", "1.00", "1.00", "1.00"]
    assert {line.split()[0] for line in lines[2:-2]} == {c.alias for c in PAPER}
    assert lines[-2] == "4 different units on cpu, fp32" and lines[-1].startswith(
        "saved the update times to times.json"
    )
    measured = UpdateTimes.load(saved / "times.json")
    plan = Plan.from_json(run("plan", "w.stats", "--times", "times.json", "--memory", "50%", *PAPERS, "--json")[1])
    assert plan.settings["times"] == {"device": "cpu", "seconds": measured.seconds}
    problem = PaperPlanner(times=measured, time=50).problem(*facts_and_statistics(saved))
    rows = [problem.time[i, problem.candidates.index(b.configuration)] for i, b in enumerate(plan.blocks)]
    assert plan.settings["time"] == pytest.approx(sum(rows) / len(rows), abs=1e-4)


def test_measured_ratios_as_json(run: Any):
    code, out, _ = run("measure", "w.py:make", *FEW, "-o", "json.json", "--json")
    content = json.loads(out)
    assert code == 0 and content["output"] == "json.json" and content["units"] == 4
    assert content["ratios"]["adamw-16"] == {"least": 1.0, "mean": 1.0, "most": 1.0}
    assert set(content["ratios"]) == {"adamw-16", "adamw-8", "sgd"}


def facts_and_statistics(saved: Path) -> tuple[ModelFacts, GradientStatistics]:
    statistics = GradientStatistics.load(saved / "w.stats")
    return statistics.model, statistics


def test_plan_measures_on_request(run: Any):
    code, out, _ = run("plan", "w.stats", "--times", "measure", "--memory", "50%", *PAPERS, "--json")
    times = Plan.from_json(out).settings["times"]
    assert code == 0 and times["device"] == "cpu" and len(times["seconds"]) == 4


def test_measured_times_bind(saved: Path, run: Any):
    """A time budget that only the configuration with short times fits."""
    content = dict.fromkeys(map(str, PAPER), 3.0) | {str(parse("adamw-16")): 1.0, str(parse("sgdm-8")): 0.5}
    shapes = GradientStatistics.load(saved / "w.stats").shapes
    units = structural_units(shapes)
    seconds = {signature({name: shapes[name] for name in unit.parameters}): content for unit in units}
    UpdateTimes("cpu", seconds).save(saved / "made-up.json")
    options = ("--planner", "paper", "--times", "made-up.json", "--memory", "200%", "--json")
    plan = Plan.from_json(run("plan", "w.stats", *options, "--time", "0.5")[1])
    assert {block.configuration.alias for block in plan.blocks} == {"sgdm-8"} and plan.settings["time"] == 0.5
    refused(run("plan", "w.stats", *options, "--time", "0.4"), "no plan is within time=0.4", "the fastest needs 0.5")


def test_measure_refuses_in_one_line(run: Any):
    refused(run("measure", "w.py:make"), "-o/--output")
    refused(run("measure", "w.py:make", "-o", "no/such.json"), "no folder 'no'")
    refused(run("measure", "w.py:nothing", "-o", "t.json"), "nothing")
    refused(run("measure", "w.py:make", "--configuration", "muonn", "-o", "t.json"), "Did you mean 'muon'")
    refused(run("measure", "w.py:make", "--device", "nowhere", "-o", "t.json"), "'nowhere' is not a device")
    refused(run("measure", "w.py:make", "--dtype", "int8", "-o", "t.json"), "int8")


def test_plan_refuses_times_in_one_line(saved: Path, run: Any):
    def plan(times: str) -> tuple[int, str, str]:
        return run("plan", "w.stats", "--memory", "50%", *PAPERS, "--times", times)

    refused(plan("absent.json"), "there is no file 'absent.json'")
    refused(plan("a.json"), "times='a.json': this is not a file of update times")
    refused(run("plan", "w.stats", "--times", "gpu"), "--times is an option of --planner paper")
    assert run("measure", "w.py:make", *FEW, "-o", "few.json")[0] == 0
    refused(plan("few.json"), "times= has no time of adamw-32 for the unit 0.weight of shapes 50x64", "`baoc measure`")
    content = json.loads((saved / "few.json").read_text())
    for change, words in (
        ({"seconds": {"50x64": {"sgd": 0}}}, "times of unit '50x64' with 'sgd' must be a positive number, got 0"),
        ({"seconds": {"50x64": 3}}, "times of unit '50x64' must be seconds by configuration, got 3"),
        ({"seconds": None}, "times must have a device and seconds"),
        ({"version": 99}, "version 99"),
    ):
        (saved / "bad.json").write_text(json.dumps(content | change))
        refused(plan("bad.json"), "times='bad.json': ", words)
    (saved / "bad.json").write_bytes(b"\x00\xff")
    refused(plan("bad.json"), "times='bad.json': this is not a file of update times")

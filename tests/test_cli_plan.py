"""``baoc plan``, ``explain``, ``frontier`` and ``diff`` as a person uses them, and the profiler behind them."""

from __future__ import annotations

import builtins
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from baoc import BlockOptimizer, Plan
from baoc.cli import main
from baoc.plan import profile
from baoc.profiling.profile import Profile, ProfileError
from baoc.profiling.profiler import Profiler

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

def make_two():
    return make()[:2]

def make_registered():
    from baoc.planning.risk import register
    @register("mine-of-the-test")
    def mine(metrics, configuration, settings):
        return {"precision": 32 / configuration.switches.bits if configuration.switches.bits else 99.0}
    return make()
"""


PAPERS = ("--space", "paper", "--time", "50")
"""Plans with a block for every part of the small workload, whose risks gradients decide."""


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8))


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a workload, its profile, and two plans of it."""
    folder = tmp_path_factory.mktemp("plans")
    (folder / "w.py").write_text(WORKLOAD)
    torch.set_num_threads(1)
    source, files = (
        f"{folder / 'w.py'}:make",
        ("-o", f"{folder / 'a.json'}", "--profile-out", f"{folder / 'w.profile'}"),
    )
    assert main(["plan", source, "--memory", "40%", "--steps", "12", *PAPERS, *files]) == 0
    assert main(["plan", f"{folder / 'w.profile'}", "--memory", "1.2", *PAPERS, "-o", f"{folder / 'b.json'}"]) == 0
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


# ---- the profiler ----


def test_profile_cycles_through_a_list():
    seen: list[tuple[int, int]] = []
    found = profile(
        mlp(), square, [torch.randn(4, 32)] * 2, steps=5, on_step=lambda step, steps, loss: seen.append((step, steps))
    )
    assert found.steps == 5 and seen == [(i, 5) for i in range(1, 6)]
    assert list(found.records) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_profile_uses_what_an_iterator_has_and_says_so(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "baoc"):
        found = profile(mlp(), square, iter([torch.randn(4, 32)] * 3), steps=9)
    assert found.steps == 3
    assert "ended after 3 of 9 steps" in caplog.text


def test_profile_has_canonical_names_and_only_trainable_parameters():
    model = mlp()
    model[0].requires_grad_(False)
    wrapped = nn.ModuleDict({"_orig_mod": model})
    found = profile(wrapped, lambda m, b: square(model, b), [torch.randn(4, 32)], steps=1)
    assert list(found.records) == ["2.weight", "2.bias"]


def test_profile_survives_a_step_with_infinite_gradients():
    batches = [torch.randn(4, 32), torch.full((4, 32), torch.inf), torch.randn(4, 32)]
    model = mlp()
    found = profile(model, square, batches, steps=3)
    assert (found.steps, found.skipped) == (2, 1)
    assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": []}, "no batches"),
        ({"batches": iter([])}, "no batches"),
        ({"steps": 0}, "at least one gradient"),
        ({"loss_fn": lambda model, batch: model(batch)}, "shape"),
        ({"loss_fn": lambda model, batch: 1.0}, "float"),
        ({"loss_fn": lambda model, batch: batch.mean()}, "does not depend"),
        ({"model": mlp().requires_grad_(False)}, "no parameter is trainable"),
    ],
)
def test_profile_refuses(change: dict[str, Any], message: str):
    with pytest.raises(ProfileError, match=message):
        profile(**{"model": mlp(), "loss_fn": square, "batches": [torch.randn(4, 32)], **change})


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, BlockOptimizer])
def test_profiler_sees_what_a_loop_sees(kind: type[torch.optim.Optimizer]):
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.0)
    profiler = Profiler(dict(model.named_parameters())).attach(optimizer)
    with pytest.raises(RuntimeError, match="detach"):
        profiler.attach(optimizer)
    batches = [torch.randn(4, 32) for _ in range(4)]
    for index, batch in enumerate(batches):
        if index == 3:
            profiler.detach()
        square(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert profiler.steps == 3
    direct = profile(model, square, batches, steps=3, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    for name, record in profiler.profile().records.items():
        assert (record.second == direct.records[name].second).all()


def test_profiler_without_steps_has_no_profile():
    with pytest.raises(ProfileError, match="no gradients"):
        Profiler(mlp()).profile()


# ---- baoc plan ----


def test_plan_from_a_workload(saved: Path, run: Any):
    code, out, err = run("plan", "w.py:make", "--memory", "40%", "--time", "50", "--steps", "12", "-o", "c.json")
    assert code == 0
    assert "building" in err and "building" not in out
    assert "warm-up: step 10/12, loss" in err and "warm-up: step 12/12" in err
    plan = Plan.load(saved / "c.json")
    assert str(plan) in out and "saved the plan to c.json" in out
    assert plan.state_bytes <= 0.4 * plan.reference_bytes
    assert plan.settings["warmup_steps"] == 12
    plan.check({name: record.shape for name, record in Profile.load(saved / "w.profile").records.items()})


def test_an_object_with_attributes_is_a_workload_too(run: Any):
    code, out, _ = run("plan", "w.py:Workload", "--steps", "2", "--time", "50")
    assert code == 0 and "not saved: add -o" in out


def test_a_one_shot_iterator_is_used_up(run: Any):
    code, _, err = run("plan", "w.py:make_one_shot", "--steps", "6", "--time", "50")
    assert code == 0 and "the profile is of 4 steps, not 6" in err


def test_a_risk_that_the_file_registers(run: Any):
    code, _, _ = run("plan", "w.py:make_registered", "--steps", "2", "--time", "50", "--risk", "mine-of-the-test")
    assert code == 0
    from baoc.planning.risk import RISKS

    del RISKS["mine-of-the-test"]


def test_plan_from_a_profile_as_json_is_a_plan(run: Any):
    code, out, err = run("plan", "w.profile", "--memory", "60%", "--time", "50", "--forbid", "sgd*", "--json")
    assert code == 0 and "not saved" in err
    plan = Plan.from_json(out)
    assert plan.state_bytes <= 0.6 * plan.reference_bytes
    assert not any(str(block.configuration).startswith("sgd") for block in plan.blocks)


def test_forbid_by_pattern(run: Any):
    options = ("--space", "paper", "--memory", "2.0", "--time", "50", "--granularity", "tensor", "--json")
    plan = Plan.from_json(run("plan", "w.profile", *options, "--forbid", "0.*=adamw[m=fp32,v=fp32]")[1])
    free = Plan.from_json(run("plan", "w.profile", *options)[1])
    spelled = {name: str(p.block_of("0.weight").configuration) for name, p in (("free", free), ("forbidden", plan))}
    assert spelled["free"] == "adamw[m=fp32,v=fp32]" != spelled["forbidden"]
    assert str(plan.block_of("4.weight").configuration) == "adamw[m=fp32,v=fp32]"


def test_dry_run_sees_no_gradients(run: Any):
    papers = ("--space", "paper", "--time", "50", "--dry-run", "--wide")
    code, out, err = run("plan", "w.py:make", "--memory", "0.5", *papers)
    assert code == 0 and "no gradients seen yet" in out and "warm-up" not in err
    code, out, _ = run("plan", "vit", "--memory", "30%", "--granularity", "coarse", *papers)
    assert code == 0 and "no gradients seen yet" in out


def test_a_plan_of_measured_effects_needs_no_gradients(run: Any):
    code, out, _ = run("plan", "vit", "--dry-run", "--memory", "auto", "--tolerance", "1")
    assert code == 0 and "loss against AdamW32, from scratch" in out
    assert max(map(len, out.splitlines())) <= 80
    tuned = run("plan", "vit", "--dry-run", "--memory", "10%", "--regime", "finetune", "--wide")[1]
    assert "in fine-tuning" in tuned and "why" in tuned
    short = json.loads(run("plan", "vit", "--dry-run", "--tokens", "64", "--json")[1])
    assert short["settings"]["tokens"] == 64 and short["settings"]["time"] <= 2.0


def test_plan_refuses_in_one_line(run: Any):
    refused(run("plan", "w.py"), "which function", "make_two")
    refused(run("plan", "w.py:nope"), "no function 'nope'")
    refused(run("plan", "none.py:make"), "no file 'none.py'")
    refused(run("plan", "w.py:make_two"), "(Sequential, list)", "(model, batches, loss_fn)")
    refused(run("plan", "w.py:make_broken", "--steps", "2"), "the loss", "line")
    refused(run("plan", "w.py:make_empty"), "no batches")
    refused(run("plan", "nothing"), "no file 'nothing'")
    refused(run("plan", "vit"), "--dry-run")
    refused(run("plan", "a.json"), "--dry-run")
    refused(run("plan", "w.profile", "--dry-run"), "leave it out")
    refused(run("plan", "w.profile", "--profile-out", "x"), "warm-up")
    refused(run("plan", "w.py:make", "--dry-run", "--profile-out", "x"), "warm-up")
    refused(run("plan", "w.profile", "-o", "no/such.json"), "no folder 'no'")
    refused(run("plan", "w.profile", "--memory", "40Q"), "cannot read the budget")
    refused(run("plan", "w.profile", "--memory", "40"), "40% for a share")
    refused(run("plan", "w.profile", "--risk", "x"), "unknown risk model")
    refused(run("plan", "w.profile", "--granularity", "x"), "unknown granularity")
    refused(run("plan", "w.profile", "--gamma", "x"), "not a number")
    refused(run("plan", "w.profile", "--time", "0"), "not a number above 0")
    refused(run("plan", "w.profile", "--steps", "0"), "at least 1")
    refused(run("plan", "w.profile", "--tokens", "0"), "at least 1")
    refused(run("plan", "w.profile", "--table", "none.json"), "cannot read the table of risks 'none.json'")
    refused(run("plan", "w.profile", "--table", "a.json"), "not a table of risks")
    refused(run("plan", "w.profile", "--forbid", "=sgd"), "PATTERN=CONFIGURATION")
    refused(run("plan", "w.profile", "--forbid", "nope"), "names no candidate")
    refused(run("plan", "w.profile", "--forbid", "nope.*=sgd*"), "names no block")
    refused(run("plan", "w.profile", "--forbid", "*"), "every configuration is forbidden")
    refused(run("plan", "w.profile", "--forbid", "sgd*", "--memory", "0.001", "--time", "50"), "no plan fits")


# ---- baoc explain ----


def test_explain_a_plan(saved: Path, run: Any):
    code, out, _ = run("explain", "a.json")
    plan = Plan.load(saved / "a.json")
    assert code == 0 and str(plan) in out
    assert "allowed" in out and "would lower the risk by about" in out and "more time would not lower" in out
    assert "proven the least" in out
    content = json.loads(run("explain", "a.json", "--json")[1])
    assert content["state_bytes"] == plan.state_bytes
    assert sum(entry["blocks"] for entry in content["configurations"].values()) == len(plan.blocks)


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
    assert "made by hand" in run("explain", "hand.json")[1]
    assert "not known" in run("explain", "hand.json", "all")[1]
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
    refused(run("explain", "w.profile"), "not a plan file")
    text = (saved / "a.json").read_text()
    for name, content, words in [
        (
            "unknown.json",
            text.replace('"configuration": "', '"configuration": "x'),
            ["unknown.json", "unknown mechanism"],
        ),
        ("broken.json", text[:-10], ["broken.json", "not JSON"]),
        ("blocks.json", '{"format": "baoc.plan", "version": 1, "blocks": 5}', ["blocks.json"]),
        ("shape.json", text.replace('"shape"', "0").replace("50,", '"x",', 1), ["shape.json"]),
    ]:
        (saved / name).write_text(content)
        refused(run("explain", name), *words)


# ---- baoc frontier ----


def test_frontier(saved: Path, run: Any):
    code, out, _ = run("frontier", "w.profile", "--points", "8", *PAPERS)
    assert code == 0 and "8 budgets from" in out and "<- knee" in out and "####" in out
    content = json.loads(run("frontier", "w.profile", "--points", "8", *PAPERS, "--json")[1])
    points = content["points"]
    assert len(points) == 8 and points[-1]["memory_budget"] == 2 * content["reference_bytes"]
    risks = [point["risk"] for point in points]
    assert risks == sorted(risks, reverse=True) and risks[-1] < 0.01
    assert all(point["state_bytes"] <= point["memory_budget"] for point in points)
    assert 0 < content["knee"] < 7


def test_the_frontier_starts_at_the_smallest_budget_that_can_be_met(run: Any):
    content = json.loads(run("frontier", "w.profile", "--points", "3", *PAPERS, "--forbid", "sgd*", "--json")[1])
    first = content["points"][0]
    assert first["memory_budget"] == first["state_bytes"] > 0


def test_frontier_refuses_in_one_line(run: Any, monkeypatch: pytest.MonkeyPatch):
    refused(run("frontier", "none.profile"), "No such file")
    refused(run("frontier", "a.json"), "not a profile")
    refused(run("frontier", "."), "folder")
    refused(run("frontier", "w.profile", "--forbid", "*"), "every configuration is forbidden")
    refused(run("frontier", "w.profile", "--points", "1"), "at least 2")
    refused(run("frontier", "w.profile", "--time", "1e-9", "--forbid", "sgd*"), "no plan is within")
    refused(run("frontier", "w.profile", "--plot", "x.bmp"), ".png")
    real = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    refused(run("frontier", "w.profile", "--plot", "x.png"), "pip install 'baoc[plot]'")


@pytest.mark.parametrize("name", ["x.png", "x.svg"])
def test_frontier_plot(saved: Path, run: Any, name: str):
    pytest.importorskip("matplotlib")
    code, out, _ = run("frontier", "w.profile", "--points", "5", "--time", "50", "--plot", name)
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
    refused(run("diff", "one.json", "w.profile"), "w.profile")


# ---- baoc calibrate ----


def test_calibrate_and_plan_by_it(saved: Path, run: Any):
    tried = ("--configuration", "muon-8", "--configuration", "adamw-8")
    code, out, err = run("calibrate", "w.py:make", "--steps", "4", "--repeats", "1", *tried, "-o", "mine.json")
    assert code == 0 and "muon-8" in out and "saved the table" in out
    assert "run 1/" in err and "building" in err and "building" not in out
    plan = Plan.from_json(run("plan", "w.profile", "--table", "mine.json", "--memory", "200%", "--json")[1])
    assert "expected_loss" in plan.settings


def test_calibrate_refuses_in_one_line(run: Any):
    refused(run("calibrate", "w.py:make", "-o", "no/such.json"), "no folder 'no'")
    refused(run("calibrate", "w.py:make", "--configuration", "muonn", "-o", "t.json"), "Did you mean 'muon'")
    refused(run("calibrate", "w.py:make_empty", "-o", "t.json"), "no batches")
    refused(run("calibrate", "w.py:make_broken", "--steps", "4", "-o", "t.json"), "the loss", "line")
    refused(run("calibrate", "w.py:make", "--steps", "2", "-o", "t.json"), "at least 4")

"""Numbers on pages, made from the results that they are of.

``<!-- numbers: NAME -->...<!-- end of numbers -->`` on a page holds what a function of :data:`NUMBERS` returns.
``python -m tests.docs.documents`` rewrites it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from baoc import Budget, EffectPlanner, ModelFacts, Plan
from baoc.core.text import human_bytes
from baoc.tools.estimate import trainable_shapes
from baoc.tools.models.resolve import resolve
from benchmarks.peak import smollm2_135m
from experiments.pictures.memory import bars

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
FINE_TUNED = "smollm2/gsm8k"
_MARK = re.compile(r"(<!-- numbers: (?P<name>\w+) -->\n*)(?P<text>.*?)(\n*<!-- end of numbers -->)", re.DOTALL)


def filled(text: str) -> str:
    """Return the text of a page with today's numbers."""
    return _MARK.sub(lambda found: found[1] + NUMBERS[found["name"]]() + found[4], text)


def runs(path: str) -> list[dict[str, Any]]:
    """Return the runs of a file of results."""
    lines = (RESULTS / path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line]


def rows(page: str) -> list[list[str]]:
    """Return the cells of all rows of all tables of a page."""
    lines = (RESULTS / page).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


# ---- what is shown ----


def zoo() -> str:
    """Wins, ties and losses of the zoo."""
    tasks = re.search(r"^(\d+) small tasks .*?, (\d+) seeds each", (RESULTS / "zoo.md").read_text(), re.M | re.S)
    assert tasks, "zoo.md does not begin with its number of tasks and seeds"
    counts = {row[0]: row[2:5] for row in rows("zoo.md") if len(row) > 4 and row[1] == "AdamW32's best lr"}
    wins, ties, losses = counts["auto"]
    rest = (f"at {budget} {'{}, {} and {}'.format(*counts[budget])}" for budget in ("0.5", "0.25"))
    return (
        f"{tasks[1]} small tasks, {tasks[2]} seeds each, at AdamW32's best learning rate: "
        f'with `memory="auto"` {wins} wins, {ties} ties and {losses} losses, {", ".join(rest)}'
    )


@cache
def gpt2() -> str:
    """GPT-2's optimizer state with AdamW and with README.md's plan."""
    model = resolve("gpt2-small")
    plan = EffectPlanner(tokens=32_768).problem(ModelFacts.of(model)).plan(Budget(0.25))
    before = Plan.uniform("adamw-32", trainable_shapes(model)).state_bytes
    return f"{human_bytes(before)} of optimizer state by {human_bytes(plan.state_bytes)}"


@cache
def memory() -> str:
    """The picture of memory, with its numbers in words."""
    sizes = ", ".join(f"{bar.name}: {bar.per_parameter:.1f}" for bar in bars())
    return f"![Bytes per parameter of Llama-3.1-8B. {sizes}](docs/pictures/memory.png)"


def peers() -> str:
    """The table of README.md: SmolLM2-135M with several optimizers."""
    tuned = [run for run in runs("paper/exp1/runs.jsonl") if run.get("workload") == FINE_TUNED]
    held = {run["method"]: run for run in runs("peak/runs.jsonl") if run["model"] == "smollm2-135m"}

    def state(method: str) -> str:
        return f"{8 + _state(tuned, method):.2f}"

    def loss(method: str) -> str:
        pairs = _pairs(tuned, method, "adamw16", "method")
        return f"{round(100 * fmean(ours / theirs - 1 for ours, theirs in pairs), 1) or 0.0:+.1f}%"

    def total(method: str) -> str:
        return f"{sum(held[method][part] for part in ('weights', 'low bits', 'gradients', 'state')):.2f}"

    def rounded(bits: str) -> str:
        low = [run for run in runs("weights/runs.jsonl") if run["workload"] == "stories15m/gsm8k" and run["lr"] == 1e-5]
        pairs = _pairs(low, bits, "fp32", "weights")
        return f"{100 * fmean(ours / theirs - 1 for ours, theirs in pairs):+.2f}% ²"

    steps = {row[6]: row[5].partition(" ")[0] for row in rows("training_step.md") if row[0] == "smollm2-135m"}
    ours = next(ratio for what, ratio in steps.items() if "`" in what)
    found = [
        ("torch AdamW", total("torch-fp32"), "1.00", ""),
        ("AdamW, 16-bit state", state("adamw16"), "", "0"),
        ("8-bit AdamW (time: bitsandbytes)", state("adamw8"), steps["bitsandbytes AdamW8bit"], loss("adamw8")),
        ("Adafactor", state("adafactor"), steps["torch Adafactor"], loss("adafactor")),
        ("**baoc, `memory=0.25`**", f"{8 + _today():.2f}", ours, loss("baoc@0.25")),
        ("bitsandbytes AdamW8bit, bf16 weights", total("bitsandbytes"), "", rounded("none")),
        ("**baoc, bf16 weights with 8 more bits**", total("ours"), "", rounded("8")),
        ("**baoc, the same, gradients released**", total("ours-released"), "", ""),
    ]
    lines = ["| | bytes per parameter | training step | loss ¹ |", "|---|---:|---:|---:|"]
    return "\n".join([*lines, *(f"| {' | '.join(each or '-' for each in row)} |" for row in found)])


def finetuned() -> str:
    """Bytes per parameter of the plan whose loss README.md shows."""
    return f"{8 + _state(runs('paper/exp1/runs.jsonl'), 'baoc@0.25'):.2f}"


def _state(found: Iterable[dict[str, Any]], method: str) -> float:
    """Return the bytes of state per parameter of a method's runs."""
    run = next(run for run in found if (run.get("workload"), run.get("method")) == (FINE_TUNED, method))
    return float(run["state_bytes"] / run["parameters"])


@cache
def _today() -> float:
    """Return the same of today's plan."""
    with torch.device("meta"):
        model = smollm2_135m()
    plan = EffectPlanner(regime="finetune").problem(ModelFacts.of(model)).plan(Budget(0.25))
    return plan.state_bytes / sum(block.numel for block in plan.blocks)


def _pairs(found: Iterable[dict[str, Any]], one: str, other: str, key: str) -> list[tuple[float, float]]:
    """Return the test losses of two methods, seed by seed."""
    losses = {(run[key], run["seed"]): run["test_loss"] for run in found}
    seeds = sorted(seed for method, seed in losses if method == one)
    return [(losses[one, seed], losses[other, seed]) for seed in seeds]


NUMBERS: dict[str, Callable[[], str]] = {
    "zoo": zoo,
    "gpt2": gpt2,
    "memory": memory,
    "peers": peers,
    "finetuned": finetuned,
}

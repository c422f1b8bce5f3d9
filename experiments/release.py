"""What lagged clipping costs: released gradients against ordinary clipping, seed by seed.

    python -m experiments.release --data DIR --output docs/results/release

What is finished is kept in OUTPUT/runs.jsonl and not repeated; the tables go to standard output.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import baoc
from experiments.runs import markdown
from experiments.runs.page import estimate
from experiments.tiny_gpt import cosine_with_warmup
from experiments.workloads import Options, Workload, get

WORKLOADS = ("gpt-small/alpaca", "vit-small/cifar10")
PLANS = ("adamw-32", "muon-8 else adamw[m=int8,v=factored]")
CLIPS = ("ordinary", "lagged", "none")
MAX_NORM = 1.0
EVALUATED = 20  # batches


def run(workload: Workload, plan: str, clip: str, seed: int, steps: int) -> dict[str, Any]:
    """Train once; return the test loss and how many steps were clipped."""
    torch.manual_seed(seed)  # dropout
    model = workload.build(seed=seed, device="cpu")
    optimizer = baoc.BlockOptimizer(model, lr=workload.lr, weight_decay=0.1, plan=plan)
    schedule = cosine_with_warmup(optimizer, steps)
    release = baoc.release_gradients(optimizer, MAX_NORM if clip == "lagged" else None) if clip != "ordinary" else None
    clipped = 0
    for _, batch in zip(range(steps), workload.train_batches(seed=seed)):
        workload.loss(model, batch).backward()
        norm = None if release else float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        norm = release.norm if release else norm
        clipped += norm is not None and norm > MAX_NORM
        optimizer.zero_grad()
        schedule.step()
    test_loss = workload.evaluate(model, "test", EVALUATED)["loss"]
    return {"test_loss": test_loss, "clipped": clipped / steps}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return one line for each workload, plan and threshold: losses, and differences seed by seed in percent."""
    found = {tuple(row[key] for key in ("workload", "plan", "clip", "seed")): row for row in rows}
    lines = []
    for setting in dict.fromkeys(key[:2] for key in found):
        seeds = sorted({key[3] for key in found if key[:2] == setting})
        ordinary = {seed: found.get((*setting, "ordinary", seed)) for seed in seeds}
        cells = []
        for clip in ("lagged", "none"):
            pairs = [(found.get((*setting, clip, seed)), ordinary[seed]) for seed in seeds]
            cells.append([100 * (one["test_loss"] / other["test_loss"] - 1) for one, other in pairs if one and other])
        known = [row for row in ordinary.values() if row]
        if known:
            share = sum(row["clipped"] for row in known) / len(known)
            losses = estimate([row["test_loss"] for row in known], ".4f")
            told = [estimate(cell, "+.2f") if cell else "-" for cell in cells]
            lines.append([setting[0], f"`{setting[1]}`", f"{share:.0%}", losses, *told])
    header = ["Workload", "Plan", "Clipped steps", "Ordinary clipping", "Lagged, %", "No clipping, %"]
    return markdown.table(header, lines, numbers=False)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--data", help="has alpaca/ and cifar10/ (default: $BAOC_DATA, or the hub)")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tables-only", action="store_true")
    arguments = parser.parse_args(argv)
    path = arguments.output / "runs.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    for plan, seed, name, clip in itertools.product(PLANS, range(arguments.seeds), WORKLOADS, CLIPS):
        key = {"workload": name, "plan": plan, "clip": clip, "seed": seed, "steps": arguments.steps}
        if arguments.tables_only or any(row.items() >= key.items() for row in rows):
            continue
        row = {**run(get(name, Options(data=arguments.data)), plan, clip, seed, arguments.steps), **key}
        rows.append(row)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()

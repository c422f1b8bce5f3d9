"""What formats of slot ``w`` cost: bf16 weights with and without their low bits, against fp32 weights, seed by seed.

    python -m experiments.low_bits --data DIR --pretrained DIR --output docs/results/weights

A small GPT learns Alpaca from scratch, and stories15M is fine-tuned on GSM8K, each at two learning rates. fp32 weights
are trained under bf16 autocast, and bf16 weights compute in bf16. Everything else is equal: the rules, their state
formats, the batches and the initial weights. DIR/stories15m are weights of ``llama2.c``'s stories15M as transformers
saves them; without --pretrained they are left out.

What is finished is kept in OUTPUT/runs.jsonl and not repeated. The table goes to standard output; with --effects the
means are written into the file that planners read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import baoc
from experiments.rules.siblings import workload_of
from experiments.runs import markdown
from experiments.runs.page import estimate
from experiments.tiny_gpt import cosine_with_warmup
from experiments.workloads import Options, Workload, get

FORMATS = ("fp32", "16", "8", "sr", "none")
RATES = (1e-3, 1e-5)
CLIP = 1.0
EVALUATED = 10  # batches


@dataclass(frozen=True)
class Setting:
    """What is trained: ``plan`` is without slot ``w``."""

    regime: str
    name: str
    plan: str
    steps: int
    batch: int | None = None
    length: int | None = None

    def workload(self, options: Options) -> Workload:
        return workload_of(self.name, options) if "/" not in self.name else get(self.name, options)


SETTINGS = (
    Setting("scratch", "gpt", "muon[m=int8] else adamw[m=int8,v=factored]", steps=120),
    Setting("finetune", "stories15m/gsm8k", "adamw[m=int8,v=factored]", steps=24, batch=4, length=128),
)


@cache
def workload_for(setting: Setting, data: str | None, pretrained: str | None, bf16: bool) -> Workload:
    """Return a setting's workload; its data is read once per process."""
    options = Options(data=data, pretrained=pretrained if "/" in setting.name else None, bf16=bf16,
                      batch_size=setting.batch, length=setting.length)  # fmt: skip
    return setting.workload(options)


def run(
    setting: Setting, weights: str, lr: float, seed: int, data: str | None, pretrained: str | None
) -> dict[str, Any]:
    """Train once; return the losses, and how far the fp32 weights moved."""
    begun = time.process_time()
    is_wide = weights == "fp32"
    workload = workload_for(setting, data, pretrained, is_wide)
    torch.manual_seed(seed)
    model = workload.build(seed=seed, pretrained=workload.options.pretrained)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    plan = baoc.parse(setting.plan)
    if not is_wide:
        baoc.to_low_precision(model, torch.bfloat16)
        plan = plan.with_weight(weights)
    optimizer = baoc.BlockOptimizer(model, lr=lr, weight_decay=0.1, plan=plan)
    schedule = cosine_with_warmup(optimizer, setting.steps)
    losses = []
    for _, batch in zip(range(setting.steps), workload.train_batches(seed=seed)):
        loss = workload.loss(model, batch)
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    test_loss = workload.evaluate(model, "test", EVALUATED)["loss"]
    moved = sum(
        float((param.detach().float() - start[name]).square().sum()) for name, param in model.named_parameters()
    )
    return {
        "test_loss": test_loss,
        "train_loss": statistics.mean(losses[-max(1, setting.steps // 10) :]),
        "moved": moved**0.5,
        "seconds": round(time.process_time() - begun, 1),
    }


def keys(settings: Sequence[Setting], seeds: int) -> Iterator[tuple[Setting, dict[str, Any]]]:
    """Yield what is to be run, whole sets of formats first."""
    for seed, setting, lr, weights in itertools.product(range(seeds), settings, RATES, FORMATS):
        yield setting, {"regime": setting.regime, "workload": setting.name, "weights": weights, "lr": lr, "seed": seed,
                        "steps": setting.steps}  # fmt: skip


def differences(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, float, str], list[float]]:
    """Return the test loss against fp32 weights in percent, seed by seed, by regime, learning rate and format."""
    found = {tuple(row[key] for key in ("regime", "lr", "weights", "seed")): row["test_loss"] for row in rows}
    cells: dict[tuple[str, float, str], list[float]] = {}
    for (regime, lr, weights, seed), loss in found.items():
        wide = found.get((regime, lr, "fp32", seed))
        if wide and weights != "fp32":
            cells.setdefault((regime, lr, weights), []).append(100 * (loss / wide - 1))
    return cells


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return one line for each workload and learning rate: the loss with fp32 weights, and differences in percent."""
    cells, lines = differences(rows), []
    for regime, name, lr in dict.fromkeys((row["regime"], row["workload"], row["lr"]) for row in rows):
        wide = [row["test_loss"] for row in rows if (row["regime"], row["lr"], row["weights"]) == (regime, lr, "fp32")]
        told = [cells.get((regime, lr, weights)) for weights in FORMATS[1:]]
        lines.append(
            [f"`{name}`", f"{lr:g}", estimate(wide, ".4f"), *(estimate(c, "+.3f") if c else "-" for c in told)]
        )
    header = ["Workload", "lr", "fp32 weights", *(f"`w={each}`, %" for each in FORMATS[1:])]
    return markdown.table(header, lines)


def effects(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the means as planners read them: percent of the loss, their standard errors, and how many runs."""
    return [
        {
            "regime": regime,
            "lr": lr,
            "weights": weights,
            "loss": round(statistics.mean(cell), 4),
            "error": round(statistics.stdev(cell) / len(cell) ** 0.5, 4) if len(cell) > 1 else None,
            "runs": len(cell),
        }
        for (regime, lr, weights), cell in sorted(differences(rows).items())
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data", help="has alpaca/ and gsm8k/ (default: $BAOC_DATA, or the hub)")
    parser.add_argument("--pretrained", help="has stories15m/")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--effects", type=Path, help="write the means here, for planners")
    parser.add_argument("--tables-only", action="store_true")
    arguments = parser.parse_args(argv)
    path = arguments.output / "runs.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = [setting for setting in SETTINGS if "/" not in setting.name or arguments.pretrained]
    for setting, key in keys(settings, arguments.seeds):
        if arguments.tables_only or any(row.items() >= key.items() for row in rows):
            continue
        found = run(setting, key["weights"], key["lr"], key["seed"], arguments.data, arguments.pretrained)
        rows.append({**key, **found})
        with path.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    print("\n".join(table(rows)))
    if arguments.effects:
        arguments.effects.write_text(json.dumps(effects(rows), indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How the constants of the normalised mechanisms were chosen: Newton-Schulz's coefficients and ``update_rms``.

    python -m experiments.normalised --data DIR --output docs/results/normalised

What is finished is kept in OUTPUT/runs.jsonl and not repeated; the page is OUTPUT.md.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from baoc.core.mechanisms.newton_schulz import MUON, YOU_JIACHENG, Coefficients, orthogonalised
from baoc.core.mechanisms.normalised import UPDATE_RMS
from baoc.core.roles import Role, roles_of
from experiments import methods, workloads
from experiments.runs import Cell, Row, Store, markdown
from experiments.runs.page import estimate, write_page
from experiments.runs.running import Running
from experiments.runs.summary import REFERENCE
from experiments.workloads import Workload
from experiments.workloads.fine_tuning import GPTFineTuning
from experiments.workloads.gpt import SIZES

CANDIDATES: Mapping[str, Coefficients] = {
    "You Jiacheng x5": YOU_JIACHENG,
    "its first 4": YOU_JIACHENG[:4],
    "its first 3": YOU_JIACHENG[:3],
    "Muon x5": MUON,
    "Muon x4": MUON[:4],
    "Muon x3": MUON[:3],
}
TRAINED = ("You Jiacheng x5", "its first 3", "Muon x5", "Muon x3")
"""Candidates that a model is trained with; the others lie between."""
LENGTHS = (0.1, 0.2, 0.3, 0.4, 0.6)
LOOKED_AT = (1, 10, 50)
"""Steps after which the length of an update is measured, besides the last."""
FINE_TUNED = "gpt-small/gsm8k after alpaca"
FINE_TUNING_FACTORS = (0.1, 0.3, 1.0)


# ---- Newton-Schulz without a training ----


def deviation(matrix: Tensor, coefficients: Coefficients) -> float:
    """RMS distance of the singular values from one.

    >>> deviation(torch.eye(4), YOU_JIACHENG) < deviation(torch.eye(4), MUON)
    True
    """
    singular = torch.linalg.svdvals(orthogonalised(matrix.clone().unsqueeze(0), coefficients)[0])
    return float((singular - 1).square().mean().sqrt())


def log_spaced(side: int = 256, smallest: float = 1e-3) -> Tensor:
    """A matrix whose singular values go from one down to the smallest, by equal factors."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(side, side, generator=generator))[0] for _ in range(2))
    matrix: Tensor = left * torch.logspace(0, math.log10(smallest), side) @ right
    return matrix


def seconds(matrix: Tensor, coefficients: Coefficients, repeats: int = 10) -> float:
    """Of a processor, in the fastest of several."""
    found = []
    for _ in range(repeats):
        stacked = matrix.clone().unsqueeze(0)
        started = time.process_time()
        orthogonalised(stacked, coefficients)
        found.append(time.process_time() - started)
    return min(found)


# ---- trainings ----


def fine_tuning(options: workloads.Options, steps_before: int) -> Workload:
    """GSM8K for a model that AdamW32 has trained on Alpaca for so many steps."""
    workload = GPTFineTuning(FINE_TUNED, SIZES["gpt-small"], "alpaca-gsm8k", options)
    workload.steps_before = steps_before
    return workload


def trained(cell: Cell, workload: Workload, eval_batches: int) -> Row:
    """Train and evaluate, and measure updates: the RMS of the change of hidden matrices in units of lr, by step."""
    running = Running(cell, workload, methods.get(cell.method), torch.device("cpu"))
    hidden = [
        param
        for (_, param), role in zip(running.model.named_parameters(), roles_of(running.model).values())
        if role is Role.MATRIX
    ]
    moved, batches = {}, workload.train_batches(seed=cell.seed)
    for step in range(1, cell.steps + 1):
        before = [param.detach().clone() for param in hidden] if step in (*LOOKED_AT, cell.steps) else []
        lr = running.optimizer.param_groups[0]["lr"]
        running.advance(lambda: next(batches))
        if before:
            changes = torch.cat([(new.detach() - old).flatten() for new, old in zip(hidden, before)])
            moved[step] = float(changes.square().mean().sqrt() / lr)
    scores = {
        f"{split}_loss": workload.evaluate(running.model, split, eval_batches)["loss"]
        for split in ("validation", "test")
    }
    return {**cell.fields, "key": cell.key, "moved": moved, **scores}


class Trainings:
    """Runs that are made once, then looked up."""

    def __init__(self, store: Store, seeds: int, eval_batches: int) -> None:
        self._store, self._seeds, self._eval_batches = store, range(seeds), eval_batches

    def row(self, cell: Cell, workload: Workload) -> Row:
        found = self._store.find(cell)
        if found is None:
            found = trained(cell, workload, self._eval_batches)
            self._store.add(found)
            print(f"{cell.key}: test loss {found['test_loss']:.4f}", file=sys.stderr, flush=True)
        return found

    def losses(self, workload: Workload, names: Sequence[str], lr_factor: float, steps: int) -> dict[str, list[Row]]:
        """A row for each seed of each method. All methods get their first seed before any gets its second."""
        for seed in self._seeds:
            for name in names:
                self.row(Cell(workload.name, name, seed, lr_factor, steps), workload)
        return {
            name: [self.row(Cell(workload.name, name, seed, lr_factor, steps), workload) for seed in self._seeds]
            for name in names
        }

    def best_factor(self, workload: Workload, factors: Sequence[float], steps: int) -> float:
        """AdamW32's, on the validation split with the first seed."""
        cells = [Cell(workload.name, REFERENCE, 0, factor, steps) for factor in factors]
        return min(cells, key=lambda cell: self.row(cell, workload)["validation_loss"]).lr_factor


def with_length(length: float) -> str:
    return f"muon-8 else adamw-32; update_rms={length:g}"


def with_coefficients(coefficients: Coefficients) -> str:
    return f"muon-32 else adamw-32; newton_schulz={coefficients}"


# ---- the page ----


def coefficients_part(trainings: Trainings, workload: Workload, lr_factor: float, steps: int) -> list[str]:
    names = {name: with_coefficients(CANDIDATES[name]) for name in TRAINED}
    rows = trainings.losses(workload, list(names.values()), lr_factor, steps)
    gaussian = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    default, times = (
        rows[names["You Jiacheng x5"]],
        {name: seconds(gaussian, each) for name, each in CANDIDATES.items()},
    )
    lines = [
        [
            name,
            f"{deviation(log_spaced(), coefficients):.3f}",
            f"{deviation(gaussian, coefficients):.3f}",
            f"{times[name] / times['You Jiacheng x5']:.2f}",
            *_losses(rows[names[name]] if name in names else [], default),
        ]
        for name, coefficients in CANDIDATES.items()
    ]
    header = ["Coefficients", "Log-spaced", "Gaussian", "Time", "Test loss", "Difference (%)"]
    return [
        "## Newton-Schulz coefficients",
        "",
        "RMS distance from one of singular values that were spread from 1 down to 1e-3 (256 x 256), and of a Gaussian",
        "matrix's (256 x 1024); time for the latter, relative to the first line; test loss with `muon-32 else",
        f"adamw-32` on {workload.name}, {steps} steps at {lr_factor:g} times its lr, and its difference to the first",
        "line's.",
        "",
        *markdown.table(header, lines, numbers=True),
    ]


def lengths_part(
    trainings: Trainings, settings: Iterable[tuple[Workload, float, int]]
) -> tuple[list[str], Mapping[str, Sequence[Row]]]:
    """The table, and AdamW32's rows by workload; ``settings`` has the lr factor and the steps of each."""
    methods_of = {REFERENCE: "AdamW32", **{with_length(length): f"{length:g}" for length in LENGTHS}}
    found, told = {}, []
    for workload, factor, steps in settings:
        found[workload.name] = trainings.losses(workload, list(methods_of), factor, steps)
        told.append(f"{workload.name} {steps} steps at {factor:g} times its lr")
    lines = [
        [label, *(cell for rows in found.values() for cell in _losses(rows[method], rows[REFERENCE]))]
        for method, label in methods_of.items()
    ]
    header = ["update_rms", *(title for name in found for title in (name, "Difference (%)"))]
    text = [
        "## update_rms",
        "",
        f"The RMS of a normalised update in units of lr; the default is {UPDATE_RMS.default:g}. Test loss with `muon-8",
        "else adamw-32`, and its difference to AdamW32's, at the learning rate that is best for AdamW32:",
        "",
        *(f"- {line}" for line in told),
        "",
        *markdown.table(header, lines, numbers=True),
    ]
    return text, {name: rows[REFERENCE] for name, rows in found.items()}


def moved_part(found: Mapping[str, Sequence[Row]]) -> list[str]:
    lines = []
    for name, rows in found.items():
        by_step = [{int(step): value for step, value in row["moved"].items()} for row in rows]
        last = max(by_step[0])
        means = [statistics.fmean(each[min(step, last)] for each in by_step) for step in (*LOOKED_AT, last)]
        lines.append([name, *(f"{mean:.2f}" for mean in means)])
    return [
        "## AdamW32's own updates",
        "",
        "RMS of the change of hidden matrices in units of lr, decay included, in the runs above.",
        "",
        *markdown.table(["Workload", *(f"step {step}" for step in LOOKED_AT), "last step"], lines, numbers=True),
    ]


def _losses(rows: Sequence[Row], others: Sequence[Row]) -> list[str]:
    losses, theirs = ([row["test_loss"] for row in each] for each in (rows, others))
    differences = [] if rows is others else [100 * (ours / other - 1) for ours, other in zip(losses, theirs)]
    return [estimate(losses, ".3f"), estimate(differences, "+.1f")]


def page(arguments: argparse.Namespace, command: str) -> str:
    options = workloads.Options(data=arguments.data, length=arguments.length)
    names = arguments.workload or ["gpt-small/alpaca", "llama-small/gsm8k"]
    with Store(arguments.output).writing("normalised") as store:
        trainings = Trainings(store, arguments.seeds, arguments.eval_batches)

        def settings() -> Iterator[tuple[Workload, float, int]]:
            for name in names:
                yield workloads.get(name, options), arguments.lr_factor, arguments.steps
            if arguments.fine_tuning:
                workload = fine_tuning(options, arguments.steps_before)
                factor = trainings.best_factor(workload, FINE_TUNING_FACTORS, arguments.fine_tuning)
                yield workload, factor, arguments.fine_tuning

        lengths, of_adamw32 = lengths_part(trainings, settings())
        first = workloads.get(names[0], options)
        coefficients = coefficients_part(trainings, first, arguments.lr_factor, arguments.steps)
    title = ["# Constants of normalised mechanisms", "", f"Made by `{command}`.", "", _about(arguments)]
    return "\n\n".join("\n".join(part) for part in (title, lengths, moved_part(of_adamw32), coefficients)) + "\n"


def _about(arguments: argparse.Namespace) -> str:
    text = f"Mean ± standard error over {arguments.seeds} seeds; differences are taken seed by seed."
    if arguments.fine_tuning:
        factors = ", ".join(f"{factor:g}" for factor in FINE_TUNING_FACTORS)
        text += (
            f"\n{FINE_TUNED} fine-tunes a model that AdamW32 trained for {arguments.steps_before} steps. Its learning"
            f"\nrate is the best for AdamW32 of {factors} times the workload's, on the validation split with seed 0."
        )
    return text


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", help="repeatable (default: gpt-small/alpaca, llama-small/gsm8k)")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--eval-batches", type=int, default=20)
    parser.add_argument("--lr-factor", type=float, default=1.0, help="on the workloads' lr, the best for AdamW32")
    parser.add_argument("--fine-tuning", type=int, default=60, metavar="STEPS", help="0: none (default: %(default)s)")
    parser.add_argument("--steps-before", type=int, default=200, help="of AdamW32, before the fine-tuning")
    parser.add_argument("--length", type=int, help="of sequences, in tokens, instead of the workload's")
    parser.add_argument("--data", help="has alpaca/ and gsm8k/ (default: $BAOC_DATA, or the hub)")
    parser.add_argument("--output", type=Path, required=True, help="a folder for the runs; the page is OUTPUT.md")
    arguments = parser.parse_args(argv)
    given = sys.argv[1:] if argv is None else argv
    print(write_page(arguments.output, page(arguments, shlex.join(["python", "-m", "experiments.normalised", *given]))))


if __name__ == "__main__":
    main()

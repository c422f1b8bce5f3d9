"""The order of the runs: learning rates with the first seed, then the other seeds at the best."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.epfl import source
from experiments.runs import Row, Store

REFERENCE = "adamw"
BUDGETS = ("auto", "0.25", "0.05")
OURS = tuple(f"baoc@{budget}" for budget in BUDGETS)
PROTOCOL = (
    *("--n_layer=2", "--n_head=4", "--n_embd=128", "--sequence_length=256"),
    *("--dataset=shakespeare-char", "--device=cpu", "--vocab_size=96"),
)
"""The command for a CPU in their README; all else is as in their ``src/config/base.py``."""
ITERATIONS, WARM_UP, BATCH = 200, 40, 8
CUT = (f"--iterations={ITERATIONS}", f"--warmup_steps={WARM_UP}", f"--batch_size={BATCH}")
"""Theirs: 15000, 3000 and 50. The warm-up is the same fifth."""
QUIET = ("--eval_interval=1000000", "--eval_batches=1", "--log_interval=0")
"""Evaluate at the end only, which is on all of the validation data."""
THEIRS = {
    REFERENCE: (),
    "d-muon": ("--momentum=0.95", "--nesterov=True"),
    "soap": ("--beta2=0.999",),
    "adopt": ("--beta2=0.999",),
}
"""Their optimizers, with what their scripts/124m set beside the defaults, if it does not depend on the length."""
BASE_LR, FACTOR = 1e-3, 3.0
"""Their default learning rate, and the factor between neighbours of the grid."""
GRID = (0, 1, 2)
MOST_BEYOND = 3
DATA_SEED = 1337


@dataclass(frozen=True)
class Run:
    """What identifies a run.

    >>> Run("baoc@0.25", seed=1, rung=1).key
    'baoc@0.25 seed=1 lr=0.003 iterations=200'
    """

    opt: str
    seed: int
    rung: int
    """The learning rate is the default times three to the power of this."""

    @property
    def key(self) -> str:
        return f"{self.opt} seed={self.seed} lr={self.lr:.3g} iterations={ITERATIONS}"

    @property
    def lr(self) -> float:
        return BASE_LR * FACTOR**self.rung

    @property
    def arguments(self) -> list[str]:
        """What their command line takes."""
        seeds = (f"--seed={self.seed}", f"--data_seed={DATA_SEED + self.seed}")
        return [*PROTOCOL, *CUT, *QUIET, *THEIRS.get(self.opt, ()), *seeds, f"--lr={self.lr:.6g}"]


class Results:
    """Finished runs by optimizer, learning rate and seed."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = {(row["opt"], row["rung"], row["seed"]): row for row in rows if row["iterations"] == ITERATIONS}

    def of(self, opt: str, rung: int) -> list[Row]:
        """Return the runs of an optimizer at a learning rate, by seed."""
        return [row for (name, at, _), row in sorted(self.rows.items()) if (name, at) == (opt, rung)]

    def tried(self, opt: str) -> dict[int, float]:
        """Return the loss of the first seed by learning rate."""
        return {rung: row["loss"] for (name, rung, seed), row in sorted(self.rows.items()) if (name, seed) == (opt, 0)}

    def best_rung(self, opt: str) -> int | None:
        """Return the best learning rate with the first seed; None if none was tried."""
        tried = self.tried(opt)
        return min(tried, key=tried.__getitem__, default=None)

    def is_tuned(self, opt: str) -> bool:
        """Return whether the best learning rate is inside the grid that was tried."""
        return self.best_rung(opt) is not None and not self.beyond(opt)

    def beyond(self, opt: str) -> list[int]:
        """Return the neighbour of the best learning rate that was not tried yet."""
        best = self.best_rung(opt)
        return [] if best is None else [rung for rung in (best - 1, best + 1) if rung not in self.tried(opt)]


def run(folder: Path, text: Path, seeds: int, store: Store) -> None:
    """Train what is missing, the most telling first. The store is open for writing."""
    torch.set_num_threads(1)
    module = source.load(folder, {name: source.budgeted(_memory(name)) for name in OURS})

    def train(runs: Sequence[Run]) -> None:
        for one in runs:
            if one.key not in {row["key"] for row in store.rows}:
                store.add(_trained(module, text, one))

    def tuned(opt: str, rungs: Sequence[int]) -> None:
        train([Run(opt, 0, rung) for rung in rungs])
        for _ in range(MOST_BEYOND):
            train([Run(opt, 0, rung) for rung in Results(store.rows).beyond(opt)])

    tuned(REFERENCE, GRID)
    best = Results(store.rows).best_rung(REFERENCE)
    assert best is not None
    train([Run(opt, seed, best) for seed in range(seeds) for opt in (REFERENCE, *OURS)])
    for opt in ("d-muon", *OURS, "soap", "adopt"):
        tuned(opt, (best,))
        own = Results(store.rows).best_rung(opt)
        train([Run(opt, seed, own) for seed in range(seeds) if own is not None])


def _trained(module: object, text: Path, one: Run) -> Row:
    started = time.process_time()
    found = source.run(module, text, one.opt, one.arguments)
    seconds = round(time.process_time() - started, 1)
    print(f"{one.key}: loss {found.loss:.4f}, {seconds:.0f} s", file=sys.stderr, flush=True)
    row: Row = {"key": one.key, "opt": one.opt, "seed": one.seed, "rung": one.rung, "lr": one.lr}
    row |= {"iterations": ITERATIONS, "loss": found.loss, "accuracy": found.accuracy, "seconds": seconds}
    return row | {"state_bytes": found.state_bytes, "parameters": found.parameters}


def _memory(name: str) -> str | float:
    budget = name.partition("@")[2]
    return budget if budget == "auto" else float(budget)

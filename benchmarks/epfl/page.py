"""The page: what beats our plans first, then their optimizers and ours side by side."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baoc.core.text import human_count
from benchmarks.epfl.running import (
    BATCH,
    DATA_SEED,
    FACTOR,
    ITERATIONS,
    OURS,
    PROTOCOL,
    REFERENCE,
    THEIRS,
    WARM_UP,
    Results,
)
from experiments.finetune.page import told
from experiments.finetune.results import Difference, difference
from experiments.runs import Row, markdown
from experiments.runs.page import estimate

ABOUT = """\
[Their code](https://github.com/epfml/llm-optimizer-benchmark) (Semenov, Pagliardini, Jaggi:
[Benchmarking Optimizers for Large Language Model Pretraining](https://arxiv.org/abs/2509.01440)) and the command for a
CPU in their README: a Llama of {parameters} parameters on the characters of tiny Shakespeare, 80% for training. The
model, its initialization, the data, the schedule (one cycle with a cosine, from a hundredth of the peak and back), the
clipping (1), the weight decay (0.1, not on norms and the table of tokens), betas and the evaluation are theirs.

**What was cut:** {iterations} iterations instead of 15,000, {warm} of warm-up instead of 3,000 (the same fifth), and
batches of {batch} x 256 characters instead of 50 x 256: {tokens} characters instead of 192 million. What holds in so
short a run need not hold in long ones. **What was added:** one branch in `src/main.py` that makes our optimizer of
their param groups, with their lr, betas and weight decay; where `wandb` and `tiktoken` are absent, which they import
and do not need here, empty packages; and "cpu" where their `d-muon` asks for the GPU. `d-muon`, `soap` and `adopt`
have the settings of their `scripts/124m` beside the defaults: {settings}.

Learning rates are a factor of {factor:g} apart, tried with the first seed and extended until the best is inside; as
in their benchmark, the validation loss chooses and is reported. It is of all validation batches after the last
iteration. Seeds (`--seed` and `--data_seed`, from {data_seed} on) are paired: *difference* is the mean of the
differences to AdamW at its own best learning rate, in percent of the loss, ± its standard error. *Bytes* are of
optimizer state, per parameter."""

COMMAND = "python -m benchmarks.epfl --source DIR --text FILE --output docs/results/epfl"


@dataclass(frozen=True)
class Line:
    """An optimizer at a learning rate."""

    opt: str
    rows: list[Row]
    found: Difference | None

    @property
    def loss(self) -> float:
        return statistics.fmean(row["loss"] for row in self.rows)


def text(rows: Iterable[Row]) -> str:
    """Return the page of what is there, without what is written by hand."""
    results = Results(rows)
    best = results.best_rung(REFERENCE)
    if best is None:
        return "# The EPFL benchmark\n\nThere are no runs of AdamW yet.\n"
    reference = results.of(REFERENCE, best)
    about = ABOUT.format(
        parameters=human_count(reference[0]["parameters"]),
        iterations=ITERATIONS,
        warm=WARM_UP,
        batch=BATCH,
        tokens=human_count(ITERATIONS * BATCH * 256),
        settings="; ".join(f"`{name} {' '.join(added)}`" for name, added in THEIRS.items() if added),
        factor=FACTOR,
        data_seed=DATA_SEED,
    )
    same = _lines(results, dict.fromkeys((REFERENCE, *OURS), best), reference)
    tuned = [opt for opt in (*THEIRS, *OURS) if results.is_tuned(opt)]
    own = _lines(results, {opt: results.best_rung(opt) for opt in tuned}, reference)
    parts = ["# The EPFL benchmark", "", about, "", f"Made by `{COMMAND}`; their arguments are `{' '.join(PROTOCOL)}`."]
    parts += ["", *_lost(same, own), "", "## At AdamW's best learning rate", "", *_table(same)]
    parts += ["", "## Each at its own best learning rate", "", *_table(own), "", *_grids(results)]
    if left := ", ".join(f"`{opt}`" for opt in (*THEIRS, *OURS) if opt not in tuned):
        parts += ["", f"Not tuned yet, so left out of what is at its own best: {left}."]
    return "\n".join([*parts, ""])


def _lines(results: Results, rungs: dict[str, int | None], reference: Sequence[Row]) -> list[Line]:
    lines = []
    for opt, rung in rungs.items():
        rows = [] if rung is None else results.of(opt, rung)
        if rows:
            lines.append(Line(opt, rows, difference(_as_scores(rows), _as_scores(reference))))
    return lines


def _as_scores(rows: Sequence[Row]) -> list[Row]:
    return [{"seed": row["seed"], "test": {"loss": row["loss"]}} for row in rows]


def _lost(same: Sequence[Line], own: Sequence[Line]) -> list[str]:
    """Where ours are worse than AdamW, and what of theirs is better than ours."""
    said = [
        f"- `{line.opt}` is worse than AdamW at AdamW's learning rate: {told(line.found)}%."
        for line in same
        if line.opt in OURS and line.found and line.found.percent > 0
    ]
    for mine in (line for line in own if line.opt in OURS):
        for theirs in (line for line in own if line.opt not in OURS):
            beyond = difference(_as_scores(mine.rows), _as_scores(theirs.rows))
            if beyond and beyond.percent > 0:
                said.append(f"- `{theirs.opt}` is better than `{mine.opt}`, each at its best: {told(beyond)}%.")
    return ["## What loses", "", *(said or ["None of our plans has a higher loss than AdamW or one of the others."])]


def _table(lines: Sequence[Line]) -> list[str]:
    header = ["Optimizer", "lr", "Bytes", "Validation loss", "Accuracy (%)", "Difference (%)", "Seeds", "Seconds"]
    cells = []
    for line in sorted(lines, key=lambda one: one.loss):
        rows = line.rows
        scores = [estimate([row["loss"] for row in rows], ".4f")]
        scores += [estimate([100 * row["accuracy"] for row in rows], ".1f"), told(line.found)]
        name = f"**`{line.opt}`**" if line.opt in OURS else f"`{line.opt}`"
        held = f"{rows[0]['state_bytes'] / rows[0]['parameters']:.2f}"
        seconds = f"{statistics.fmean(row['seconds'] for row in rows):.0f}"
        cells.append([name, f"{rows[0]['lr']:.2g}", held, *scores, str(len(rows)), seconds])
    about = "Ours are bold; the best is first. Seconds are CPU time of a run with its evaluation, on one thread."
    return [about, "", *markdown.table(header, cells, numbers=True)]


def _grids(results: Results) -> list[str]:
    said = []
    for opt in (*THEIRS, *OURS):
        row = {rung: results.of(opt, rung)[0]["lr"] for rung in results.tried(opt)}
        if row:
            values = (f"{row[rung]:.2g}: {loss:.4f}" for rung, loss in results.tried(opt).items())
            said.append(f"- `{opt}`: {', '.join(values)}")
    return ["Losses of the first seed by learning rate:", "", *said]

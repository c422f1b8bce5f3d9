"""The page of an experiment whose methods are compared twice: at AdamW32's learning rate, and each at its own."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path

from baoc import ConfigurationError, parse
from baoc.core.roles import Role
from baoc.core.text import human_count
from experiments import workloads
from experiments.runs import markdown
from experiments.runs.catalog import Experiment
from experiments.runs.cell import Row
from experiments.runs.store import Store
from experiments.runs.summary import REFERENCE, Line, summarise
from experiments.runs.tables import EDGE

READING = "## Reading"
"""From here to its end a page is written by hand."""

_ABOUT = """\
Each line is one configuration for the whole model. *Embeddings* is what embeddings and heads had: not every mechanism
suits them. *B/param* is the state that was held, in bytes per parameter. *Step* is a training step in milliseconds,
then the optimizer's part of it, in the fastest run. *Loss* is the test loss, mean ± standard error over n seeds.
*Difference* is to AdamW32's test loss in percent, mean ± standard error of the differences seed by seed: runs of one
seed begin with the same weights and see the same batches.

First come the scores at one learning rate for all, the best for AdamW32: of {grid} times the workload's, by the mean
validation score (perplexity, accuracy or loss) of all seeds. Then those at the configuration's own, the best of the
same three by the validation score with seed 0; {edge}: it is at the edge of this grid; -: not all of it was tried."""

_HEADER = [
    *("Configuration", "Embeddings", "B/param", "Step (ms)"),
    *("Loss at AdamW32's lr", "Difference (%)", "n", "Own lr", "Loss at its own lr", "Difference (%)", "n"),
]


def write(store: Store, experiment: Experiment) -> Path:
    """The page of the runs that are there."""
    return write_page(store.folder, text(store, experiment))


def write_page(folder: Path, text: str) -> Path:
    """A page beside a folder of runs, with its name. What a person wrote at the end of an older one stays."""
    path = folder.parent / f"{folder.name}.md"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    _, heading, reading = old.partition(READING)
    path.write_text(text + (f"\n{heading}{reading}" if heading else ""), encoding="utf-8")
    return path


def text(store: Store, experiment: Experiment) -> str:
    """All but the reading; methods in the experiment's order, others after them."""
    order = {name: place for place, name in enumerate(experiment.methods)}
    own, common = summarise(store.rows), summarise(_at_one_lr(store.rows))
    grid = store.rows[0]["lr_grid"]
    about = _ABOUT.format(grid=", ".join(f"{factor:g}" for factor in grid), edge=EDGE)
    commands = [_command(lines[0], store.folder) for lines in own.values()]
    parts = [f"# {experiment.title}", "", about, "", "```sh", *commands, "```"]
    for workload, lines in common.items():
        by_method = {line["method"]: line for line in own[workload]}
        ordered = sorted(lines, key=lambda line: order.get(line["method"], len(order)))
        rows = [_row(line, by_method[line["method"]]) for line in ordered]
        parts += ["", f"## {workload}", "", _setting(lines[0]), "", *markdown.table(_HEADER, rows, numbers=True)]
    return "\n".join([*parts, ""])


def _at_one_lr(rows: Sequence[Row]) -> list[Row]:
    """The runs at the learning rate that is best for AdamW32, as if no other had been tried."""
    best = {
        name: line["lr_factor"]
        for name, lines in summarise(rows).items()
        for line in lines
        if line["method"] == REFERENCE
    }
    return [{**row, "lr_grid": [row["lr_factor"]]} for row in rows if row["lr_factor"] == best.get(row["workload"])]


def _command(line: Line, output: Path) -> str:
    options = {"steps": line["steps"], **{name: line["settings"][name] for name in ("batch_size", "eval_batches")}}
    words = ["python", "-m", "experiments", "states", "--workload", line["workload"]]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
    return shlex.join([*words, "--output", str(output)])


def _setting(line: Line) -> str:
    batch = line["settings"]["batch_size"] or workloads.get(line["workload"]).batch_size
    parameters, lr = human_count(line["parameters"]), f"{line['lr']:.2g} ({line['lr_factor']:g} times the workload's)"
    return f"{parameters} parameters, {line['steps']} steps of {batch} examples; AdamW32's lr is {lr}."


def _row(common: Line, own: Line) -> list[str]:
    held = statistics.fmean(row["state_bytes"] / row["parameters"] for row in common.rows)
    name = str(common["label"]) if common["method"] == REFERENCE else f"`{common['label']}`"
    factor = f"x{own['lr_factor']:g}{EDGE if own.at_edge else ''}"
    at_own = [factor, *_scores(own)] if own.is_tuned else ["-"] * 4
    return [name, _of_embeddings(common["method"]), f"{held:.2f}", _times(common.rows), *_scores(common), *at_own]


def _of_embeddings(method: str) -> str:
    """The same for every shape of two dims.

    >>> _of_embeddings("muon-8 else adamw[m=int4,v=factored]"), _of_embeddings("sinkhorn-8"), _of_embeddings("adamw32")
    ('adamw[m=int4,v=factored]', 'sinkhorn-8', 'adamw-32')
    """
    try:
        return parse(method).suited((1024, 128), Role.EMBEDDING).alias
    except ConfigurationError:  # not one of ours
        return ""


def _times(rows: Sequence[Row]) -> str:
    whole = min(row["seconds"] / row["steps"] for row in rows)
    return f"{1e3 * whole:.0f}, {1e3 * min(row['step_seconds'] for row in rows):.1f}"


def _scores(line: Line) -> list[str]:
    differences = [100 * (ours / theirs - 1) for ours, theirs in line.pairs("test_loss")]
    losses = [row["test_loss"] for row in line.trained]
    return [estimate(losses, ".3f"), estimate(differences, "+.1f"), str(len(losses))]


def estimate(values: Sequence[float], digits: str) -> str:
    """Mean and standard error, as text.

    >>> estimate([1.0, 2.0, 3.0], ".3f"), estimate([2.0], "+.1f"), estimate([], ".3f")
    ('2.000 ± 0.577', '+2.0', '-')
    """
    if not values:
        return "-"
    error = f" ± {statistics.stdev(values) / math.sqrt(len(values)):{digits[-3:]}}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{digits}}{error}"

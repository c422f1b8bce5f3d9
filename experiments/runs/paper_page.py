"""The page of all of the paper's experiments: what the paper says, what we see, and whether both say the same."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.runs import markdown
from experiments.runs.catalog import PAPER, Experiment
from experiments.runs.claims import CLAIMS, Claim, Lines, Seen
from experiments.runs.figures import can_draw
from experiments.runs.page import write_page
from experiments.runs.report import in_order, overview_table
from experiments.runs.store import Store
from experiments.runs.summary import Line, summarise

_ABOUT = """\
*BAOC (paper)* is `PaperPlanner`, *baoc default* is `EffectPlanner(time=2)`; *Heu-1* and *Heu-2* are heuristics of
ours, since the paper does not define its own. Each section has what the paper says about an experiment, what the runs
here show, and whether both say the same; what differs comes first. Differences are of the test score (for diffusion
the training loss, as in the paper), seed by seed, mean ± standard error in percent, for accuracies in points. Less
than two standard errors, or than half a percent, is no difference. Then come all methods: test score, in brackets its
difference to AdamW16's (mean ± standard deviation), and the state held in percent of AdamW16's. §: no plan fits the
budget after the warm-up, so training stays on AdamW16.
[How to run it](../experiments.md)."""


def write(root: Path) -> Path:
    """Write the page beside the folder, with its name. What a person wrote under ``## Reading`` stays."""
    parts = ["# The paper's experiments", "", _ABOUT]
    for name, experiment in PAPER.items():
        if (root / name / "runs.jsonl").exists():
            parts += ["", *_section(Store(root / name), experiment, root.name)]
    return write_page(root, "\n".join([*parts, ""]))


def _section(store: Store, experiment: Experiment, root: str) -> list[str]:
    results = in_order(summarise(store.rows, experiment.reference), experiment)
    answers = sorted((_answer(claim, results) for claim in CLAIMS[experiment.name]), key=lambda answer: answer[0])
    rows = [row for _, row in answers if row]
    folder = f"{root}/{experiment.name}"
    links = [f"[table]({folder}/table.md)", f"[plans]({folder}/choices.md)"]
    parts = [
        f"## {experiment.title}",
        "",
        f"{', '.join(links)}.",
        "",
        "```sh",
        *_commands(results, experiment),
        "```",
        "",
    ]
    if rows:
        parts += [*markdown.table(["The paper says", "Here", "Same"], rows), ""]
    parts += overview_table(results)
    if experiment.figure and can_draw():
        parts += ["", f"![{experiment.title}]({folder}/{experiment.figure}.png)"]
    return parts


def _answer(claim: Claim, results: Mapping[str, Sequence[Line]]) -> tuple[float, list[str]]:
    """The share of workloads that agree, and the row; no row if none can be asked."""
    seen: dict[str, Seen] = {}
    for workload, lines in results.items():
        by_key: Lines = {(line["method"], line["variant"]): line for line in lines}
        if found := claim.look(by_key):
            seen[workload] = found
    if not seen:
        return 0.0, []
    agreeing = sum(one.agrees for one in seen.values())
    told = "; ".join(f"{workload} {one.text}" for workload, one in seen.items())
    verdict = {0: "no", len(seen): "yes"}.get(agreeing, f"on {agreeing} of {len(seen)}")
    return agreeing / len(seen), [claim.says, told, verdict]


def _commands(results: Mapping[str, Sequence[Line]], experiment: Experiment) -> list[str]:
    """What to type for the same runs; where data and models lie is no part of it. Equal ones come once."""
    commands: dict[tuple[str, ...], list[str]] = {}
    for workload, lines in results.items():
        first = lines[0]
        words = ["--steps", str(first["steps"]), "--seeds", str(max(len(line.rows) for line in lines))]
        words += [] if len(first["lr_grid"]) > 1 else ["--no-tuning"]
        for name in ("batch_size", "length", "pretrained", "eval_batches"):
            if (value := first["settings"][name]) is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        if {line["method"] for line in lines} != {*experiment.methods}:
            words += [word for name in dict.fromkeys(line["method"] for line in lines) for word in ("--method", name)]
        commands.setdefault(tuple(words), []).extend(["--workload", workload])
    start = ["python", "-m", "experiments", "paper", experiment.name]
    return [shlex.join([*start, *workloads, *words]) for words, workloads in commands.items()]

"""What the methods with a budget chose: how much of the model got which configuration, and which block got what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from baoc import parse
from experiments.runs import markdown
from experiments.runs.summary import Line


def text(results: Mapping[str, Sequence[Line]]) -> str | None:
    """Tables of the plans of every workload; None if no method had a budget."""
    parts = []
    for workload, lines in results.items():
        planned = [line for line in lines if "@" in line["method"] and _plans(line)]
        if planned:
            parts += ["", f"## {workload}", "", *_shares_table(planned)]
            for line in planned:
                parts += ["", f"### {line['label']}", "", *_blocks_table(line)]
    if not parts:
        return None
    about = "Percent of the parameters, mean over seeds; then the blocks of each seed, with what they got."
    return "\n".join(["# Choices", "", about, *parts, ""])


def shares(line: Line) -> dict[str, float]:
    """Which share of the parameters a configuration got, mean over seeds, the largest first."""
    plans = _plans(line)
    total: Counter[str] = Counter()
    for plan in plans.values():
        for configuration, share in plan["shares"].items():
            total[parse(configuration).alias] += share / len(plans)
    return dict(total.most_common())


def _shares_table(lines: Sequence[Line]) -> list[str]:
    by_line = [shares(line) for line in lines]
    names = dict.fromkeys(name for found in by_line for name in found)
    header = ["Method", *names]
    rows = [
        [str(line["label"]), *(f"{100 * found[name]:.1f}" if name in found else "" for name in names)]
        for line, found in zip(lines, by_line)
    ]
    return markdown.table(header, rows)


def _blocks_table(line: Line) -> list[str]:
    """Seeds that cut the model alike share their rows."""
    plans = _plans(line)
    cuts: dict[tuple[str, ...], list[int]] = {}
    for seed, plan in plans.items():
        cuts.setdefault(tuple(plan["blocks"]), []).append(seed)
    rows = []
    for blocks, seeds in cuts.items():
        for block in blocks:
            chosen = dict.fromkeys(parse(plans[seed]["blocks"][block]).alias for seed in seeds)
            rows.append([", ".join(map(str, seeds)), f"`{block}`", " or ".join(chosen)])
    return markdown.table(["Seeds", "Block", "Configuration"], rows)


def _plans(line: Line) -> dict[int, dict[str, dict[str, object]]]:
    return {row["seed"]: row["plan"] for row in line.trained if row["plan"]}

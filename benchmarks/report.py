"""Measures everything and writes the page about it; or writes the page again from the numbers of an earlier run.

    python -m benchmarks.report --output docs/results/performance.md [--quick]
    python -m benchmarks.report --output docs/results/performance.md --from docs/results/performance.json

Beside the page go the figure (.png) and all numbers (.json). The numbers are saved after each part, so a run that is
stopped keeps what it has.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import figure, machine, targets
from benchmarks.rows import PEERS

Results = dict[str, Any]

SECTIONS = {
    "step": (
        "The optimizer's step",
        "All optimizers share their parameters and gradients and take turns in every round, so a slow moment of the "
        "machine hits all alike. Values are medians over up to {repeats} rounds, with quartiles; slow optimizers take "
        "part in fewer rounds. *x torch fused* is the ratio to torch's fused AdamW within a round. *B/param* is what a "
        "step must read and write at the least (the rule is in `benchmarks/traffic.py`), *bandwidth* how much of the "
        "measured memory bandwidth that comes to; it can exceed 100% where tensors stay in a cache. *extra peak* is "
        "how far the process grows in a step. Where a row uses much "
        "less than the bandwidth, arithmetic bounds it: on a machine with faster memory its ratio is larger.",
    ),
    "solve": (
        "Solving for a plan",
        "`baoc.solve` and HiGHS on the same instances, both on one thread. *gap* is the proven relative distance to "
        "the optimum.",
    ),
    "planning": ("Planning", "How long the default planner takes. Medians, with the smallest and the largest."),
    "statistics": (
        "Gradient statistics",
        "What the warm-up of the paper's planner adds to a training step, and the memory of its samples.",
    ),
}
LOUD = 0.05  # share of the processors' time that others may take before the page warns of it


class ReportError(ValueError):
    """Something that the report cannot be made from."""


def measure(quick: bool, command: str, save_to: Path) -> Results:
    """Run all parts, one after the other, saving after each."""
    results: Results = {"command": command, "quick": quick, "machine": machine.describe((*PEERS, "highspy"))}
    for part in SECTIONS:
        print(f"== {part}", file=sys.stderr, flush=True)
        results[part] = _benchmark(part).run(quick=quick)
        save_to.write_text(json.dumps(results, indent=1) + "\n")
    return results


def load(path: Path) -> Results:
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ReportError(f"cannot read {path}: {error}") from error
    if not isinstance(results, dict) or "command" not in results or "machine" not in results:
        raise ReportError(f"{path} does not hold results of this report: it has no 'command' or no 'machine'.")
    return results


def page(results: Results, picture: str | None, numbers: str) -> str:
    """The page, with every number from the results."""
    parts = ["# Performance", _made_by(results, numbers), _machine(results)]
    verdicts = _verdicts(results)
    if verdicts:
        parts.append(_targets(verdicts))
    if picture is not None:
        titles = "; ".join(f"{panel.y_label} against {panel.x_label}" for panel in figure.panels(results))
        parts.append(f"![{titles}]({picture})")
    for part, (title, text) in SECTIONS.items():
        if part in results:
            content = _benchmark(part).table(results[part])
            parts.append(f"## {title}\n\n{text.format_map(results[part])}\n\n```text\n{content}\n```")
    return "\n\n".join(parts) + "\n"


def _benchmark(part: str) -> Any:
    return importlib.import_module(f"benchmarks.{part}")


def _made_by(results: Results, numbers: str) -> str:
    quick = " This was a quick run, with few repeats." if results.get("quick") else ""
    return f"Made by `{results['command']}`; all numbers are in [{numbers}]({numbers}).{quick}"


def _machine(results: Results) -> str:
    about = results["machine"]
    versions = {"torch": about["torch"], **about["packages"]}
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = ", ".join(name for name, version in versions.items() if not version)
    text = (
        f"Machine: {about['processor']}, {about['cores']} cores, {about['threads']} threads. Python {about['python']}, "
        f"{installed}."
    )
    if missing:
        text += f" Not installed: {missing}."
    watched = [*results.get("step", {}).get("workloads", {}).values(), results.get("statistics", {})]
    others = max(each.get("other_load") or 0.0 for each in watched)
    if others > LOUD:
        text += (
            f" **Other processes took up to {others:.1%} of the processors' time, too much for times to be trusted: "
            "measure again on a quiet machine.**"
        )
    return text


def _verdicts(results: Results) -> list[targets.Verdict]:
    """Return the targets of all parts that were measured. Those of planning and statistics come judged."""
    own = targets.judge(results["step"]) if "step" in results else []
    judged = [
        targets.Verdict(
            target["what"],
            f"<= {target['limit']:g} {target['unit']}",
            f"{target['measured']:.3g} {target['unit']}",
            target["outcome"],
        )
        for part in ("planning", "statistics")
        for target in results.get(part, {}).get("targets", ())
    ]
    return [*own, *judged]


def _targets(verdicts: Sequence[targets.Verdict]) -> str:
    lines = [
        f"## Targets\n\n{targets.summary(verdicts)}.\n",
        "| target | limit | measured | outcome |",
        "|---|---|---|---|",
    ]
    for verdict in verdicts:
        outcome = verdict.outcome if verdict.outcome == targets.PASS else f"**{verdict.outcome}**"
        lines.append(f"| {verdict.what} | {verdict.limit} | {verdict.measured} | {outcome} |")
    return "\n".join(lines)


def _command(output: Path, quick: bool) -> str:
    """What was typed, without the parts of a path that are about this machine."""
    inside = output.resolve().is_relative_to(Path.cwd())
    shown = output.resolve().relative_to(Path.cwd()) if inside else Path(output.name)
    return f"python -m benchmarks.report --output {shown.as_posix()}{' --quick' if quick else ''}"


def _check(output: Path, needed: Sequence[str]) -> None:
    """Raise what would otherwise come after an hour of measuring."""
    if output.suffix != ".md":
        raise ReportError(f"--output is {output}; the name of the page must end in .md.")
    if not output.parent.is_dir():
        raise ReportError(f"there is no folder {output.parent}.")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ReportError(f"the report needs {' and '.join(missing)}: pip install --group bench.")


def write(results: Results, output: Path, numbers: Path) -> None:
    """The page and its figure."""
    content = figure.panels(results)
    picture = output.with_suffix(".png")
    if content:
        figure.draw(content, picture)
    link = os.path.relpath(numbers, output.parent)
    output.write_text(page(results, picture.name if content else None, link))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the page, a Markdown file")
    parser.add_argument("--from", dest="source", type=Path, metavar="JSON", help="numbers of an earlier run")
    parser.add_argument("--quick", action="store_true", help="few repeats, to see that everything works")
    arguments = parser.parse_args()
    output: Path = arguments.output
    numbers = output.with_suffix(".json")
    try:
        _check(output, ("matplotlib",) if arguments.source else ("matplotlib", "highspy"))
        if arguments.source is None:
            results = measure(arguments.quick, _command(output, arguments.quick), numbers)
        else:
            results = load(arguments.source)
            numbers = arguments.source
        write(results, output, numbers)
    except ReportError as error:
        parser.error(str(error))
    print(f"wrote {output}", file=sys.stderr)


if __name__ == "__main__":
    main()

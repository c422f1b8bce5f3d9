"""How long the default planner takes: construction of an optimizer, a plan, and a frontier of plans.

    python -m benchmarks.planning [--quick] [--json]

Models are on the meta device. Imports and the construction of the model are not timed. A time is the median of the
repeats, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from baoc import BAOC, Budget, EffectPlanner, ModelFacts
from baoc.tools.models import MODELS
from benchmarks.machine import describe
from benchmarks.timing import timed

Result = dict[str, Any]

LLAMA = "llama-3.1-8b"
TENSORS = 1_000
MEMORY = 0.13  # binds: hidden matrices do not all fit in what is best for them
POINTS = 40
MOST_SECONDS = {"construction": 0.3, "plan": 1.0, "frontier": 3.0}


def run(quick: bool = False) -> Result:
    """Measure all of it. The result is plain numbers and names."""
    repeats = 3 if quick else 9
    small = many_tensors()
    with torch.device("meta"):
        llama = ModelFacts.of(MODELS[LLAMA]())
    actions: dict[str, tuple[str, Callable[[], object]]] = {
        "construction": (
            f"construction of BAOC for {TENSORS:,} tensors",
            lambda: BAOC(small, memory=0.25, verbose=False),
        ),
        "plan": (f"plan of {LLAMA}", lambda: EffectPlanner().initial_plan(llama, Budget(MEMORY))),
        "frontier": (f"frontier of {POINTS} budgets of {LLAMA}", lambda: frontier(llama)),
    }
    rows = [{"key": key, "what": what, **_spread(action, repeats)} for key, (what, action) in actions.items()]
    return {"machine": describe([]), "repeats": repeats, "rows": rows, "targets": [_target(row) for row in rows]}


def many_tensors(tensors: int = TENSORS, width: int = 64) -> nn.Module:
    """Return a model of many small tensors: linear layers and norms in turn."""
    pairs = (nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(tensors // 4))
    return nn.Sequential(*pairs)


def frontier(model: ModelFacts) -> list[Any]:
    """Return plans for budgets from nothing to all of AdamW16's state."""
    problem = EffectPlanner().problem(model)
    return problem.frontier(np.linspace(0, model.reference_bytes(), POINTS).astype(int).tolist())


def _spread(action: Callable[[], object], repeats: int) -> dict[str, float]:
    first, *seconds = (timed(action) for _ in range(repeats + 1))
    return {"first": first, "median": statistics.median(seconds), "low": min(seconds), "high": max(seconds)}


def _target(row: dict[str, Any]) -> dict[str, Any]:
    limit = MOST_SECONDS[row["key"]]
    outcome = "pass" if row["median"] <= limit else "miss"
    return {"what": row["what"], "measured": row["median"], "limit": limit, "unit": "s", "outcome": outcome}


def table(result: Result) -> str:
    """Return the result as plain text."""
    lines = [f"{'':<44} {'first, s':>9} {'later, s (range)':>24}"]
    for row in result["rows"]:
        later = f"{row['median']:.3f} ({row['low']:.3f}-{row['high']:.3f})"
        lines.append(f"{row['what']:<44} {row['first']:>9.3f} {later:>24}")
    lines.append("")
    lines += [
        f"{target['outcome']:<5} {target['what']}: {target['measured']:.3g} s, limit {target['limit']:g} s"
        for target in result["targets"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="3 repeats instead of 9")
    arguments = parser.parse_args()
    result = run(arguments.quick)
    print(json.dumps(result, indent=2) if arguments.json else table(result))


if __name__ == "__main__":
    main()

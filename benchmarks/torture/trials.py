"""Try random cases of several kinds, and collect what went wrong."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any


def tried(times: int, seed: int, kinds: Sequence[str], attempt: Callable[[str, random.Random], str]) -> dict[str, Any]:
    """Try ``times`` cases, of one kind after the other.

    Args:
        times: how many.
        seed: of the cases.
        kinds: their kinds.
        attempt: tries a case of a kind and returns its outcome. Any error is a finding.

    Returns:
        Counts of outcomes by kind, and the findings.
    """
    outcomes: Counter[str] = Counter()
    wrong: dict[str, str] = {}
    for number in range(times):
        kind = kinds[number % len(kinds)]
        try:
            outcomes[f"{kind}: {attempt(kind, random.Random(f'{seed} {number}'))}"] += 1
        except Exception as error:
            outcomes[f"{kind}: wrong"] += 1
            wrong.setdefault(f"{type(error).__name__}: {str(error)[:400]}", f"{kind}, number {number}")
        print(f"{number + 1} cases, {len(wrong)} findings", end="\r", file=sys.stderr)
    return {
        "cases": times,
        "outcomes": dict(sorted(outcomes.items())),
        "findings": [f"{where}: {error}" for error, where in wrong.items()],
    }

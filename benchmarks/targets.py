"""What the step has to reach, judged from a result of `benchmarks.step`. This is the only place with the limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from baoc.core.text import human_bytes
from benchmarks.rows import BALANCED, BUDGETS, CONFIGURATIONS, FUSED, ITERATED, planned, uniform
from benchmarks.timing import paired_ratio
from benchmarks.workloads import GPT2, SMALL

Record = dict[str, Any]
"""A measured row, as `benchmarks.step` writes it."""

PASS, MISS, UNKNOWN = "pass", "miss", "not measured"


@dataclass(frozen=True)
class Quantity:
    """Something that a row is judged by."""

    value: Callable[[Record, Record], float | None]  # of a row, against another
    show: Callable[[float], str]
    at_least: bool = False

    def meets(self, value: float, limit: float) -> bool:
        return value >= limit if self.at_least else value <= limit

    def worst(self, values: Sequence[float]) -> float:
        return min(values) if self.at_least else max(values)

    def bound(self, limit: float) -> str:
        return f"{'>=' if self.at_least else '<='} {self.show(limit)}"


RATIO = Quantity(lambda row, other: paired_ratio(row["seconds"], other["seconds"])["median"], lambda x: f"{x:.2f}x")
SPEEDUP = Quantity(
    lambda row, other: paired_ratio(other["seconds"], row["seconds"])["median"], lambda x: f"{x:.1f}x", at_least=True
)
FIRST = Quantity(lambda row, other: row["first_seconds"] / other["first_seconds"], lambda x: f"{x:.2f}x")
"""It touches fresh memory, and what that costs is the machine's: torch's own has been 0.3 s and 1.5 s."""
EXTRA = Quantity(lambda row, _: row["extra_peak_bytes"], human_bytes)
MATMUL = Quantity(lambda row, _: row.get("matmul_share"), lambda x: f"{x:.0%}", at_least=True)


@dataclass(frozen=True)
class Target:
    """A limit for the worst of some rows."""

    what: str
    quantity: Quantity
    limit: float
    rows: tuple[str, ...]
    workload: str = GPT2
    against: str = FUSED.name


def _uniform(*configurations: str) -> tuple[str, ...]:
    return tuple(uniform(configuration).name for configuration in configurations)


_ALL = (*_uniform(*CONFIGURATIONS, *BALANCED), *(planned(budget).name for budget in BUDGETS))
_ITERATED = _uniform(*ITERATED)
_EIGHT_BIT = _uniform("adamw-8")

TARGETS = (
    Target("AdamW with bf16 state against torch's fused AdamW", RATIO, 0.8, _uniform("adamw-16")),
    Target("AdamW with int8 state against torch's fused AdamW", RATIO, 0.75, _EIGHT_BIT),
    Target("momentum SGD with int8 state against torch's fused AdamW", RATIO, 0.65, _uniform("sgdm-8", "sgdwm-8")),
    Target(
        "factored AdamW against torch's fused AdamW",
        RATIO,
        0.85,
        _uniform("adamw[m=bf16,v=factored]", "adamw[m=int8,v=factored]"),
    ),
    Target("the plan at half of AdamW16's state against torch's fused AdamW", RATIO, 0.85, (planned(0.5).name,)),
    Target("AdamW with int8 state: faster than torchao's", SPEEDUP, 20, _EIGHT_BIT, against="torchao AdamW8bit"),
    Target(
        "AdamW with int8 state: faster than bitsandbytes'", SPEEDUP, 20, _EIGHT_BIT, against="bitsandbytes AdamW8bit"
    ),
    Target("first step, slowest of ours, against the one of torch's fused AdamW", FIRST, 1.5, _ALL),
    Target("extra peak memory in a step, largest of ours", EXTRA, 16 * 2**20, _ALL),
    Target("extra peak memory of Newton-Schulz iterations", EXTRA, 64 * 2**20, _ITERATED),
    Target("Newton-Schulz iterations: of the rate of matrix products", MATMUL, 0.7, _ITERATED),
    Target(
        "1,000 small tensors, AdamW in 32, 16 and 8 bits against torch's fused AdamW",
        RATIO,
        1.2,
        _uniform("adamw-32", "adamw-16", "adamw-8"),
        SMALL,
    ),
)


@dataclass(frozen=True)
class Verdict:
    """A target beside what was measured."""

    what: str
    limit: str
    measured: str
    outcome: str


def judge(result: dict[str, Any], targets: Sequence[Target] = TARGETS) -> list[Verdict]:
    """Hold a result against the targets. A target is met only if all of its rows were measured and meet it."""
    return [_judge(result, target) for target in targets]


def _judge(result: dict[str, Any], target: Target) -> Verdict:
    quantity = target.quantity
    measured = {row["name"]: row for row in result["workloads"].get(target.workload, {}).get("rows", ())}
    row_and_other = [(measured.get(name), measured.get(target.against)) for name in target.rows]
    values = [
        quantity.value(row, other)
        for row, other in row_and_other
        if row and other and row["seconds"] and other["seconds"]
    ]
    known = [value for value in values if value is not None]
    bound = quantity.bound(target.limit)
    if not known:
        return Verdict(target.what, bound, "-", UNKNOWN)
    worst = quantity.worst(known)
    if not quantity.meets(worst, target.limit):
        return Verdict(target.what, bound, quantity.show(worst), MISS)
    outcome = PASS if len(known) == len(target.rows) else f"{PASS}, {len(target.rows) - len(known)} rows {UNKNOWN}"
    return Verdict(target.what, bound, quantity.show(worst), outcome)


def summary(verdicts: Sequence[Verdict]) -> str:
    """How many were met, all rows measured.

    >>> summary([Verdict("a", "<= 1", "2", MISS), Verdict("b", "<= 1", "1", PASS)])
    '1 of 2 targets met'
    """
    return f"{sum(verdict.outcome == PASS for verdict in verdicts)} of {len(verdicts)} targets met"

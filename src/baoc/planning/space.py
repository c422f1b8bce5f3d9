"""What a plan may choose from and by what it is judged: ours, by evidence, and the paper's to the letter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baoc.core.configuration import Configuration, parse
from baoc.planning import rates
from baoc.planning import risk as risks

PER_ROLE = "role"
REFINED = "refined"

PAPER: tuple[Configuration, ...] = tuple(
    dict.fromkeys(
        parse(f"{name}-{bits}")
        for name in ("adamw", "adam", "adafactor", "sgdwm", "sgdm", "sgdw", "sgd")
        for bits in (32, 16, 8)
    )
)
"""Its 21 configurations, of which 17 are different."""


@dataclass(frozen=True)
class Space:
    """Defaults that go together."""

    risk: str
    granularity: str
    time: float
    """The default time budget, in the space's own definition."""
    time_is_of: Literal["update", "step"]
    lr_match: str
    candidates: tuple[Configuration, ...] | None = None  # None: what the table of effects knows


SPACES = {
    "measured": Space(risks.MEASURED, PER_ROLE, time=2.0, time_is_of="step", lr_match=rates.BY_ROLE),
    "paper": Space("paper", REFINED, time=1.3, time_is_of="update", lr_match=rates.BY_LENGTH, candidates=PAPER),
}
DEFAULT_SPACE = "measured"

"""What a script asks of ``BAOC``, and which of it holds when a run goes on."""

from __future__ import annotations

import dataclasses
import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from baoc.core.configuration import Configuration
from baoc.planning import risk as risks
from baoc.planning.planner import DEFAULT_MEMORY, check_budgets, check_time
from baoc.planning.settings import Settings

WARMUP = 50


@dataclass(frozen=True)
class Wishes:
    """Budgets, when to plan, and settings. Checked when it is made: nothing here may fail in the middle of training."""

    memory: float | int | str = DEFAULT_MEMORY
    time: float | None = None
    warmup: int = WARMUP
    settle: float | None = None
    replan_every: int | None = None
    settings: Settings = field(default_factory=Settings)
    host_memory: float | int | str | None = None

    def __post_init__(self) -> None:
        check_budgets(self.memory, self.host_memory)
        if self.time is not None:
            check_time(self.time)
        if not is_count(self.warmup, at_least=1):
            raise ValueError(
                f"warmup is {self.warmup!r}; it must be a whole number of steps: at least one gradient must be seen "
                "before planning."
            )
        if self.replan_every is not None and not is_count(self.replan_every, at_least=1):
            raise ValueError(
                f"replan_every is {self.replan_every!r}; it must be a whole number of at least 1, or None for one plan "
                "only."
            )
        if self.settle is not None and not (is_number(self.settle) and self.settle > 0):
            raise ValueError(
                f"settle is {self.settle!r}; it must be a number above 0, such as 0.02, or None for a whole warm-up."
            )

    def changed(self, caller: str, budgets: Mapping[str, Any], settings: Mapping[str, Any]) -> Wishes:
        """These wishes with others in their place; ``None`` leaves a budget as it is."""
        given: dict[str, Any] = {key: value for key, value in budgets.items() if value is not None}
        return dataclasses.replace(self, **given, settings=self.settings.changed(caller, settings))

    def plain(self) -> dict[str, Any]:
        """All of them as JSON values, settings beside budgets."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "settings"}
        settings = {each.name: getattr(self.settings, each.name) for each in fields(self.settings)}
        values: dict[str, Any] = json.loads(json.dumps(own | settings, default=_plain))
        return values

    def resumed(self, asked: Mapping[str, Any], had: Mapping[str, Any]) -> tuple[Wishes, dict[str, tuple[Any, Any]]]:
        """What holds when this script goes on with a run whose script ``asked`` for some wishes, and which ``had``
        others by the time it was saved.

        Where this script asks for what that one asked for, the run goes on with what it had: ``replan`` may have
        changed it. Where it asks for something else, it gets that. Second: what was overruled, as (had, gets).

        >>> asked = Wishes(memory=0.5).plain()
        >>> had = Wishes(memory=0.4).plain()
        >>> Wishes(memory=0.5).resumed(asked, had)[0].memory, Wishes(memory=0.3).resumed(asked, had)[0].memory
        (0.4, 0.3)
        """
        mine = self.plain()
        asked, had = (Wishes().plain() | dict(each) for each in (asked, had))  # older runs know fewer wishes
        known = [name for name in mine if name in asked and name in had]
        kept = {name: had[name] for name in known if mine[name] == asked[name] and had[name] != mine[name]}
        overruled = {name: (had[name], mine[name]) for name in known if asked[name] != mine[name] != had[name]}
        if "risk" in kept and kept["risk"] not in (None, *risks.RISKS):  # a function, of which only the name is known
            overruled["risk"] = (kept.pop("risk"), mine["risk"])
        if "anchors" in kept:
            kept["anchors"] = risks.Anchors(**{name: tuple(pair) for name, pair in kept["anchors"].items()})
        own = {name: kept.pop(name) for name in list(kept) if name in {each.name for each in fields(self)}}
        return dataclasses.replace(self, **own, settings=self.settings.changed("a checkpoint", kept)), overruled


def is_count(value: object, at_least: int) -> bool:
    """Whether a value is a whole number, and large enough."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= at_least


def is_number(value: object) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _plain(value: Any) -> Any:
    """A value that JSON does not know."""
    if isinstance(value, Configuration):
        return str(value)
    if isinstance(value, numbers.Number) and hasattr(value, "item"):  # numpy's
        return value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    if callable(value):  # a risk model; it cannot be restored, but another one is noticed
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__name__)}"
    return list(value)

"""Log of a training run: a file with one line of JSON for each logged step and each new plan.

Every line is an object with a ``"kind"``:

- ``start``: ``format``, ``version``. The first line; written again when a run resumes in the same file.
- ``step``: ``step``, ``loss`` (null if it is not finite), ``state_bytes``, ``phase``.
- ``plan``: ``step``, ``plan`` as in a plan file, ``order``: parameter names in the order of the optimizer.
- ``event``: ``step``, ``text``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baoc.core.files import parse_json
from baoc.core.plan import Plan
from baoc.core.text import human_bytes
from baoc.optim.optimizer import BlockOptimizer
from baoc.optim.state import state_bytes
from baoc.tools.report.diff import diff
from baoc.tools.report.explain import ReportError

FORMAT, VERSION = "baoc.run", 1
WARMUP, TRAINING = "warm-up", "training"


class RunLog:
    """Writes the log of a training run.

    Args:
        path: The file. An existing file is continued.
        optimizer: The optimizer of the run.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = BlockOptimizer(model, lr=1e-3, plan="adamw-8")
        >>> path = Path(tempfile.mkdtemp(), "run.jsonl")
        >>> with RunLog(path, optimizer) as log:
        ...     for step in range(3):
        ...         loss = model(torch.ones(1, 64)).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         log.step(step, loss.item())
        >>> run = Run.load(path)
        >>> len(run.steps), run.steps[-1].state_bytes == optimizer.plan.state_bytes
        (3, True)
    """

    def __init__(self, path: str | os.PathLike[str], optimizer: BlockOptimizer) -> None:
        self._optimizer = optimizer
        self._plan: Plan | None = None  # the last logged plan
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - line buffered, closed by close()
        self._write("start", format=FORMAT, version=VERSION)

    def step(self, step: int, loss: float, phase: str | None = None) -> None:
        """Log a step. Call it after ``optimizer.step()``.

        Args:
            step: Number of the step.
            loss: The loss.
            phase: Phase of the training. The default is the phase of the optimizer.
        """
        optimizer = self._optimizer
        if optimizer.plan != self._plan:
            self._log_plan(step)
        if phase is None:
            phase = WARMUP if getattr(optimizer, "is_warming_up", False) else TRAINING
        known = round(float(loss), 6) if math.isfinite(loss) else None
        self._write("step", step=step, loss=known, state_bytes=state_bytes(optimizer), phase=phase)

    def event(self, step: int, text: str) -> None:
        """Log an event. The page marks it in the curves.

        Args:
            step: Number of the step.
            text: What happened, such as "learning rate halved".
        """
        self._write("event", step=step, text=text)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log_plan(self, step: int) -> None:
        self._plan = plan = self._optimizer.plan
        order = [member.name for member in self._optimizer.members()]
        self._write("plan", step=step, plan=json.loads(plan.to_json()), order=order)

    def _write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")


@dataclass(frozen=True)
class Step:
    """A logged step."""

    step: int
    loss: float | None
    state_bytes: int
    phase: str


@dataclass(frozen=True)
class Run:
    """A logged run."""

    steps: list[Step] = field(default_factory=list)
    plans: list[tuple[int, Plan]] = field(default_factory=list)
    events: list[tuple[int, str]] = field(default_factory=list)
    order: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Run:
        """Read a log.

        An incomplete last line is ignored. If a run was resumed, later lines replace earlier ones of the same steps.

        Args:
            path: The file.

        Returns:
            The run.

        Raises:
            ReportError: If a line is not valid, or if there are no steps.
        """
        steps: dict[int, Step] = {}
        plans: dict[int, Plan] = {}
        events: list[tuple[int, str]] = []
        order: tuple[str, ...] = ()
        resumed = False
        for number, line in _lines(Path(path)):
            try:
                kind = line["kind"]
                if kind == "start":
                    _check_version(line)
                    resumed = bool(steps)
                    continue
                step = int(line["step"])
                if resumed:
                    steps = {at: each for at, each in steps.items() if at < step}
                    plans = {at: plan for at, plan in plans.items() if at < step}
                    events = [*(event for event in events if event[0] < step), (step, "resumed")]
                    resumed = False
                if kind == "step":
                    loss = None if line["loss"] is None else float(line["loss"])
                    steps[step] = Step(step, loss, int(line["state_bytes"]), str(line["phase"]))
                elif kind == "plan":
                    plans[step] = Plan.from_json(json.dumps(line["plan"]))
                    order = tuple(line["order"])
                elif kind == "event":
                    events.append((step, str(line["text"])))
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                reason = f"it has no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
                raise ReportError(
                    f"line {number} of {os.fspath(path)!r} is not valid in a run log: {reason}."
                ) from None
        if not steps:
            raise ReportError(f"{os.fspath(path)!r} has no steps. Call RunLog.step(step, loss) in the training loop.")
        return cls(list(steps.values()), list(plans.items()), events, order)

    def timeline(self) -> list[tuple[int, str]]:
        """Return all events in order: new plans, non-finite losses and logged events."""
        found = list(self.events)
        for index, (step, plan) in enumerate(self.plans):
            found.append((step, _migration(self.plans[index - 1][1], plan) if index else f"starts with {_size(plan)}"))
        bad = [each.step for each in self.steps if each.loss is None]
        found += [(step, "non-finite loss") for step in bad[:20]]
        return sorted(found)


def is_run(path: Path) -> bool:
    """Return whether a file is the log of a run."""
    try:
        with path.open(encoding="utf-8") as file:
            first = parse_json(file.readline())
        return isinstance(first, dict) and first.get("format") == FORMAT
    except (OSError, ValueError):
        return False


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ReportError(f"{os.fspath(path)!r} is not a run log: byte {error.start} is not UTF-8 text.") from None
    for number, text in enumerate(lines, start=1):
        try:
            line = parse_json(text)
        except ValueError as error:
            if number == len(lines):  # the process ended while writing this line
                return
            raise _not_valid(path, number, str(error).replace("line 1 is", "it is")) from None
        yield number, line


def _not_valid(path: str | os.PathLike[str], number: int, reason: object) -> ReportError:
    return ReportError(
        f"line {number} of {os.fspath(path)!r} is not valid in a run log: {str(reason).removesuffix('.')}."
    )


def _check_version(line: dict[str, Any]) -> None:
    if line.get("format") != FORMAT or line.get("version") != VERSION:
        raise ValueError(f"it is {line.get('format')!r}, version {line.get('version')!r}, not {FORMAT!r}, {VERSION}")


def _size(plan: Plan) -> str:
    return f"{human_bytes(plan.state_bytes)} of state"


def _migration(before: Plan, after: Plan) -> str:
    changed = sum("configuration" in change.what for change in diff(before, after))
    total = sum(len(block.parameters) for block in after.blocks)
    sizes = f"{human_bytes(before.state_bytes)} to {human_bytes(after.state_bytes)}"
    return f"new plan: state of {changed} of {total} tensors migrated, {sizes}"

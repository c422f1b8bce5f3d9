"""Random damage to plans, gradient statistics, effect tables, run logs and checkpoints of both planners.

Each is refused with one of our own errors and changes nothing, or is harmless. A mutation changes one to three things
in a file's content (or bytes of the file itself): a key is dropped, a value is replaced by one of another kind, a
number by one of another size, a tensor by one of another shape, dtype or content.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import baoc
from baoc import (
    BAOC,
    BlockOptimizer,
    Budget,
    CheckpointError,
    ConfigurationError,
    EffectPlanner,
    GradientStatistics,
    ModelFacts,
    PaperPlanner,
    Plan,
    PlanError,
    StatisticsCollector,
    StatisticsError,
    release_gradients,
)
from baoc.planners.base import Planner
from baoc.planners.effect_table import EffectTable, TableError
from baoc.tools.report.explain import ReportError
from baoc.tools.report.runlog import Run, RunLog
from benchmarks.torture.training import LOW_BITS, backward, make_model

JUNK = (
    None,
    True,
    -1,
    0,
    1,
    3,
    2.5,
    math.nan,
    math.inf,
    -math.inf,
    10**30,
    1e300,
    "",
    "x",
    "adamw-8",
    "0.0",
    [],
    [[]],
    {},
)
HARMLESS, REFUSED = "harmless", "refused"
Outcome = str


# ---- damage ----


def mutated(value: Any, draw: random.Random) -> Any:
    """Return a copy of nested values and tensors with one to three things changed."""
    value = copy.deepcopy(value)
    for _ in range(draw.randint(1, 3)):
        value = _mutate(value, draw)
    return value


def _mutate(value: Any, draw: random.Random) -> Any:
    inner = [key for key in _keys(value) if not isinstance(value, str)]
    if inner and draw.random() < 0.96:
        key = draw.choice(inner)
        if draw.random() < 0.1:
            if isinstance(value, dict) and draw.random() < 0.3:
                value[f"{key}x"] = value.pop(key)
            else:
                del value[key]
            return value
        value[key] = _mutate(value[key], draw)
        return value
    if isinstance(value, Tensor):
        return _mutate_tensor(value, draw)
    if isinstance(value, str) and value and draw.random() < 0.7:
        return _mutate_text(value, draw)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and draw.random() < 0.5:
        return draw.choice([-value, value + 1, value * 2, value * 1000, value / 2, str(value)])
    return copy.deepcopy(draw.choice(JUNK))


def _keys(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value)
    return list(range(len(value))) if isinstance(value, list) else []


def _mutate_text(text: str, draw: random.Random) -> str:
    if text[:1] == "{" and draw.random() < 0.8:  # JSON within: change its values rather than its syntax
        with contextlib.suppress(ValueError):  # text that an earlier mutation has damaged
            return json.dumps(_mutate(json.loads(text), draw))
    place = draw.randrange(len(text))
    return draw.choice(
        [text[:place], text[:place] + text[place + 1 :], text[:place] + draw.choice('"{}[],:.-0x') + text[place:]]
    )


def _mutate_tensor(tensor: Tensor, draw: random.Random) -> Any:
    changes: list[Callable[[], Any]] = [
        lambda: tensor[:-1] if tensor.dim() else tensor.reshape(1),
        lambda: tensor.unsqueeze(0),
        lambda: tensor.flatten(),
        lambda: tensor.to(draw.choice([torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int64])),
        lambda: torch.full_like(tensor, draw.choice([0, 1, 127])),
        lambda: -tensor if tensor.dtype is not torch.uint8 else 255 - tensor,
        lambda: torch.randint(0, 100, tensor.shape).to(tensor.dtype),
        lambda: torch.full_like(tensor, math.nan) if tensor.is_floating_point() else tensor + 1,
        lambda: torch.empty(0, dtype=tensor.dtype),
        lambda: None,
        lambda: tensor.tolist(),
    ]
    return draw.choice(changes)()


def with_wrong_bytes(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    if draw.random() < 0.3:
        return content[:place]
    return content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :]


# ---- targets ----


class Target:
    """One kind of file: a good one, and what users do with it."""

    def attempt(self, draw: random.Random) -> Outcome:
        """Try a damaged one. Errors that are not our own reach the caller."""
        raise NotImplementedError


class Plans(Target):
    """Plans of both planners: read, printed, trained with."""

    def __init__(self) -> None:
        self._model = make_model()
        planners = (EffectPlanner(), PaperPlanner(warmup_base="budget"))
        self._good = [BAOC(self._model, memory=0.5, planner=planner).plan.to_json() for planner in planners]
        backward(self._model, 0)

    def attempt(self, draw: random.Random) -> Outcome:
        good = draw.choice(self._good)
        text = json.dumps(mutated(json.loads(good), draw)) if draw.random() < 0.7 else _mutate_text(good, draw)
        try:
            plan = Plan.from_json(text)
            plan.table(wide=True)
            str(plan)
            optimizer = BlockOptimizer(self._model, plan=plan, lr=0.0)
            if draw.random() < 0.2:
                optimizer.step()
        except (PlanError, ConfigurationError):
            return REFUSED
        assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
        return HARMLESS


class Statistics(Target):
    """Gradient statistics: read, and planned from by both planners."""

    def __init__(self) -> None:
        model = make_model()
        collector = StatisticsCollector(model)
        for step in range(3):
            backward(model, step)
            collector.observe()
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name, "a.stats")
        collector.statistics().save(self._path)
        self._bytes = self._path.read_bytes()
        self._good = torch.load(io.BytesIO(self._bytes), weights_only=True)

    def attempt(self, draw: random.Random) -> Outcome:
        if draw.random() < 0.2:
            self._path.write_bytes(with_wrong_bytes(self._bytes, draw))
        else:
            torch.save(mutated(self._good, draw), self._path)
        try:
            statistics = GradientStatistics.load(self._path)
            planners: list[Planner] = [EffectPlanner(), PaperPlanner()]
            baoc.make_plan(statistics, 0.5, planner=draw.choice(planners))
        except (StatisticsError, PlanError):
            return REFUSED
        return HARMLESS


class Tables(Target):
    """Effect tables: read, written, and planned with."""

    def __init__(self) -> None:
        self._good = EffectTable.load().to_json()
        self._model = ModelFacts.of(make_model())
        self._folder = tempfile.TemporaryDirectory()

    def attempt(self, draw: random.Random) -> Outcome:
        text = (
            json.dumps(mutated(json.loads(self._good), draw)) if draw.random() < 0.7 else _mutate_text(self._good, draw)
        )
        try:
            table = EffectTable.from_json(text)
            assert EffectTable.from_json(table.to_json()).to_json() == table.to_json()
            if draw.random() < 0.3:
                path = Path(self._folder.name, "table.json")
                path.write_text(text, encoding="utf-8")
                EffectPlanner(table=str(path)).initial_plan(self._model, Budget(0.5))
        except (TableError, PlanError):
            return REFUSED
        return HARMLESS


class Logs(Target):
    """Run logs: read, and listed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name, "run.jsonl")
        model = make_model()
        optimizer = BAOC(model, memory=0.5, planner=PaperPlanner(warmup=2))
        with RunLog(self._path, optimizer) as log:
            for step in range(4):
                backward(model, step)
                optimizer.step()
                log.step(step, 1.0 / (step + 1))
            log.event(3, "done")
        self._good = self._path.read_text(encoding="utf-8").splitlines()

    def attempt(self, draw: random.Random) -> Outcome:
        lines = list(self._good)
        place = draw.randrange(len(lines))
        if draw.random() < 0.7:
            lines[place] = json.dumps(mutated(json.loads(lines[place]), draw))
        else:
            lines[place] = _mutate_text(lines[place], draw)
        self._path.write_text("\n".join(lines), encoding="utf-8")
        try:
            Run.load(self._path).timeline()
        except ReportError:
            return REFUSED
        return HARMLESS


class Checkpoints(Target):
    """Loaded into an optimizer in training, which must not change if they are refused, and must go on if not."""

    def __init__(self) -> None:
        planners = (
            EffectPlanner(),
            EffectPlanner(replan_every=2),
            PaperPlanner(warmup=20),
            PaperPlanner(warmup=2, replan_every=2),
        )
        self._cases = [self._case(planner) for planner in planners]
        self._cases += [self._case(EffectPlanner(), dtype, low_bits=True) for dtype in (torch.bfloat16, torch.float16)]

    @staticmethod
    def _case(
        planner: Planner, dtype: torch.dtype = torch.float32, *, low_bits: bool = False
    ) -> tuple[BAOC, nn.Module, Any, Any, Any]:
        """Return an optimizer, its model and state dict, and an earlier checkpoint of the same run with its weights."""
        model = make_model(dtype)
        optimizer = BAOC(model, lr=1e-3, memory=0.6, planner=planner)
        if low_bits:  # and released gradients, whose norms are in the checkpoint
            optimizer.set_plan(LOW_BITS)
            release_gradients(optimizer)
        saved = []
        for step in range(4):
            backward(model, step)
            optimizer.step()
            saved.append(copy.deepcopy((optimizer.state_dict(), model.state_dict())))
        optimizer.load_state_dict(saved[-1][0])  # which brings blocks into the order of parameters
        return optimizer, model, copy.deepcopy(optimizer.state_dict()), *saved[-2]

    def attempt(self, draw: random.Random) -> Outcome:
        optimizer, model, held, good, good_weights = draw.choice(self._cases)
        weights = copy.deepcopy(model.state_dict())
        try:
            optimizer.load_state_dict(mutated(good, draw))
        except CheckpointError:
            check_same(optimizer.state_dict(), held)
            return REFUSED
        try:
            model.load_state_dict(good_weights)
            optimizer.zero_grad()
            backward(model, 4)
            optimizer.step()
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        except RuntimeError as error:
            if "not the weights that they belong to" not in str(error):
                raise
            return REFUSED  # a checksum of weights has changed, which the first step finds
        finally:
            model.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(held))
            for group, before in zip(optimizer.param_groups, held["param_groups"]):
                for key in group.keys() - before.keys():  # unknown keys belong to others, and stay
                    del group[key]
        return HARMLESS


def check_same(left: Any, right: Any, place: str = "state_dict") -> None:
    """Raise unless two nested values with tensors are equal."""
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        for key in left:
            check_same(left[key], right[key], f"{place}.{key}")
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, (one, other) in enumerate(zip(left, right)):
            check_same(one, other, f"{place}.{index}")
    else:
        is_same = torch.equal(left, right) if isinstance(left, Tensor) else left == right
        assert is_same, f"{place} has changed"


TARGETS: dict[str, type[Target]] = {
    "plans": Plans,
    "statistics": Statistics,
    "tables": Tables,
    "logs": Logs,
    "checkpoints": Checkpoints,
}


def run(times: int, seed: int = 0, names: list[str] | None = None) -> dict[str, Any]:
    """Try ``times`` mutations of each kind. Return how many were refused or harmless, and what went wrong."""
    found: dict[str, Any] = {}
    for name in names or TARGETS:
        target, outcomes = TARGETS[name](), Counter[str]()
        wrong: dict[str, str] = {}
        for number in range(times):
            draw = random.Random(f"{seed} {name} {number}")
            torch.manual_seed(number)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    outcomes[target.attempt(draw)] += 1
            except Exception as error:  # any other error is a finding
                outcomes["wrong"] += 1
                wrong.setdefault(f"{type(error).__name__}: {str(error)[:160]}", f"{name} {number}")
        found[name] = dict(outcomes)
        found[f"{name}: findings"] = [f"{place}: {error}" for error, place in wrong.items()]
    return found

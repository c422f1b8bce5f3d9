"""What the explorer page shows, as plain values: the model's tensors, plans over all budgets, and a run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

from baoc.core.configuration import REFERENCE, Configuration
from baoc.core.plan import Plan
from baoc.core.roles import Role, role_of
from baoc.core.spec import Hyper, Shape
from baoc.planning.metrics import Metrics
from baoc.planning.planner import Planner
from baoc.planning.settings import AUTO, Settings
from baoc.profiling.profile import Profile
from baoc.report.explain import ReportError, total_risk
from baoc.report.frontier import MOST_MEMORY, knee, smallest_budget, spread
from baoc.report.runlog import Run

POINTS = 40
_MOST_POINTS_OF_A_CURVE = 1500
_SMOOTHING = 0.02  # of a run: the time constant of the smooth curve
_LAYER = re.compile(r"^(.*?\.?\d+)(\.|$)")
_FIRST = {Role.EMBEDDING: 0, Role.HEAD: 2}


@dataclass(frozen=True)
class Sources:
    """What a report is made from; anything may be missing, but not all."""

    title: str
    profile: Profile | None = None
    plans: Mapping[str, Plan] = field(default_factory=dict)
    run: Run | None = None
    settings: Settings = field(default_factory=Settings)
    time: float | None = None
    hyper: Hyper = field(default_factory=lambda: Hyper(lr=1e-3))

    def shapes(self) -> dict[str, Shape]:
        """The model's tensors in its own order, as far as the sources know it; all must speak of the same ones."""
        plans = self.all_plans()
        if self.profile is not None:
            shapes = self.profile.shapes
        elif plans:
            plan = next(iter(plans.values()))
            found = {name: tuple(shape) for block in plan.blocks for name, shape in block.parameters.items()}
            order = self.run.order if self.run and set(self.run.order) == set(found) else _guessed_order(plan)
            shapes = {name: found[name] for name in order}
        else:
            raise ReportError("there is nothing to report: give a profile, a plan, or the log of a run with a plan.")
        for name, plan in plans.items():
            if {n: tuple(shape) for b in plan.blocks for n, shape in b.parameters.items()} != shapes:
                raise ReportError(f"{name} is about another model than the rest: its parameters or shapes differ.")
        return shapes

    def all_plans(self) -> dict[str, Plan]:
        """Those of files, and those of the run."""
        of_run = {f"run, step {step}": plan for step, plan in self.run.plans} if self.run else {}
        return {**self.plans, **of_run}


def content(sources: Sources) -> dict[str, Any]:
    """All of the page's data, as JSON can hold it."""
    shapes = sources.shapes()
    planner = _planner(sources, shapes)
    along = _frontier(planner, sources.time) if planner else []
    given = sources.all_plans()
    configurations = list(
        dict.fromkeys(block.configuration for plan in (*along, *given.values()) for block in plan.blocks)
    )
    layers = list(dict.fromkeys(map(_layer, shapes)))
    reference = sum(REFERENCE.state_bytes(shape) for shape in shapes.values())
    plans = [_plan(_share(plan, reference), plan, shapes, configurations) for plan in along]
    is_loss = any("expected_loss" in plan.settings for plan in along)  # of which the tolerance of "auto" is a share
    auto = planner.plan(AUTO, sources.time).state_bytes if planner and is_loss else None
    return {
        "title": sources.title,
        "reference_bytes": reference,
        "layers": layers,
        "tensors": [_tensor(name, shape, layers, sources, planner) for name, shape in shapes.items()],
        "configurations": [_configuration(each, shapes) for each in configurations],
        "frontier": plans,
        "knee": knee([plan["bytes"] for plan in plans], [plan["risk"] for plan in plans]),
        "auto": _at(plans, auto),
        "plans": [_plan(name, plan, shapes, configurations) for name, plan in given.items()],
        "has_metrics": sources.profile is not None,
        "regime": planner.regime if planner else None,
        "run": None if sources.run is None else run_content(sources.run),
    }


def _planner(sources: Sources, shapes: Mapping[str, Shape]) -> Planner | None:
    """From the profile, or from a plan's own settings where effects were measured: those need no gradients."""
    if sources.profile is not None:
        return Planner(shapes, sources.profile, sources.hyper, sources.settings)
    made = next(reversed(sources.all_plans().values())).settings
    if made.get("space", sources.settings.space) != "measured":
        return None
    asked = {name: made[name] for name in ("regime", "tokens") if made.get(name)}
    return Planner(shapes, None, sources.hyper, sources.settings.changed("report", asked))


def _frontier(planner: Planner, time: float | None) -> list[Plan]:
    """Plans of all budgets, each once."""
    budgets = spread(smallest_budget(planner, time), MOST_MEMORY * planner.reference_bytes, POINTS)
    found: dict[int, Plan] = {}
    for plan in planner.frontier(budgets, time):
        found.setdefault(plan.state_bytes, plan)
    return list(found.values())


def _plan(
    name: str, plan: Plan, shapes: Mapping[str, Shape], configurations: Sequence[Configuration]
) -> dict[str, Any]:
    blocks = [
        {
            "name": block.name,
            "why": block.why,
            "loss": sum(block.risk.values()) if block.risk else None,
            "numel": block.numel,
            "lr_scale": block.lr_scale,
            "host": block.host,
        }
        for block in plan.blocks
    ]
    index = {block.name: number for number, block in enumerate(plan.blocks)}
    return {
        "name": name,
        "bytes": plan.state_bytes,
        "risk": total_risk(plan),
        "loss": plan.settings.get("expected_loss"),
        "time": plan.settings.get("time"),
        "budget": plan.settings.get("memory_budget"),
        "blocks": blocks,
        "block_of": [index[plan.block_of(name).name] for name in shapes],
        "configuration_of": [configurations.index(plan.block_of(name).configuration) for name in shapes],
    }


def _tensor(name: str, shape: Shape, layers: list[str], sources: Sources, planner: Planner | None) -> dict[str, Any]:
    role = planner.facts.role(name, shape) if planner else role_of(shape, name)
    return {
        "name": name,
        "shape": list(shape),
        "numel": math.prod(shape),
        "reference_bytes": REFERENCE.state_bytes(shape),
        "layer": layers.index(_layer(name)),
        "role": role.value,
        "metrics": _metrics(name, sources),
    }


def _metrics(name: str, sources: Sources) -> dict[str, float | None] | None:
    """The paper's z of one tensor."""
    if sources.profile is None or not sources.profile.records[name].numel:
        return None
    found = Metrics(sources.profile, [name], sources.hyper)
    if not found.has_signal:
        return None
    values = {
        "anisotropy": found.anisotropy,
        "direction stability": found.direction_stability,
        "signal to noise": found.snr,
        "decay distortion": found.distortion,
        "structure residual": found.structure_residual,
        "int8 alignment": found.precision(8),
    }
    return {key: None if value is None or not math.isfinite(value) else _short(value) for key, value in values.items()}


def _configuration(configuration: Configuration, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    return {
        "name": configuration.alias,
        "spelling": str(configuration),
        "mechanism": configuration.mechanism_name,
        "bytes": [configuration.state_bytes(shape) for shape in shapes.values()],
        "each": configuration.state_bytes((1024, 1024)) / 2**20,  # bytes for each element of a matrix
    }


def run_content(run: Run) -> dict[str, Any]:
    """Curves of at most some hundred points, phases and state as what changed when, and everything that happened."""
    losses = [(each.step, each.loss) for each in run.steps if each.loss is not None]
    smooth: list[tuple[int, float]] = []
    weight = max(1 / max(1.0, _SMOOTHING * len(losses)), 1e-3)
    for step, loss in losses:
        smooth.append((step, loss if not smooth else smooth[-1][1] + weight * (loss - smooth[-1][1])))
    return {
        "loss": _thinned(losses),
        "smooth": _thinned(smooth),
        "state_bytes": _changes((each.step, each.state_bytes) for each in run.steps),
        "phases": _changes((each.step, each.phase) for each in run.steps),
        "last_step": run.steps[-1].step,
        "plan_steps": [step for step, _ in run.plans],
        "events": [[step, text] for step, text in run.told()],
    }


def _thinned(points: Sequence[tuple[int, float]]) -> list[list[float]]:
    """Means of neighbours, where there are more points than a screen has."""
    size = -(-len(points) // _MOST_POINTS_OF_A_CURVE) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [[group[len(group) // 2][0], _short(sum(loss for _, loss in group) / len(group))] for group in groups]


def _changes(values: Iterable[tuple[int, Any]]) -> list[list[Any]]:
    found: list[list[Any]] = []
    for step, value in values:
        if not found or found[-1][1] != value:
            found.append([step, value])
    return found


def _layer(name: str) -> str:
    """What a tensor is drawn with: all up to the first number in its name, or its module.

    >>> [_layer(name) for name in ("transformer.h.11.attn.weight", "transformer.wte.weight", "scale")]
    ['transformer.h.11', 'transformer.wte', 'scale']
    """
    numbered = _LAYER.match(name)
    return numbered[1] if numbered else name.rpartition(".")[0] or name


def _guessed_order(plan: Plan) -> list[str]:
    """The model's order, as far as a plan keeps it: each of its blocks lists tensors in that order.

    Layers follow each other as they do within the blocks. What that leaves open goes by name, with embeddings first,
    heads last, and numbers as numbers.

    >>> shapes = {"embed.weight": (9, 9), "h.2.weight": (9, 9), "h.10.weight": (9, 9), "head.weight": (9, 9)}
    >>> _guessed_order(Plan.uniform("sgd", dict(reversed(shapes.items())))) == list(reversed(shapes))
    True
    """
    shapes = {name: shape for block in plan.blocks for name, shape in block.parameters.items()}
    by_name = {name: (_FIRST.get(role_of(shape, name), 1), _parts(name)) for name, shape in shapes.items()}
    by_layer = {_layer(name): by_name[name] for name in sorted(shapes, key=by_name.__getitem__, reverse=True)}
    sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(by_layer, ()))
    for block in plan.blocks:
        layers = list(dict.fromkeys(map(_layer, block.parameters)))
        for before, after in pairwise(layers):
            sorter.add(after, before)
    try:
        sorter.prepare()
    except CycleError:  # a plan that was written by hand
        return sorted(shapes, key=by_name.__getitem__)
    place: dict[str, int] = {}
    ready: set[str] = set()
    while sorter.is_active():
        ready |= set(sorter.get_ready())
        layer = min(ready, key=by_layer.__getitem__)
        ready.remove(layer)
        place[layer] = len(place)
        sorter.done(layer)
    listed = {name: index for index, name in enumerate(shapes)}
    return sorted(shapes, key=lambda name: (place[_layer(name)], _parts(name), listed[name]))


def _parts(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _share(plan: Plan, reference: int) -> str:
    return f"{plan.state_bytes / max(1, reference):.1%} of AdamW16"


def _at(plans: Sequence[Mapping[str, Any]], nbytes: int | None) -> int | None:
    """The first plan that holds at least as much."""
    if nbytes is None:
        return None
    return next((index for index, plan in enumerate(plans) if plan["bytes"] >= nbytes), None)


def _short(value: float) -> float:
    return float(f"{value:.5g}")

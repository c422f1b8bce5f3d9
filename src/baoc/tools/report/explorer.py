"""The explorer page: one HTML file with all data and scripts inside, which opens without a network.

The page shows the tensors of a model, the plans over all budgets, and a training run.
"""

from __future__ import annotations

import html
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from importlib import resources
from itertools import pairwise
from typing import Any

from baoc.core.configuration import BUDGET_REFERENCE, Configuration
from baoc.core.files import replaced
from baoc.core.plan import Plan
from baoc.core.roles import Role, role_of
from baoc.core.spec import Hyper, Shape
from baoc.core.text import predicted_interval
from baoc.plan import measured
from baoc.planners.base import Budget
from baoc.planners.effect_problem import EffectProblem
from baoc.planners.effects import EffectPlanner
from baoc.planners.paper.metrics import Metrics
from baoc.planners.paper.planner import PaperPlanner
from baoc.planners.paper.problem import PaperProblem
from baoc.planners.paper.statistics import GradientStatistics
from baoc.tools.report.explain import ReportError, total_risk
from baoc.tools.report.frontier import MOST_MEMORY, POINTS, knee, model_of, spread
from baoc.tools.report.runlog import Run

_MOST_POINTS_OF_A_CURVE = 1500
_SMOOTHING = 0.02  # time constant of the smoothed curve, as a fraction of the run
_LAYER = re.compile(r"^(.*?\.?\d+)(\.|$)")
_FIRST = {Role.EMBEDDING: 0, Role.HEAD: 2}
SCRIPTS = ("draw.js", "model.js", "charts.js", "views.js")
"""In load order: each script uses definitions of the previous ones."""


@dataclass(frozen=True)
class Sources:
    """The data of a report. At least one of ``statistics``, ``plans`` and ``run`` is needed.

    Args:
        title: Title of the page.
        statistics: Gradient statistics.
        plans: Plans by name.
        run: A logged training run.
        planner: Makes the plans over all budgets.
        hyper: Hyperparameters of the training.
    """

    title: str
    statistics: GradientStatistics | None = None
    plans: Mapping[str, Plan] = field(default_factory=dict)
    run: Run | None = None
    planner: EffectPlanner | PaperPlanner = field(default_factory=EffectPlanner)
    hyper: Hyper = field(default_factory=lambda: Hyper(lr=1e-3))

    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of the model's tensors, in the order of the model if it is known.

        Raises:
            ReportError: If there are no shapes, or the sources disagree.
        """
        plans = self.all_plans()
        if self.statistics is not None:
            shapes = self.statistics.shapes
        elif plans:
            plan = next(iter(plans.values()))
            found = {name: tuple(shape) for block in plan.blocks for name, shape in block.parameters.items()}
            order = self.run.order if self.run and set(self.run.order) == set(found) else _guessed_order(plan)
            shapes = {name: found[name] for name in order}
        else:
            raise ReportError(
                "there is nothing to report. Pass gradient statistics, a plan, or the log of a run with a plan."
            )
        for name, plan in plans.items():
            if {n: tuple(shape) for b in plan.blocks for n, shape in b.parameters.items()} != shapes:
                raise ReportError(f"{name} belongs to another model: its parameters or shapes differ.")
        return shapes

    def all_plans(self) -> dict[str, Plan]:
        """Return the plans of the files and of the run, by name."""
        of_run = {f"run, step {step}": plan for step, plan in self.run.plans} if self.run else {}
        return {**self.plans, **of_run}


def page(sources: Sources) -> str:
    """Return the HTML of the page.

    Args:
        sources: The data.

    Returns:
        One HTML file that needs nothing else.

    Raises:
        ReportError: If the sources have no shapes, or belong to different models.

    Example:
        >>> text = page(Sources("demo", plans={"uniform": Plan.uniform("adamw-8", {"w.weight": (64, 64)})}))
        >>> text.startswith("<!doctype html>"), "https://" in text
        (True, False)
    """
    # "</script>" in a parameter name would end the script, so "<" is escaped
    data = json.dumps(content(sources), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {
        "{{title}}": html.escape(sources.title),
        "{{style}}": _file("page.css"),
        "{{script}}": "\n".join(map(_file, SCRIPTS)),
        "{{data}}": data,
    }
    text = _file("page.html")
    for mark, part in parts.items():
        text = text.replace(mark, part)
    return text


def write(sources: Sources, path: str | os.PathLike[str]) -> None:
    """Write the page to a file. An existing file is replaced when the new one is complete.

    Args:
        sources: The data.
        path: The file.

    Raises:
        ReportError: If the sources have no shapes, or belong to different models.
    """
    text = page(sources)
    with replaced(path) as file:
        file.write(text.encode())


def _file(name: str) -> str:
    return (resources.files(__package__) / "page" / name).read_text(encoding="utf-8")


def content(sources: Sources) -> dict[str, Any]:
    """Return the data of the page.

    Args:
        sources: The data of the report.

    Returns:
        Values for JSON.

    Raises:
        ReportError: If the sources have no shapes, or belong to different models.
    """
    shapes = sources.shapes()
    problem = _problem(sources, shapes)
    along = _frontier(problem) if problem else []
    given = sources.all_plans()
    configurations = list(
        dict.fromkeys(block.configuration for plan in (*along, *given.values()) for block in plan.blocks)
    )
    layers = list(dict.fromkeys(map(_layer, shapes)))
    reference = sum(BUDGET_REFERENCE.state_bytes(shape) for shape in shapes.values())
    plans = [_plan(_share(plan, reference), plan, shapes, configurations) for plan in along]
    auto = problem.plan(Budget()).state_bytes if isinstance(problem, EffectProblem) else None
    return {
        "title": sources.title,
        "reference_bytes": reference,
        "tolerance": EffectPlanner().tolerance,
        "layers": layers,
        "tensors": [_tensor(name, shape, layers, sources, problem) for name, shape in shapes.items()],
        "configurations": [_configuration(each, shapes) for each in configurations],
        "frontier": plans,
        "knee": knee([plan["bytes"] for plan in plans], [plan["risk"] for plan in plans]),
        "auto": _at(plans, auto),
        "plans": [_plan(name, plan, shapes, configurations) for name, plan in given.items()],
        "has_metrics": sources.statistics is not None,
        "regime": problem.regime if isinstance(problem, EffectProblem) else None,
        "run": None if sources.run is None else run_content(sources.run),
    }


def _problem(sources: Sources, shapes: Mapping[str, Shape]) -> EffectProblem | PaperProblem | None:
    """Return the problem whose plans over all budgets are shown; ``None`` if it needs gradient statistics."""
    if sources.statistics is not None:
        model = replace(sources.statistics.model, hyper=sources.hyper)
        return measured(sources.planner, model).problem(model, sources.statistics)
    plan = next(reversed(sources.all_plans().values()))
    if isinstance(sources.planner, PaperPlanner) or plan.settings.get("planner", "effects") != "effects":
        return None
    model = model_of(plan, sources.hyper)
    return sources.planner.problem(replace(model, shapes=dict(shapes)))  # in the order of the model


def _frontier(problem: EffectProblem | PaperProblem) -> list[Plan]:
    """Return the plans over all budgets, without those that are no better than a smaller one."""
    budgets = spread(problem.least_bytes(), MOST_MEMORY * problem.reference_bytes, POINTS)
    found: list[Plan] = []
    for plan in sorted(problem.frontier(budgets), key=lambda plan: (plan.state_bytes, plan.settings["objective"])):
        if not found or plan.settings["objective"] < found[-1].settings["objective"]:
            found.append(plan)
    return found


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
        "interval": predicted_interval(plan.settings),
        "source": plan.settings.get("expected_source"),
        "time": plan.settings.get("time"),
        "budget": plan.settings.get("memory_budget"),
        "blocks": blocks,
        "block_of": [index[plan.block_of(name).name] for name in shapes],
        "configuration_of": [configurations.index(plan.block_of(name).configuration) for name in shapes],
    }


def _tensor(
    name: str, shape: Shape, layers: list[str], sources: Sources, problem: EffectProblem | PaperProblem | None
) -> dict[str, Any]:
    role = problem.model.role(name) if problem else role_of(shape, name)
    return {
        "name": name,
        "shape": list(shape),
        "numel": math.prod(shape),
        "reference_bytes": BUDGET_REFERENCE.state_bytes(shape),
        "layer": layers.index(_layer(name)),
        "role": role.value,
        "metrics": _metrics(name, sources),
    }


def _metrics(name: str, sources: Sources) -> dict[str, float | None] | None:
    """Return the metrics z of the paper for one tensor."""
    if sources.statistics is None or not sources.statistics.records[name].numel:
        return None
    found = Metrics(sources.statistics, [name], sources.hyper)
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
        "each": configuration.state_bytes((1024, 1024)) / 2**20,  # bytes per element of a matrix
    }


def run_content(run: Run) -> dict[str, Any]:
    """Return the curves of a run, thinned for a screen, the changes of phase and state, and all events."""
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
        "events": [[step, text] for step, text in run.timeline()],
    }


def _thinned(points: Sequence[tuple[int, float]]) -> list[list[float]]:
    """Average neighbors if there are more points than a screen can show."""
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
    """Return the group that a tensor is drawn in: its name up to the first number, or its module.

    >>> [_layer(name) for name in ("transformer.h.11.attn.weight", "transformer.wte.weight", "scale")]
    ['transformer.h.11', 'transformer.wte', 'scale']
    """
    numbered = _LAYER.match(name)
    return numbered[1] if numbered else name.rpartition(".")[0] or name


def _guessed_order(plan: Plan) -> list[str]:
    """Reconstruct the order of a model's tensors from a plan, whose blocks list tensors in that order.

    Layers keep the order that they have within blocks, and so do the tensors of a layer. Ties between layers are sorted
    by name, with embeddings first, heads last, and numbers in numeric order.

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
    except CycleError:  # possible in a plan written by hand
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
    return sorted(shapes, key=lambda name: (place[_layer(name)], listed[name]))


def _parts(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _share(plan: Plan, reference: int) -> str:
    return f"{plan.state_bytes / max(1, reference):.1%} of AdamW16"


def _at(plans: Sequence[Mapping[str, Any]], nbytes: int | None) -> int | None:
    """Return the index of the first plan with at least this many bytes, or of the last plan."""
    if nbytes is None:
        return None
    return next((index for index, plan in enumerate(plans) if plan["bytes"] >= nbytes), len(plans) - 1)


def _short(value: float) -> float:
    return float(f"{value:.5g}")

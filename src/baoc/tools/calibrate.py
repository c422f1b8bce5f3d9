"""Measure how configurations change the loss of your own workload, to plan with the result."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from baoc.core.configuration import Configuration, parse
from baoc.core.plan import Block, Plan, PlanError
from baoc.core.roles import HIDDEN, Role
from baoc.core.spec import DEFAULT_BETAS, Shape
from baoc.optim.optimizer import BlockOptimizer
from baoc.planners import lr_multipliers
from baoc.planners.effect_table import Difference, EffectTable, table_of
from baoc.planners.model_facts import SCRATCH, ModelFacts
from baoc.planners.scaling import TOKENS_PER_PARAMETER, Laws, Scale

OTHERS = ("adamw-8", "adamw[m=int8,v=factored]", "adamw[m=int4,v=factored]", "colnorm")
OF_HIDDEN = ("muon-8", "muon-4", "spectral", *OTHERS)
_COUNTED = 0.25  # fraction of steps, at the end of a run, whose mean loss is compared
_REST = "adamw-32"

OnRun = Callable[[int, int, str, float], None]
"""Called after each run with the number of runs so far, the number of all runs, a description, and the loss."""


def calibrate(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batches: Iterable[Any],
    *,
    steps: int = 200,
    repeats: int = 2,
    lr: float = 1e-3,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = DEFAULT_BETAS,
    configurations: Sequence[Configuration | str] | None = None,
    regime: str = "auto",
    on_run: OnRun | None = None,
) -> EffectTable:
    """Train once with each configuration on each role, and compare the losses with AdamW32.

    The model itself does not change: every run trains a copy. The runs of one repeat start from the same weights and
    see the same batches. Their loss is the mean over the last quarter of the steps. All runs use the same
    learning-rate multipliers by role as plans.

    Args:
        model: The model at the start of training, with fresh or pretrained weights.
        loss_fn: ``loss_fn(model, batch)`` returns the loss.
        batches: Batches. If there are fewer than ``steps * repeats``, they are reused.
        steps: Steps of each run. Short runs say little about momentum; use about a tenth of a real run.
        repeats: Runs of each configuration, on different batches.
        lr: The learning rate that you use with AdamW.
        weight_decay: The weight decay that you use with AdamW.
        betas: The betas that you use with AdamW.
        configurations: The configurations to try on every role that they support. The default is the most useful ones.
        regime: "scratch", "finetune", "general", or "auto" to detect it from the model.
        on_run: Called after each run.

    Returns:
        The effect table.

    Raises:
        PlanError: If there are too few steps, repeats or batches, or if no configuration applies to the model.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 64))
        >>> table = calibrate(
        ...     model, lambda model, x: model(x).square().mean(), [torch.ones(2, 64)], steps=4, repeats=1,
        ...     configurations=["muon-8"],
        ... )
        >>> table.effects["general"][Role.MATRIX][parse("muon-8")].runs
        1
    """
    if steps < 4 or repeats < 1:
        raise PlanError(f"calibration needs at least 4 steps and 1 repeat, got {steps} and {repeats}.")
    facts = ModelFacts.of(model)
    regime = facts.regime if regime == "auto" else regime
    taken = _take(batches, steps * repeats)
    moves = _moves(facts, configurations)
    differences = []
    total, done = repeats * (1 + len(moves)), 0
    for repeat in range(repeats):
        mine = [taken[(repeat * steps + index) % len(taken)] for index in range(steps)]
        reference = 0.0
        for role, configuration in (None, parse(_REST)), *moves:
            plan = _plan(facts, regime, role, configuration)
            loss = _train(copy.deepcopy(model), plan, loss_fn, mine, repeat, lr, weight_decay, betas)
            done += 1
            if role is None:
                reference = loss
            else:
                percent = 100 * (loss / reference - 1)
                differences.append(Difference(regime, role, configuration, "yours", percent))
            if on_run is not None:
                on_run(done, total, f"{role.value}: {configuration.alias}" if role else configuration.alias, loss)
    return table_of(differences, f"baoc calibrate: {repeats} repeats of {steps} steps at lr {lr:g}")


def _take(batches: Iterable[Any], count: int) -> list[Any]:
    taken = list(islice(iter(batches), count))
    if not taken:
        raise PlanError("there are no batches to calibrate with. Pass at least one.")
    return taken


def _kind(role: Role) -> tuple[Role, ...]:
    return HIDDEN if role in HIDDEN else (role,)


def _moves(facts: ModelFacts, configurations: Sequence[Configuration | str] | None) -> list[tuple[Role, Configuration]]:
    """Return the roles and configurations to try. Hidden weights share one role, that of most elements."""
    sizes: dict[tuple[Role, ...], dict[Role, int]] = {}
    for name, shape in facts.shapes.items():
        role = facts.planned_role(name)
        if role is not Role.VECTOR:
            of_kind = sizes.setdefault(_kind(role), {})
            of_kind[role] = of_kind.get(role, 0) + torch.Size(shape).numel()
    moves = []
    for kind, by_role in sizes.items():
        role = max(by_role, key=by_role.__getitem__)
        for each in configurations or (OF_HIDDEN if kind == HIDDEN else OTHERS):
            configuration = parse(each)
            if configuration.mechanism.suits((2, 2), role):
                moves.append((role, configuration))
    if not moves:
        raise PlanError("there is nothing to calibrate: no weight of the model supports any of the configurations.")
    return moves


def _plan(facts: ModelFacts, regime: str, moved: Role | None, configuration: Configuration) -> Plan:
    rest = parse(_REST)
    blocks: dict[tuple[Configuration, float], dict[str, Shape]] = {}
    roles = {name: (facts.role(name), shape) for name, shape in facts.shapes.items()}
    factors = lr_multipliers.multipliers(roles, regime)
    for name, shape in facts.shapes.items():
        is_moved = moved is not None and facts.planned_role(name) in _kind(moved)
        blocks.setdefault((configuration if is_moved else rest, factors[name]), {})[name] = shape
    return Plan(tuple(Block(f"{each.alias} x{by:g}", each, shapes, by) for (each, by), shapes in blocks.items()))


def _train(
    model: nn.Module,
    plan: Plan,
    loss_fn: Callable[[Any, Any], Tensor],
    batches: Sequence[Any],
    seed: int,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
) -> float:
    torch.manual_seed(seed)  # for dropout
    optimizer = BlockOptimizer(model, lr=lr, weight_decay=weight_decay, betas=betas, plan=plan)
    losses = []
    for batch in batches:
        loss = loss_fn(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return statistics.fmean(losses[-max(1, round(_COUNTED * len(losses))) :])


def reach(facts: ModelFacts, regime: str, steps: int, tokens: int) -> str:
    """Return how far the effects of short runs carry.

    Args:
        facts: The model.
        regime: The kind of training.
        steps: Steps of each run.
        tokens: Tokens of a step.

    Example:
        >>> facts = ModelFacts({"weight": (1000, 1000)}, {"weight": Role.MATRIX})
        >>> print(reach(facts, "finetune", 100, 1000))
        The runs had 0.1 tokens per hidden parameter.
        How far that carries to longer runs is not known: check the plan on one.
    """
    run = Scale.of(facts.hidden_numel, tokens, steps)
    lines = [f"The runs had {run.tokens / run.parameters:.2g} tokens per hidden parameter."]
    if regime != SCRATCH:
        return "\n".join([*lines, "How far that carries to longer runs is not known: check the plan on one."])
    laws, whole = Laws.load(), Scale.of(facts.hidden_numel, tokens)
    mean, low, high = laws.gain(whole)
    share = min(1.0, laws.worth_of(whole) / laws.worth_of(run))
    lines += [
        f"With {TOKENS_PER_PARAMETER}, expect {mean:+.1f}% ({low:+.1f} to {high:+.1f}) of Muon on hidden weights,",
        f"and {share:.0%} of the differences between formats. The table has the short runs.",
    ]
    return "\n".join(lines)


def effects_table(table: EffectTable) -> list[dict[str, str]]:
    """Return the effects as rows of text.

    Args:
        table: The effect table.

    Returns:
        Cells by column, best first within each role.
    """
    rows = []
    for regime, roles in table.effects.items():
        for role, known in roles.items():
            for configuration, effect in sorted(known.items(), key=lambda item: item[1].loss):
                error = f" ± {effect.error:.2f}" if effect.error else ""
                rows.append(
                    {
                        "regime": regime,
                        "role": role.value,
                        "configuration": configuration.alias,
                        "loss": f"{effect.loss:+.2f}%{error}",
                        "runs": str(effect.runs) if effect.runs else "-",
                    }
                )
    return rows

"""Measure what configurations do to the loss of your own workload, for plans that stand on it."""

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
from baoc.core.roles import HIDDEN, Role, canonical_name
from baoc.core.spec import DEFAULT_BETAS, SMALL_NUMEL, Shape, real_shape
from baoc.optim.optimizer import BlockOptimizer
from baoc.planning import rates
from baoc.planning.risk import Table
from baoc.planning.risk.calibration import Difference, table_of
from baoc.profiling.facts import Facts

OTHERS = ("adamw-8", "adamw[m=int8,v=factored]", "adamw[m=int4,v=factored]", "colnorm")
OF_HIDDEN = ("muon-8", "muon-4", "spectral", *OTHERS)
_COUNTED = 0.25  # of the steps, the last: their mean loss is what runs are compared by
_REST = "adamw-32"

OnRun = Callable[[int, int, str, float], None]
"""Called after each run with its number, how many there are, what was moved, and the loss."""


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
) -> Table:
    """Train once for each configuration of each role, and compare the losses with AdamW32's.

    The model itself is not changed. Runs of one repeat begin alike and see the same batches; their loss is the mean of
    the last quarter of the steps. The learning rate is the one you would train AdamW with; roles have theirs beside it
    as in plans, in all runs alike.

    Args:
        model: where training begins, from scratch or from trained weights.
        loss_fn: ``loss_fn(model, batch)`` returns the loss.
        batches: at least ``steps * repeats`` of them, or fewer, which are gone through again.
        steps: of each run. Short runs say little about momentum: a tenth of a real run is not too much.
        repeats: runs of each configuration, on other batches.
        lr: the one that you train AdamW with.
        weight_decay: likewise.
        betas: likewise.
        configurations: what to try, on every role that it suits; left out, the most useful ones.
        regime: "scratch" or "finetune"; left out, the weights tell.
        on_run: called after each run.

    >>> model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 64))
    >>> table = calibrate(
    ...     model, lambda model, x: model(x).square().mean(), [torch.ones(2, 64)], steps=4, repeats=1,
    ...     configurations=["muon-8"],
    ... )
    >>> table.effects["scratch"][Role.MATRIX][parse("muon-8")].runs
    1
    """
    if steps < 4 or repeats < 1:
        raise PlanError(f"cannot calibrate with {steps} steps and {repeats} repeats: give at least 4 and 1.")
    facts = Facts.of(model)
    regime = facts.regime if regime == "auto" else regime
    taken = _take(batches, steps * repeats)
    moves = _moves(model, facts, configurations)
    differences = []
    total, done = repeats * (1 + len(moves)), 0
    for repeat in range(repeats):
        mine = [taken[(repeat * steps + index) % len(taken)] for index in range(steps)]
        reference = 0.0
        for role, configuration in (None, parse(_REST)), *moves:
            plan = _plan(model, facts, regime, role, configuration)
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
        raise PlanError("there are no batches to calibrate with: give at least one.")
    return taken


def _kind(role: Role) -> tuple[Role, ...]:
    return HIDDEN if role in HIDDEN else (role,)


def _roles(model: nn.Module, facts: Facts) -> dict[str, tuple[Shape, Role]]:
    """Shape and role of every trainable parameter; small embeddings and heads are no more than vectors."""
    found = {}
    for full_name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        name, shape = canonical_name(full_name), real_shape(param)
        role = facts.role(name, shape)
        is_small = role in (Role.EMBEDDING, Role.HEAD) and param.numel() < SMALL_NUMEL
        found[name] = shape, Role.VECTOR if is_small else role
    return found


def _moves(
    model: nn.Module, facts: Facts, configurations: Sequence[Configuration | str] | None
) -> list[tuple[Role, Configuration]]:
    """What is tried: hidden weights move together, under the role that most of them have."""
    sizes: dict[tuple[Role, ...], dict[Role, int]] = {}
    for shape, role in _roles(model, facts).values():
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
        raise PlanError("there is nothing to calibrate: no weight of the model suits any of the configurations.")
    return moves


def _plan(model: nn.Module, facts: Facts, regime: str, moved: Role | None, configuration: Configuration) -> Plan:
    rest = parse(_REST)
    blocks: dict[tuple[Configuration, float], dict[str, Shape]] = {}
    roles = _roles(model, facts)
    factors = rates.lr_factors({name: (facts.role(name, shape), shape) for name, (shape, _) in roles.items()}, regime)
    for name, (shape, role) in roles.items():
        is_moved = moved is not None and role in _kind(moved)
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
    torch.manual_seed(seed)  # of dropout
    optimizer = BlockOptimizer(model, lr=lr, weight_decay=weight_decay, betas=betas, plan=plan)
    losses = []
    for batch in batches:
        loss = loss_fn(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return statistics.fmean(losses[-max(1, round(_COUNTED * len(losses))) :])


def effects_table(table: Table) -> list[dict[str, str]]:
    """The effects as rows for a person, best first within each role."""
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

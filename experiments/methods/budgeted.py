"""BAOC at a budget, the paper's BAOC, and two simple heuristics that keep to the same budget.

The heuristics replace the paper's Heu-1 and Heu-2, which it does not define. Both start with 32-bit AdamW everywhere
and go down a ladder of configurations until the plan fits the budget:

- *by type*: rung by rung, first MLPs and convolutions go down, then attentions, then embeddings and heads; of each,
  the last layer first;
- *by size*: the block that holds most state goes down, again and again.

Vectors keep 32 bits. The heuristics read no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import baoc
from baoc import BAOC, EffectPlanner, PaperPlanner
from baoc.core.budget import memory_budget
from baoc.core.plan import Block, Plan, PlanError
from baoc.planners.base import Planner
from baoc.planners.paper.units import structural_units
from experiments.methods.base import Build, Method, Settings
from experiments.methods.roles import Part, parts

LADDER = ("adamw-32", "adamw-16", "adamw-8", "adamw[m=int8,v=factored]", "adafactor-32", "sgdwm-8")
ADAMW_RMS = 0.2  # of an update, in units of lr, as torch.optim.Muon's match_rms_adamw has it
TIME = 2.0
"""Limit of the step time of our plans, relative to AdamW16. A step has so few tokens here that the default of 1.1 would
leave Muon out of most matrices."""
SGD_LR_SCALE = 100.0  # what people give SGD, 0.1, to what they give AdamW, 0.001


Change = Callable[[Planner, Settings], Planner]
"""Returns a planner with some settings changed, which may depend on the run."""


def _unchanged(planner: Planner, settings: Settings) -> Planner:
    return planner


def baoc_at(share: float | str, change: Change = _unchanged) -> Method:
    """Return our BAOC, which plans by measured effects within :data:`TIME`.

    Args:
        share: of AdamW16's state, or ``"auto"``.
        change: changes the planner's settings, for ablations.
    """
    budget = share if isinstance(share, str) else f"{share:g}"
    build = _build(share, lambda settings: change(EffectPlanner(time=TIME), settings))
    return Method(f"baoc@{budget}", f"baoc default {budget}", build, note="matches its blocks' lr to AdamW's")


def baoc_paper_at(share: float, change: Change = _unchanged) -> Method:
    """Return the paper's BAOC: its configurations, its risk, its time guardrail and its warm-up.

    Update times are those of the cost model, not measured. `docs/equations.md` lists all differences from the paper.

    Args:
        share: of AdamW16's state.
        change: changes the planner's settings, for ablations.
    """

    def planner(settings: Settings) -> Planner:
        return change(PaperPlanner(warmup=settings.warmup, seed=settings.seed), settings)

    return Method(f"baoc-paper@{share:g}", f"BAOC (paper) {share:g}", _build(share, planner))


def _build(share: float | str, planner: Callable[[Settings], Planner]) -> Build:
    def build(model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
        return BAOC(
            model,
            lr=lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            memory=share,
            planner=planner(settings),
            verbose=False,
        )

    return build


def by_type_at(share: float) -> Method:
    return _planned(f"by-type@{share:g}", f"Heu-1 (by type) {share:g}", by_type, share)


def by_size_at(share: float) -> Method:
    return _planned(f"by-size@{share:g}", f"Heu-2 (by size) {share:g}", by_size, share)


def _planned(name: str, label: str, make_plan: Callable[[nn.Module, float], Plan], share: float) -> Method:
    def build(model: nn.Module, lr: float, settings: Settings) -> torch.optim.Optimizer:
        plan = make_plan(model, share)
        return baoc.BlockOptimizer(model, lr=lr, betas=settings.betas, weight_decay=settings.weight_decay, plan=plan)

    return Method(name, label, build, note="in the place of the paper's undefined heuristics")


def by_type(model: nn.Module, share: float) -> Plan:
    blocks = _blocks(model)
    order = list(blocks)

    def urgency(block: Block, rung: int) -> tuple[int, ...]:
        members = blocks[block.name]
        is_edge = any(part.role in ("embedding", "head") for part in members)
        is_attention = any(part.is_query_or_key for part in members)
        return -rung, -(2 * is_edge + is_attention), order.index(block.name)

    return _descend(model, blocks, share, urgency)


def by_size(model: nn.Module, share: float) -> Plan:
    return _descend(model, _blocks(model), share, lambda block, rung: (block.state_bytes, -rung))


def _blocks(model: nn.Module) -> dict[str, list[Part]]:
    """The structural units without their vectors."""
    by_name = {part.name: part for part in parts(model) if part.role != "vector"}
    blocks = {
        unit.name: [by_name[name] for name in unit.parameters if name in by_name] for unit in structural_units(model)
    }
    return {name: members for name, members in blocks.items() if members}


def _descend(
    model: nn.Module,
    blocks: Mapping[str, Sequence[Part]],
    share: float,
    urgency: Callable[[Block, int], tuple[int, ...]],
) -> Plan:
    """Take the most urgent block one rung down until the plan fits."""
    vectors = Block("vectors", baoc.parse(LADDER[0]), _shapes(part for part in parts(model) if part.role == "vector"))
    ladders = [_ladder(name, members) for name, members in blocks.items()]
    rungs = [0] * len(ladders)

    def plan() -> Plan:
        chosen = tuple(ladder[rung] for ladder, rung in zip(ladders, rungs))
        return Plan((vectors, *chosen) if vectors.parameters else chosen)

    budget = memory_budget(share, plan().reference_bytes)
    while plan().state_bytes > budget:
        movable = [i for i, ladder in enumerate(ladders) if rungs[i] + 1 < len(ladder)]
        if not movable:
            least = plan()
            raise PlanError(
                f"no plan of this heuristic fits {budget} bytes: the smallest holds {least.state_bytes}, "
                f"{least.state_bytes / least.reference_bytes:.1%} of AdamW16's state."
            )
        rungs[max(movable, key=lambda i: urgency(ladders[i][rungs[i]], rungs[i]))] += 1
    return plan()


def _ladder(name: str, members: Sequence[Part]) -> list[Block]:
    """The block on each rung that saves something: for a convolution, factors do not."""
    ladder: list[Block] = []
    for spelling in LADDER:
        block = Block(name, baoc.parse(spelling), _shapes(members))
        if not ladder or block.state_bytes < ladder[-1].state_bytes:
            ladder.append(replace(block, lr_scale=lr_scale(block, [part.param for part in members])))
    return ladder


def lr_scale(block: Block, params: Sequence[Tensor]) -> float:
    """What makes updates about as long as AdamW's, as far as it can be known without gradients."""
    mechanism = block.configuration.mechanism_name
    if mechanism.startswith("sgd"):
        return SGD_LR_SCALE
    if mechanism != "adafactor" or any(param.is_meta for param in params):
        return 1.0
    squares = sum(param.detach().double().square().sum().item() for param in params)
    rms = (squares / block.numel) ** 0.5  # Adafactor's step is relative to it, and to no less than 0.001
    return float(f"{ADAMW_RMS / max(rms, 1e-3):.3g}")


def _shapes(members: Iterable[Part]) -> dict[str, tuple[int, ...]]:
    return {part.name: tuple(part.param.shape) for part in members}

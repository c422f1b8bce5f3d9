"""Explain a plan: how it uses its budgets, what more budget would gain, and why each block has its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from textwrap import fill
from typing import Any

from baoc.core.configuration import BUDGET_REFERENCE
from baoc.core.plan import Block, Plan
from baoc.core.splits import describe
from baoc.core.text import (
    WIDTH,
    human_bytes,
    human_count,
    plan_reasons,
    predicted_interval,
    printable,
    short_prediction,
    table,
)
from baoc.planners.effect_table import TERM

_MIB, _GIB = 2**20, 2**30


class ReportError(ValueError):
    """A plan, gradient statistics or a log do not contain the requested information."""


def find_block(plan: Plan, wanted: str) -> Block:
    """Find a block by name, by parameter, or by a pattern that matches exactly one block.

    Args:
        plan: The plan.
        wanted: The name of a block, the name of a parameter, or a pattern such as ``*head*``.

    Returns:
        The block.

    Raises:
        ReportError: If no block or several blocks match.

    Example:
        >>> plan = Plan.uniform("adamw-8", {"embed.weight": (64, 8)})
        >>> find_block(plan, "embed.*").name
        'all'
    """
    for block in plan.blocks:
        if block.name == wanted:
            return block
    for block in plan.blocks:
        if wanted in block.parameters:
            return block
    by_name = [block for block in plan.blocks if fnmatchcase(block.name, wanted)]
    found = by_name or [block for block in plan.blocks if any(fnmatchcase(name, wanted) for name in block.parameters)]
    if len(found) == 1:
        return found[0]
    names = [block.name for block in found or plan.blocks]
    if found:
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        raise ReportError(f"{wanted!r} matches {len(found)} blocks: {', '.join(names[:6])}{more}. Name one of them.")
    parameters = [name for block in plan.blocks for name in block.parameters]
    close = get_close_matches(wanted, (*names, *parameters), n=3, cutoff=0.3) or names[:3]
    raise ReportError(f"no block or parameter matches {wanted!r}. The closest names: {', '.join(close)}.")


def total_risk(plan: Plan) -> float:
    """Return the sum of the risks of all blocks."""
    return sum(sum(block.risk.values()) for block in plan.blocks)


def explain_plan(plan: Plan, *, wide: bool = False) -> str:
    """Explain a plan: its blocks, the reasons, its configurations and its budgets.

    Args:
        plan: The plan.
        wide: Whether to keep names at full length.

    Returns:
        Text for a terminal.
    """
    reasons = [] if wide else [*plan_reasons(plan), ""]
    return "\n".join((plan.table(wide=wide), "", *reasons, _configurations(plan), "", *_budgets(plan)))


def explain_block(block: Block, *, wide: bool = False) -> str:
    """Explain one block: its configuration, its state, the reason, and its tensors.

    Args:
        block: The block.
        wide: Whether to keep the names of tensors at full length.

    Returns:
        Text for a terminal.
    """
    reference = block.state_bytes_as(BUDGET_REFERENCE)
    share = f", {block.state_bytes / reference:.1%} of it" if reference else ""
    lr_scale = "not set: 1, or matched if state is inherited" if block.lr_scale is None else f"{block.lr_scale:.4g}"
    facts = [
        ["configuration", _with_alias(block)],
        ["state", f"{human_bytes(block.state_bytes)} ({human_bytes(reference)} under AdamW16{share})"],
        *([["on", "the host, where its update runs"]] if block.host else []),
        ["lr scale", lr_scale],
        *_risks(block),
        *([["why", block.why]] if block.why else []),
    ]
    width = max(len(name) for name, _ in facts)
    header = ["tensor", "shape", *(["matrices"] if block.splits else []), "state", "under AdamW16"]
    rows = [
        [
            name,
            " x ".join(map(str, shape)) or "scalar",
            *([_matrices(block, name)] if block.splits else []),
            human_bytes(block.configuration.state_bytes(shape)),
            human_bytes(BUDGET_REFERENCE.state_bytes(shape)),
        ]
        for name, shape in block.parameters.items()
    ]
    count = f"{len(block.parameters)} tensor{'s' if len(block.parameters) != 1 else ''}"
    lines = [f"{printable(block.name)}: {count}, {human_count(block.numel)} parameters", ""]
    lines += [_wrapped(f"{name.ljust(width)}  ", text) for name, text in facts]
    return "\n".join([*lines, "", table(header, rows, right=header[-2:], shorten=None if wide else "tensor")])


def _matrices(block: Block, name: str) -> str:
    split = block.splits.get(name)
    return "" if split is None else describe(split, block.parameters[name])


def plan_content(plan: Plan) -> dict[str, Any]:
    """Return a plan as values for JSON."""
    return {
        "state_bytes": plan.state_bytes,
        "reference_bytes": plan.reference_bytes,
        "host_bytes": plan.host_bytes,
        "risk": total_risk(plan),
        "settings": dict(plan.settings),
        "configurations": {
            name: {"blocks": len(blocks), "state_bytes": sum(block.state_bytes for block in blocks)}
            for name, blocks in _by_configuration(plan).items()
        },
        "blocks": [block_content(block) for block in plan.blocks],
    }


def block_content(block: Block) -> dict[str, Any]:
    """Return a block as values for JSON."""
    return {
        "name": block.name,
        "configuration": str(block.configuration),
        "lr_scale": block.lr_scale,
        "host": block.host,
        "risk": dict(block.risk),
        "why": block.why,
        "parameters": block.numel,
        "state_bytes": block.state_bytes,
        "reference_bytes": block.state_bytes_as(BUDGET_REFERENCE),
        "tensors": [
            {
                "name": name,
                "shape": list(shape),
                **({"matrices": _matrices(block, name)} if name in block.splits else {}),
                "state_bytes": block.configuration.state_bytes(shape),
                "reference_bytes": BUDGET_REFERENCE.state_bytes(shape),
            }
            for name, shape in block.parameters.items()
        ],
    }


def _wrapped(lead: str, text: str) -> str:
    """Wrap text to the width of a terminal, with a hanging indent."""
    return fill(text, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_long_words=False)


def _configurations(plan: Plan) -> str:
    header = ["configuration", "blocks", "parameters", "state"]
    rows = [
        [
            name,
            len(blocks),
            human_count(sum(block.numel for block in blocks)),
            human_bytes(sum(block.state_bytes for block in blocks)),
        ]
        for name, blocks in _by_configuration(plan).items()
    ]
    return table(header, rows, right=header[1:])


def _by_configuration(plan: Plan) -> dict[str, list[Block]]:
    found: dict[str, list[Block]] = {}
    for block in plan.blocks:
        found.setdefault(str(block.configuration), []).append(block)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _budgets(plan: Plan) -> list[str]:
    settings = plan.settings
    if "planner" not in settings:
        return ["The plan has no budgets: it was written by hand."]
    numbers = {name: float(value) for name, value in settings.items() if isinstance(value, (int, float))}
    is_loss, risk = "expected_loss" in numbers, total_risk(plan)
    is_per_rank = settings.get("per_rank") is True
    lines = [f"memory: {_used(plan.device_bytes, numbers.get('memory_budget'), human_bytes, is_per_rank)}"]
    if "host_memory_budget" in numbers or plan.host_bytes:
        allowed = numbers.get("host_memory_budget", 0.0)
        lines.append(f"host:   {_used(plan.host_bytes, allowed, human_bytes, is_per_rank)}")
    if "memory_budget" in numbers and "memory_price" in numbers:
        unit, name = _unit(numbers["memory_budget"])
        lines.append(_price(numbers["memory_price"] * unit, f"one more {name}", "more memory", is_loss))
    if "time" in numbers:
        ratio = "a training step" if is_loss else "the average update of a block"
        lines.append(f"time:   {_used(numbers['time'], numbers.get('time_budget'), '{:.2f}'.format)}")
        lines.append(f"        relative to AdamW16, for {ratio}")
        if "time_budget" in numbers and "time_price" in numbers:
            lines.append(_price(numbers["time_price"] * 0.01, "0.01 more", "more time", is_loss))
    lead, total = (
        ("loss:   ", short_prediction(risk, predicted_interval(settings))) if is_loss else ("risk:   ", f"{risk:.4f}")
    )
    source = f", {settings['expected_source']}" if is_loss and settings.get("expected_source") else ""
    lines.append(_wrapped(lead, total + source + _proof(numbers, risk, is_loss)))
    return lines


def _used(used: float, allowed: float | None, text: Callable[[float], str], is_per_rank: bool = False) -> str:
    """Format how much of a budget is used. A budget of ``None`` has no ceiling."""
    if allowed is None:
        return f"{text(used)} used, no limit"
    if is_per_rank:  # the file does not say how the parameters are sharded
        return f"{text(used)} used on all ranks, {text(allowed)} allowed on each"
    share = f" ({used / allowed:.1%})" if allowed else ""
    over = ", OVER the budget: the plan was edited" if used > allowed + 1e-9 else ""
    return f"{text(used)} used of {text(allowed)} allowed{share}{over}"


def _unit(nbytes: float) -> tuple[int, str]:
    """Return a unit that is small beside a budget."""
    return (2**10, "KiB") if nbytes < 16 * _MIB else (_MIB, "MiB") if nbytes < 16 * _GIB else (_GIB, "GiB")


def _price(per_unit: float, unit: str, more: str, is_loss: bool) -> str:
    what, percent = ("loss", "%") if is_loss else ("risk", "")
    if per_unit <= 0:
        return f"        {more} would not lower the {what}"
    return f"        {unit} would lower the {what} by about {per_unit:.2g}{percent}, on average"


def _proof(numbers: Mapping[str, float], risk: float, is_loss: bool) -> str:
    """Say how far the plan can be from the best one within its budgets."""
    if not {"objective", "bound"} <= set(numbers):
        return ""
    objective, bound = numbers["objective"], numbers["bound"]
    if abs(objective - risk) > 1e-3:  # larger than the rounding in the file
        return f"; the planner's objective was {objective:.4f}, so the plan has preferences or was edited"
    if not is_loss:
        gap = objective - bound
        return ", proven optimal within the budgets" if gap <= 1e-9 else f", at most {gap:.2g} above the optimum"
    given_up = numbers.get("given_up", 0.0)
    simpler = f", with {given_up:.2f}% given up for a simpler plan" if given_up >= 0.005 else ""
    # the bound holds for all plans, also for those that mix many configurations
    return f"{simpler}; proven: no plan within the budgets is predicted to be better than {bound:+.2f}%"


def _risks(block: Block) -> list[list[str]]:
    """Return the risk of the block, and its terms if there are several."""
    total = sum(block.risk.values())
    if not block.risk:
        return [["risk", "unknown: the plan was written by hand"]]
    if set(block.risk) == {TERM}:
        return [[TERM, f"{total:+.2f}% expected against AdamW32"]]
    return [["risk", f"{total:.4f}"], *([f"  {term}", f"{value:.4f}"] for term, value in block.risk.items())]


def _with_alias(block: Block) -> str:
    spelled, alias = str(block.configuration), block.configuration.alias
    return spelled if alias == spelled else f"{spelled} ({alias})"

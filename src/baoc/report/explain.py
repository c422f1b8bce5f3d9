"""What a plan says: what its budgets are used for and worth, and why a block is configured as it is."""

from __future__ import annotations

from difflib import get_close_matches
from fnmatch import fnmatchcase
from textwrap import fill
from typing import Any

from baoc.core.configuration import REFERENCE
from baoc.core.plan import Block, Plan
from baoc.core.text import WIDTH, human_bytes, human_count, shortened, table
from baoc.planning.risk.measured import TERM

_NAME = 32  # columns
_MIB, _GIB = 2**20, 2**30


class ReportError(ValueError):
    """A question that the plan or the profile cannot answer."""


def find_block(plan: Plan, wanted: str) -> Block:
    """The block with this name, with this parameter, or the only one whose name or parameters match a pattern.

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
    raise ReportError(f"no block and no parameter is called {wanted!r}. The closest names: {', '.join(close)}.")


def total_risk(plan: Plan) -> float:
    return sum(sum(block.risk.values()) for block in plan.blocks)


def explain_plan(plan: Plan, *, wide: bool = False) -> str:
    """The table, why blocks have what they have, how many have which configuration, and the budgets.

    ``wide`` has the reasons in the table, and names as long as they are.
    """
    reasons = [] if wide else _reasons(plan)
    return "\n".join((plan.table(wide=wide), "", *reasons, _configurations(plan), "", *_budgets(plan)))


def explain_block(block: Block, *, wide: bool = False) -> str:
    """Everything the plan knows about one block; ``wide`` has names of tensors as long as they are."""
    reference = block.state_bytes_as(REFERENCE)
    share = f", {block.state_bytes / reference:.1%} of it" if reference else ""
    lr_scale = "not set: 1, or matched when state is inherited" if block.lr_scale is None else f"{block.lr_scale:.4g}"
    facts = [
        ["configuration", _with_alias(block)],
        ["state", f"{human_bytes(block.state_bytes)} ({human_bytes(reference)} under AdamW16{share})"],
        *([["on", "the host: its update is made there"]] if block.host else []),
        ["lr scale", lr_scale],
        *_risks(block),
        *([["why", block.why]] if block.why else []),
    ]
    width = max(len(name) for name, _ in facts)
    header = ["tensor", "shape", "state", "under AdamW16"]
    rows = [
        [
            name,
            " x ".join(map(str, shape)) or "scalar",
            human_bytes(block.configuration.state_bytes(shape)),
            human_bytes(REFERENCE.state_bytes(shape)),
        ]
        for name, shape in block.parameters.items()
    ]
    count = f"{len(block.parameters)} tensor{'s' if len(block.parameters) != 1 else ''}"
    lines = [f"{block.name}: {count}, {human_count(block.numel)} parameters", ""]
    lines += [_wrapped(f"{name.ljust(width)}  ", text) for name, text in facts]
    return "\n".join([*lines, "", table(header, rows, right=header[2:], shorten=None if wide else "tensor")])


def plan_content(plan: Plan) -> dict[str, Any]:
    """The plan for a program."""
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
    """A block for a program."""
    return {
        "name": block.name,
        "configuration": str(block.configuration),
        "lr_scale": block.lr_scale,
        "host": block.host,
        "risk": dict(block.risk),
        "why": block.why,
        "parameters": block.numel,
        "state_bytes": block.state_bytes,
        "reference_bytes": block.state_bytes_as(REFERENCE),
        "tensors": [
            {
                "name": name,
                "shape": list(shape),
                "state_bytes": block.configuration.state_bytes(shape),
                "reference_bytes": REFERENCE.state_bytes(shape),
            }
            for name, shape in block.parameters.items()
        ],
    }


def _wrapped(lead: str, text: str) -> str:
    """In lines of a terminal, all but the first beginning where the text does."""
    return fill(text, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead), break_long_words=False)


def _reasons(plan: Plan) -> list[str]:
    """One for each block, and for those together that have the same."""
    found: dict[str, list[str]] = {}
    for block in plan.blocks:
        if block.why:
            found.setdefault(block.why, []).append(shortened(block.name, _NAME))
    return [*(_wrapped("  ", f"{', '.join(names)}: {why}") for why, names in found.items()), ""] if found else []


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
    numbers = {name: float(value) for name, value in plan.settings.items() if isinstance(value, (int, float))}
    if "memory_budget" not in numbers:
        return ["The plan has no budgets: it was made by hand."]
    is_loss, risk = "expected_loss" in numbers, total_risk(plan)
    allowed, used = numbers["memory_budget"], plan.device_bytes
    lines = [f"memory: {_used(human_bytes(used), human_bytes(allowed), used, allowed)}"]
    if "host_memory_budget" in numbers or plan.host_bytes:
        allowed, used = numbers.get("host_memory_budget", 0), plan.host_bytes
        lines.append(f"host:   {_used(human_bytes(used), human_bytes(allowed), used, allowed)}")
    if "memory_price" in numbers:
        unit, name = (2**10, "KiB") if allowed < 16 * _MIB else (_MIB, "MiB") if allowed < 16 * _GIB else (_GIB, "GiB")
        lines.append(_price(numbers["memory_price"] * unit, f"one more {name}", "more memory", is_loss))
    if {"time", "time_budget"} <= set(numbers):
        time, limit = numbers["time"], numbers["time_budget"]
        ratio = "a training step" if is_loss else "blocks' updates, on average"
        lines.append(f"time:   {_used(f'{time:.2f}', f'{limit:.2f}', time, limit + 1e-9)}")
        lines.append(f"        of AdamW16's, for {ratio}")
        if "time_price" in numbers:
            lines.append(_price(numbers["time_price"] * 0.01, "0.01 more", "more time", is_loss))
    lead, total = ("loss:   ", f"{risk:+.2f}%") if is_loss else ("risk:   ", f"{risk:.4f}")
    lines.append(_wrapped(lead, total + _proof(numbers, risk)))
    return lines


def _used(used_text: str, allowed_text: str, used: float, allowed: float) -> str:
    share = f" ({used / allowed:.1%})" if allowed else ""
    over = ", OVER the budget: the plan was edited" if used > allowed else ""
    return f"{used_text} used of {allowed_text} allowed{share}{over}"


def _price(per_unit: float, unit: str, more: str, is_loss: bool) -> str:
    what, percent = ("loss", "%") if is_loss else ("risk", "")
    if per_unit <= 0:
        return f"        {more} would not lower the {what}"
    return f"        {unit} would lower the {what} by about {per_unit:.2g}{percent}, on average"


def _proof(numbers: dict[str, float], risk: float) -> str:
    if not {"objective", "bound"} <= set(numbers):
        return ""
    objective, gap = numbers["objective"], numbers["objective"] - numbers["bound"]
    if abs(objective - risk) > 1e-3:  # rounding in the file is below that
        return f"; it was planned for {objective:.4f}, so it has preferences or was edited"
    return ", proven the least within the budgets" if gap <= 1e-9 else f", at most {gap:.2g} above the least possible"


def _risks(block: Block) -> list[list[str]]:
    """What the block risks, and by which terms if there are several."""
    total = sum(block.risk.values())
    if not block.risk:
        return [["risk", "not known: the plan was made by hand"]]
    if set(block.risk) == {TERM}:
        return [[TERM, f"{total:+.2f}% expected against AdamW32"]]
    return [["risk", f"{total:.4f}"], *([f"  {term}", f"{value:.4f}"] for term, value in block.risk.items())]


def _with_alias(block: Block) -> str:
    spelled, alias = str(block.configuration), block.configuration.alias
    return spelled if alias == spelled else f"{spelled} ({alias})"

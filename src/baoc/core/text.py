"""Text for people: sizes, tables, plans, notices, and errors about argument names."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from textwrap import fill
from typing import TYPE_CHECKING, Any, ParamSpec

import torch.distributed as dist

if TYPE_CHECKING:
    from baoc.core.block import Block
    from baoc.core.plan import Plan

logger = logging.getLogger("baoc")

P = ParamSpec("P")

WIDTH = 80  # columns of a terminal
QUIET = "BAOC_QUIET"
_SHORTEST = 12
REGIME_TEXTS = {"scratch": "from scratch", "finetune": "in fine-tuning", "general": "no norm layers"}
"""What plans say about the kind of training that their effects were measured for."""
_NAMED = 3  # configurations in one line
_NAME_WIDTH = 32
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def human_bytes(nbytes: float) -> str:
    """Format bytes in the largest binary unit that keeps the number above one.

    Args:
        nbytes: the size.

    Returns:
        The size with its unit.

    Example:
        >>> human_bytes(498232320), human_bytes(12)
        ('475.2 MiB', '12 B')
    """
    size = float(nbytes)
    for unit in _UNITS:
        if abs(size) < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.{2 if unit in _UNITS[3:] else 1}f} {unit}"


def human_count(count: int) -> str:
    """Format a number of parameters.

    Args:
        count: the number.

    Returns:
        The number, rounded, with K, M or B.

    Example:
        >>> human_count(124439808), human_count(768)
        ('124.4M', '768')
    """
    for factor, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= 10 * factor or (count >= factor and factor > 10**3):
            return f"{count / factor:.1f}{unit}"
    return str(count)


def printable(text: str) -> str:
    r"""Escape characters that a terminal would interpret, such as escape sequences and line breaks.

    Args:
        text: text from outside, such as a name in a plan file.

    Returns:
        Text that is safe to print in one line.

    Example:
        >>> printable("layer\x1b[31m\n0")
        'layer\\x1b[31m\\n0'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(name: str, width: int) -> str:
    """Cut the middle out of a name that is too long. Its ends and a layer's number say the most.

    Args:
        name: the name, with parts between dots.
        width: the most characters.

    Returns:
        The name, or its two ends and its last number.

    Example:
        >>> shortened("model.layers.11.self_attn.q_proj.weight", 24), shortened("head.weight", 24)
        ('model..11.._proj.weight', 'head.weight')
    """
    if len(name) <= width:
        return name
    numbers = [f"..{part}.." for part in name.split(".")[1:-1] if part.isdecimal()]
    for cut in (*numbers[-1:], ".."):
        room = width - len(cut)
        tail = 2 * room // 3
        begin, end = name[: room - tail], name[len(name) - tail :]
        if cut == ".." or cut[1:-1] in name[len(begin) - 1 : len(name) - tail + 1]:  # else one of the ends has it
            break
    return f"{begin.rstrip('.')}{cut}{end.lstrip('.')}"


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Sequence[str] = (),
    shorten: str | None = None,
) -> str:
    """Align rows of cells in columns. Cells are made :func:`printable`.

    Args:
        header: the names of the columns.
        rows: the cells.
        right: columns to align to the right.
        shorten: the column whose names are cut so that the table has at most 80 columns of text.

    Returns:
        The lines of the table.

    Example:
        >>> print(table(["name", "bytes"], [["a", 1], ["bcd", 100]], right=["bytes"]))
        name  bytes
        ----  -----
        a         1
        bcd     100
    """
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    if shorten is not None:
        index = header.index(shorten)
        others = [max(map(len, column)) for column in zip(header, *cells)]
        room = max(_SHORTEST, WIDTH - sum(others) + others[index] - 2 * (len(header) - 1))
        for row in cells:
            row[index] = shortened(row[index], room)
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    lines = [list(header), ["-" * width for width in widths], *cells]

    def align(row: Sequence[str]) -> str:
        parts = (
            cell.rjust(width) if name in right else cell.ljust(width) for cell, width, name in zip(row, widths, header)
        )
        return "  ".join(parts).rstrip()

    return "\n".join(align(row) for row in lines)


_MEANT = {
    "budget": "memory",
    "learning_rate": "lr",
    "momentum": "betas",
    "beta1": "betas",
    "beta2": "betas",
    "bits": "plan",
    "configuration": "plan",
    "quiet": "verbose",
    "offload": "host_memory",
    "host_memory": "offload",
}
"""Names of other libraries or classes for the same argument, or nearly the same."""


def check_names(
    settings: Mapping[str, Any], caller: str, known: Iterable[str], moved: Mapping[str, str] | None = None
) -> None:
    """Raise if a keyword argument is unknown, and name the closest known one.

    Args:
        settings: the keyword arguments.
        caller: the function or class, for the error.
        known: the names that are accepted.
        moved: for names that another object accepts, where they belong, such as
            ``{"warmup": "planner=PaperPlanner(warmup=...)"}``.

    Raises:
        TypeError: for the first unknown name.

    Example:
        >>> check_names({"budget": 3}, "BAOC", ["memory", "lr"])
        Traceback (most recent call last):
        TypeError: BAOC has no argument 'budget'. Did you mean 'memory'?
        >>> check_names({"warmup": 50}, "BAOC", ["lr"], {"warmup": "planner=PaperPlanner(warmup=...)"})
        Traceback (most recent call last):
        TypeError: BAOC has no argument 'warmup': it is now planner=PaperPlanner(warmup=...).
    """
    known, moved = sorted(known), moved or {}
    for name in settings:
        if name in known:
            continue
        if name in moved:
            raise TypeError(f"{caller} has no argument {name!r}: it is now {moved[name]}.")
        meant = [_MEANT[name]] if _MEANT.get(name) in known else []
        close = meant or get_close_matches(name, [*known, *moved], n=1)
        hint = f"Did you mean {moved.get(close[0], repr(close[0]))}?" if close else f"Known: {', '.join(known)}."
        raise TypeError(f"{caller} has no argument {name!r}. {hint}")


def names_checked(
    caller: str, moved: Callable[[], Mapping[str, str]]
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return a decorator that lets a constructor call :func:`check_names` for its keyword arguments.

    Args:
        caller: the class, for the error.
        moved: returns where names of other objects belong. It is only called for an error.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        known = inspect.signature(init).parameters.keys() - {"self"}

        @functools.wraps(init)
        def checked(*args: P.args, **kwargs: P.kwargs) -> None:
            if not kwargs.keys() <= known:
                check_names(kwargs, caller, known, moved())
            init(*args, **kwargs)

        return checked

    return decorate


def notice(message: str, *, quiet: bool = False) -> None:
    """Tell the person who started the run something once, on the first rank only.

    The message is an INFO record of the logger ``baoc``. If logging has no handlers, nobody would see that record, so
    the message also goes to stderr.

    Args:
        message: the text.
        quiet: keep it from stderr. The environment variable ``BAOC_QUIET=1`` does the same.
    """
    if not is_first_rank():
        return
    logger.info(message)
    if not quiet and os.environ.get(QUIET, "0") in ("", "0") and not logger.hasHandlers():
        print(f"baoc: {message}", file=sys.stderr)


def is_first_rank() -> bool:
    """Return whether this process is the first rank, or the only process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") in ("", "0")  # torchrun's, before the process group exists


# ---- plans ----


def plan_table(plan: Plan, *, wide: bool = False) -> str:
    """Return the blocks of a plan as a table, with total bytes and the expected loss below it: see ``Plan.table``."""
    is_expectation = "expected_loss" in plan.settings
    low_bits = None if wide else _common_low_bits(plan)
    mark = {True: "*", False: " "} if any(block.host for block in plan.blocks) else {False: ""}
    columns: dict[str, Callable[[Block], object]] = {
        "block": lambda block: block.name,
        "tensors": lambda block: len(block.parameters),
        "params": lambda block: human_count(block.numel),
        "configuration": lambda block: str(block.configuration) if wide else _alias(block, low_bits),
        "state": lambda block: human_bytes(block.state_bytes) + mark[block.host],
    }
    if wide or not is_expectation or any(block.lr_scale not in (None, 1.0) for block in plan.blocks):
        columns["lr"] = lambda block: "-" if block.lr_scale is None else f"x{block.lr_scale:.3g}"
    if any(block.risk for block in plan.blocks):
        unit = "loss" if is_expectation else "risk"
        columns[unit] = lambda block: block.cost_text(is_expectation, wide)
    rows = [[text(block) for text in columns.values()] for block in plan.blocks]
    right = [name for name in columns if name not in ("block", "configuration") and not (wide and name == "risk")]
    shorten = None if wide else "block"
    reasons = ["", *plan_reasons(plan)] if wide and any(block.why for block in plan.blocks) else []
    lines = [table(list(columns), rows, right=right, shorten=shorten), *_summary(plan)]
    if low_bits is not None:
        lines.append(f"low bits of 16-bit weights: {_LOW_BITS_TEXTS.get(low_bits, low_bits)}")
    return "\n".join([*lines, *reasons])


def plan_reasons(plan: Plan) -> list[str]:
    """Return the reasons for the configurations of a plan in lines of 80 columns; the same reason is stated once."""
    found: dict[str, list[str]] = {}
    for block in plan.blocks:
        if block.why:
            found.setdefault(block.why, []).append(shortened(printable(block.name), _NAME_WIDTH))
    texts = [f"{', '.join(names)}: {printable(why)}" for why, names in found.items()]
    return [fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_long_words=False) for text in texts]


_LOW_BITS_TEXTS = {
    "16": "w=16, all that fp32 has",
    "8": "w=8, one byte for each weight",
    "sr": "w=sr, stochastic rounding",
    "none": "w=none, rounding to nearest loses small updates",
}


def _common_low_bits(plan: Plan) -> str | None:
    """Return the format of slot ``w`` that all blocks have; ``None`` if they differ or have none."""
    found = {block.configuration.weight for block in plan.blocks}
    return found.pop() if len(found) == 1 else None


def _alias(block: Block, low_bits: str | None) -> str:
    configuration = block.configuration
    return (configuration.with_weight(None) if low_bits is not None else configuration).alias


def _summary(plan: Plan) -> list[str]:
    share = plan.state_bytes / plan.reference_bytes if plan.reference_bytes else 0.0
    lines = [f"{human_bytes(plan.state_bytes)} of state, {share:.1%} of AdamW16's {human_bytes(plan.reference_bytes)}"]
    if plan.host_bytes:
        lines[0] += f"; *{human_bytes(plan.host_bytes)} in host memory"
    if plan.rows:
        lines[0] += f"; at most {human_bytes(plan.state_bytes_per_rank)} on a rank"
    lines += [f"split: {count} tensor{'s' * (count > 1)} as {text}" for text, count in plan.matrices.items()]
    if plan.workspace_bytes:
        lines.append(f"update workspace: up to {human_bytes(plan.workspace_bytes)} besides state")
    if (time := plan.settings.get("time")) is not None and "expected_loss" in plan.settings:
        tokens = plan.settings.get("tokens")
        lines.append(f"step time: about {time:.2f}x AdamW16's at {tokens} tokens per step (estimate)")
    if "expected_loss" in plan.settings:
        regime = REGIME_TEXTS.get(plan.settings.get("regime", ""), "")
        lines.append(f"predicted: {prediction(plan.settings)}, {regime}")
        notes = [source] if (source := plan.settings.get("expected_source", "")) else []
        if (given_up := plan.settings.get("given_up", 0.0)) >= 0.005:
            notes.append(f"{given_up:.2f}% given up for a simpler plan")
        lines += [f"           {printable(note)}" for note in notes]
    return lines


def one_line(plan: Plan) -> str:
    """Summarize a plan: its main configurations, its bytes, the expected loss and the estimated time of a step.

    Args:
        plan: the plan.

    Returns:
        One line of text.

    Example:
        >>> from baoc import Plan
        >>> one_line(Plan.uniform("adamw-8", {"weight": (64, 64), "bias": (64,)}))
        "adamw-8, 8.6 KiB of state (52.3% of AdamW16's)"
    """
    numel: dict[str, int] = {}
    low_bits = _common_low_bits(plan)
    for block in plan.blocks:
        alias = _alias(block, low_bits)
        numel[alias] = numel.get(alias, 0) + block.numel
    most = sorted(numel, key=lambda alias: -numel[alias])
    what = " + ".join(most[:_NAMED]) + (f" + {len(most) - _NAMED} more" if len(most) > _NAMED else "")
    share = plan.state_bytes / plan.reference_bytes if plan.reference_bytes else 0.0
    what += "" if low_bits is None else f", w={low_bits}"
    text = f"{what}, {human_bytes(plan.state_bytes)} of state ({share:.1%} of AdamW16's)"
    if plan.host_bytes:
        text += f", {human_bytes(plan.host_bytes)} of it in host memory"
    if "expected_loss" in plan.settings:
        time = f", {plan.settings['time']:.2f}x step time" if plan.settings.get("time") is not None else ""
        text += f", {_percent(plan.settings['expected_loss'])} loss{time} expected"
    return text


SEEN = 0.05
"""Percent of the loss that one decimal shows."""


def prediction(settings: Mapping[str, Any]) -> str:
    """Return the predicted change of the loss with its interval.

    >>> prediction({"expected_loss": -0.21, "expected_low": -0.62, "expected_high": 0.08})
    '-0.2% loss (-0.6 to +0.1) against AdamW32'
    >>> prediction({"expected_loss": 0.004})
    'no change of loss against AdamW32'
    """
    loss = settings["expected_loss"]
    low, high = predicted_interval(settings) or (loss, loss)
    interval = f" ({low:+.1f} to {high:+.1f})" if high - low >= SEEN else ""
    return f"{_percent(loss)} loss{interval} against AdamW32"


def short_prediction(loss: float, interval: tuple[float, float] | None) -> str:
    """Return a predicted change of the loss for a table, with its interval if one decimal shows it.

    >>> short_prediction(-0.214, (-0.6, 0.1)), short_prediction(0.0, (0.0, 0.01)), short_prediction(63.0, (-1.0, 133.0))
    ('-0.21% (-0.6, +0.1)', '+0.00%', '+63.00% (-1, +133)')
    """
    low, high = interval or (loss, loss)
    digits = 0 if max(-low, high) >= 10 else 1
    return f"{loss:+.2f}%" + (f" ({low:+.{digits}f}, {high:+.{digits}f})" if high - low >= SEEN else "")


def predicted_interval(settings: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the lowest and highest predicted change of the loss (90%); None without a prediction."""
    low, high = (settings.get(f"expected_{side}") for side in ("low", "high"))
    return None if low is None or high is None else (low, high)


def _percent(value: float) -> str:
    return f"{value:+.1f}%" if abs(value) >= SEEN else "no change of"

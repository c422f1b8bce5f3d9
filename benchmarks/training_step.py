"""How long whole training steps of GPT2-small take with the default plan, beside torch's fused AdamW.

    python -m benchmarks.training_step [--output PAGE] [--tokens BxL ...] [--time LIMIT ...] [--layers N] [--repeats N]

A step is the forward pass, the backward pass and the update. All optimizers share one model, and take turns in every
round. Times are processor seconds of this process: they hardly depend on what else runs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from baoc import BAOC, EffectPlanner, parse
from baoc.core.plan import Plan
from baoc.planners import cost
from baoc.tools.models import MODELS, ModelError
from benchmarks import machine
from benchmarks.markdown import save, table
from benchmarks.rows import LR
from benchmarks.timing import Spread, interleaved, paired_ratio, spread, timed

BATCH, LENGTH = 4, 128
REPEATS, QUICK_REPEATS = 5, 1
MEMORY = 0.25
TOKENS = ("4x128", "16x512")
VOCABULARY = 50_000


def forward_and_backward(quick: bool = False) -> Spread | None:
    """Seconds of one pass of GPT2-small over 4 x 128 tokens; ``None`` if its package is not installed."""
    try:
        model = MODELS["gpt2-small"]()
    except ModelError:
        return None
    run = _passes(model, *((1, 8) if quick else (BATCH, LENGTH)))
    run()
    return spread([timed(run) for _ in range(QUICK_REPEATS if quick else REPEATS)])


def _passes(model: nn.Module, batch: int, length: int) -> Callable[[], None]:
    tokens: Tensor = torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))

    def run() -> None:
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()

    return run


@dataclass(frozen=True)
class Row:
    """Steps of one optimizer at one size, in units of torch's."""

    tokens: str
    limit: float
    predicted: float
    measured: Spread
    seconds: Spread
    plan: str


def measure(layers: int | None, tokens: str, limits: Sequence[float], repeats: int) -> list[Row]:
    """Time steps over so many tokens, such as "4x128", with the plans of several time limits."""
    batch, length = map(int, tokens.split("x"))
    model = MODELS["gpt2-small"]()
    if layers is not None:
        model.transformer.h = model.transformer.h[:layers]
    passes = _passes(model, batch, length)
    optimizers = {limit: BAOC(model, lr=LR, memory=MEMORY, planner=EffectPlanner(time=limit)) for limit in limits}
    passes()  # one forward pass tells all of them the number of tokens
    for optimizer in optimizers.values():
        optimizer.step()
    fused = torch.optim.AdamW(model.parameters(), LR, fused=True)
    fused.step()

    def stepping(update: Callable[[], object]) -> Callable[[], None]:
        def step() -> None:
            passes()
            update()

        return step

    actions = {"fused": stepping(fused.step)}
    actions |= {str(limit): stepping(optimizer.step) for limit, optimizer in optimizers.items()}
    found = interleaved(actions, repeats, clock="process")
    return [
        Row(
            tokens,
            limit,
            predicted(optimizer.plan, batch * length),
            paired_ratio(found[str(limit)], found["fused"]),
            spread(found[str(limit)]),
            _shown_plan(optimizer.plan),
        )
        for limit, optimizer in optimizers.items()
    ]


def predicted(plan: Plan, tokens: int) -> float:
    """What the planner's model of time says of a plan's step, in units of one with AdamW in fp32."""
    placed = [(block.parameters[name], block.configuration) for name, block in plan.by_parameter]
    chosen = [*dict.fromkeys(configuration for _, configuration in placed), parse("adamw-32")]
    times = cost.step_times([shape for shape, _ in placed], [1] * len(placed), chosen, tokens)
    update = sum(row[chosen.index(configuration)] for row, (_, configuration) in zip(times.updates, placed))
    return float((times.base + update) / (times.base + times.updates[:, -1].sum()))


def _shown_plan(plan: Plan) -> str:
    counts = Counter(block.configuration.alias for name, block in plan.by_parameter if len(block.parameters[name]) > 1)
    return ", ".join(f"{count} `{alias}`" for alias, count in counts.most_common())


def page(rows: Sequence[Row], layers: int | None, command: str) -> str:
    about = machine.describe(())
    lines = [
        [
            row.tokens,
            f"{row.limit:g}",
            f"{row.seconds['median']:.1f} s",
            f"{row.predicted:.2f}",
            f"{row.measured['median']:.2f} ({row.measured['low']:.2f}-{row.measured['high']:.2f})",
            row.plan,
        ]
        for row in rows
    ]
    size = "GPT2-small" if layers is None else f"GPT2-small with {layers} of its 12 layers"
    parts = [
        "# Training steps",
        f"Made by `{command}` with torch {about['torch']} on {about['processor']}, {about['threads']} thread(s).",
        f"Whole steps (forward, backward, update) of {size} in fp32 with `BAOC(model, memory={MEMORY})`, by the "
        "planner's limit on time, in units of torch's fused AdamW: what the planner's model of time predicts, and the "
        "median (quartiles) of processor time over rounds in which all ran. Plans are counts of matrices.",
        table(["tokens", "time limit", "step", "predicted", "measured", "plan"], lines),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the page, a Markdown file; what follows '## Reading' is kept")
    parser.add_argument("--tokens", nargs="+", metavar="BxL", default=list(TOKENS), help="sequences x their length")
    parser.add_argument("--time", nargs="+", type=float, metavar="LIMIT", default=[EffectPlanner().time])
    parser.add_argument("--layers", type=int, metavar="N", help="keep so many of the model's 12 layers")
    parser.add_argument("--repeats", metavar="N", type=int, default=REPEATS, help=f"rounds (default: {REPEATS})")
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    rows = []
    for tokens in options.tokens:
        print(f"{tokens} tokens", file=sys.stderr, flush=True)
        rows += measure(options.layers, tokens, options.time, options.repeats)
    shown = [os.path.relpath(each) if os.path.isabs(each) else each for each in given]
    text = page(rows, options.layers, shlex.join(["python", "-m", "benchmarks.training_step", *shown]))
    print(text, end="")
    if options.output:
        save(text, options.output)


if __name__ == "__main__":
    main()

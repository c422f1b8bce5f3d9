"""How long whole training steps take with the default plan and with others' optimizers, beside torch's fused AdamW.

    python -m benchmarks.training_step [--output PAGE] [--model MODEL ...] [--tokens BxL ...] [--time LIMIT ...]
                                       [--layers N] [--repeats N]

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
from benchmarks.peak import MODELS as RECIPES
from benchmarks.rows import LR, rows
from benchmarks.timing import Spread, interleaved, paired_ratio, spread, timed
from benchmarks.workloads import GPT2

BATCH, LENGTH = 4, 128
REPEATS, QUICK_REPEATS = 5, 1
MEMORY = 0.25
TOKENS = ("4x128", "16x512")
VOCABULARY = 49_152
_AT_ONCE = 2048  # tokens of a forward and a backward pass: more take too much memory
REGIMES = {"gpt2-small": "scratch", "smollm2-135m": "finetune"}
"""Models, and what they are trained for."""
PEERS = ("bitsandbytes AdamW8bit", "torch Adafactor")


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
        for some in tokens.split(max(1, _AT_ONCE // length)):
            loss = model(input_ids=some, labels=some).loss * (len(some) / batch)
            loss.backward()

    return run


@dataclass(frozen=True)
class Row:
    """Steps of one optimizer at one size, in units of torch's. A peer has neither a time limit nor a prediction."""

    model: str
    tokens: str
    what: str
    limit: float | None
    predicted: float | None
    measured: Spread
    seconds: Spread


def measure(name: str, layers: int | None, tokens: str, limits: Sequence[float], repeats: int) -> list[Row]:
    """Time steps over so many tokens, such as "4x128", with the plans of several time limits, and of peers."""
    batch, length = map(int, tokens.split("x"))
    model = RECIPES[name]()
    if layers is not None:
        inner = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
        del inner[layers:]
    passes = _passes(model, batch, length)
    optimizers = {
        limit: BAOC(model, lr=LR, memory=MEMORY, planner=EffectPlanner(time=limit, regime=REGIMES[name]))
        for limit in limits
    }
    passes()  # one forward pass tells all of them the number of tokens
    fused = torch.optim.AdamW(model.parameters(), LR, fused=True)
    params = {name: param for name, param in model.named_parameters() if isinstance(param, nn.Parameter)}
    peers = {row.name: row.build(params) for row in rows(GPT2) if row.name in PEERS and row.installed}
    for each in (fused, *peers.values(), *optimizers.values()):
        each.step()
    plans: dict[str, float] = {}
    for limit, optimizer in optimizers.items():
        plans.setdefault(_shown_plan(optimizer.plan), limit)  # two limits may give one plan

    def stepping(update: Callable[[], object]) -> Callable[[], None]:
        def step() -> None:
            passes()
            update()

        return step

    actions = {"fused": stepping(fused.step)}
    actions |= {plan: stepping(optimizers[limit].step) for plan, limit in plans.items()}
    actions |= {peer: stepping(optimizer.step) for peer, optimizer in peers.items()}
    found = interleaved(actions, repeats, clock="process")

    def row(what: str, limit: float | None = None, expected: float | None = None) -> Row:
        return Row(name, tokens, what, limit, expected, paired_ratio(found[what], found["fused"]), spread(found[what]))

    ours = [row(plan, limit, predicted(optimizers[limit].plan, batch * length)) for plan, limit in plans.items()]
    return [*ours, *map(row, peers)]


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
            row.model,
            row.tokens,
            "-" if row.limit is None else f"{row.limit:g}",
            f"{row.seconds['median']:.1f} s",
            "-" if row.predicted is None else f"{row.predicted:.2f}",
            f"{row.measured['median']:.2f} ({row.measured['low']:.2f}-{row.measured['high']:.2f})",
            row.what,
        ]
        for row in rows
    ]
    size = "" if layers is None else f" of models with their first {layers} layers"
    regimes = " and ".join(f"{regime} ({name})" for name, regime in REGIMES.items())
    parts = [
        "# Training steps",
        f"Made by `{command}` with torch {about['torch']} on {about['processor']}, {about['threads']} thread(s).",
        f"Whole steps (forward, backward, update){size} in fp32 with random weights: `BAOC(model, memory={MEMORY})` by "
        f"the planner's limit on time, for the regimes {regimes}, and others' optimizers, on a CPU. In units of "
        "torch's fused AdamW: what the planner's model of time predicts, and the median (quartiles) of processor time "
        "over rounds in which all ran. Plans are counts of matrices.",
        table(["model", "tokens", "time limit", "step", "predicted", "measured", "plan or optimizer"], lines),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the page, a Markdown file; what follows '## Reading' is kept")
    parser.add_argument("--model", nargs="+", choices=REGIMES, default=list(REGIMES), help="(default: all)")
    parser.add_argument("--tokens", nargs="+", metavar="BxL", default=list(TOKENS), help="sequences x their length")
    parser.add_argument("--time", nargs="+", type=float, metavar="LIMIT", default=[EffectPlanner().time])
    parser.add_argument("--layers", type=int, metavar="N", help="keep so many of a model's layers")
    parser.add_argument("--repeats", metavar="N", type=int, default=REPEATS, help=f"rounds (default: {REPEATS})")
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    found = []
    for name in options.model:
        for tokens in options.tokens:
            print(f"{name}, {tokens} tokens", file=sys.stderr, flush=True)
            found += measure(name, options.layers, tokens, options.time, options.repeats)
    shown = [os.path.relpath(each) if os.path.isabs(each) else each for each in given]
    text = page(found, options.layers, shlex.join(["python", "-m", "benchmarks.training_step", *shown]))
    print(text, end="")
    if options.output:
        save(text, options.output)


if __name__ == "__main__":
    main()

"""From which share of strained groups on a block should have wider codes: what `BAOC(promote=...)` goes by.

The small GPT trains as it is, and with gradients of one input in 32 of every hidden matrix multiplied by a factor.
AdamW does not notice: it divides by it again. Codes do, since such an element shares its group with others that are
smaller by the factor: the larger it is, the fewer codes are left to them. So the same run says how many groups are
strained and what that costs, against the next wider codes on the same gradients.

    python -m experiments.strained --output docs/results/strained.md
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import baoc
from baoc.configurator.promotion import MANY, is_due, promoted, wider
from baoc.core.roles import roles_of
from baoc.planning.estimate import trainable_shapes
from experiments import corpus as corpora
from experiments.runs.markdown import table
from experiments.tiny_gpt import MakeOptimizer, test_loss, train

LR, DECAY = 2e-3, 0.1
_EVERY = 32  # inputs
HEALTHY = 1
TRIED: dict[str, tuple[int, ...]] = {
    "adamw[m=int4,v=factored]": (HEALTHY, 100, 1000),
    "adamw[m=int8,v=factored]": (HEALTHY, 10**4, 10**6),
    "adamw-8": (HEALTHY, 10**4, 10**6),
}
SPARSE = 2048  # inputs, of which a window of text has at most CONTEXT
CONTEXT = 8


@dataclass(frozen=True)
class Outcome:
    """Of one run."""

    loss: float
    first: float  # share that was strained after the first step
    later: float  # the largest that any other look found
    promotions: int = 0


def multiply(model: nn.Module, factor: float) -> None:
    """Multiply gradients of one input in so many of every hidden matrix."""

    def louder(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad[:, ::_EVERY] *= factor
        return grad

    for name, param in model.named_parameters():
        if name.startswith("blocks.") and param.dim() == 2:
            param.register_hook(louder)


def with_plan(configuration: str) -> MakeOptimizer:
    """One configuration for all; what Muon does not suit gets AdamW's int8."""
    spelling = f"{configuration} else adamw[m=int8,v=factored]" if configuration.startswith("muon") else configuration

    def make(model: nn.Module) -> torch.optim.Optimizer:
        uniform = baoc.Plan.uniform(spelling, trainable_shapes(model), roles_of(model))
        # as in the planner's plans: left open, it would be fitted to the last update, and strained codes make bad ones
        plan = baoc.Plan(tuple(replace(block, lr_scale=1.0) for block in uniform.blocks))
        return baoc.BlockOptimizer(model, lr=LR, weight_decay=DECAY, plan=plan)

    return make


class SparseInputs(nn.Module):
    """Predicts the next character from which of the last few stand where: nearly all inputs are zero, always."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SPARSE, 128), nn.ReLU(), nn.Linear(128, vocabulary))

    def loss(self, window: Tensor) -> Tensor:  # (batch, CONTEXT + 1)
        places = (window[:, :-1] * 31 + torch.arange(CONTEXT) * 257) % SPARSE
        inputs = torch.zeros(len(window), SPARSE).scatter_(1, places, 1.0)
        return F.cross_entropy(self.layers(inputs), window[:, -1])


def on_text(
    corpus: corpora.Corpus, make: MakeOptimizer, *, seed: int, steps: int, factor: float, promotes: bool = False
) -> Outcome:
    """The small GPT; ``promotes``: as ``BAOC`` does where its budget has room for any codes."""

    def prepared(model: nn.Module) -> torch.optim.Optimizer:
        multiply(model, factor)
        return make(model)

    found = Looks()
    for step, _, model, optimizer in train(corpus, prepared, seed=seed, steps=steps):  # noqa: B007 (used below)
        found.look(step, optimizer, promotes=promotes)
    return found.outcome(test_loss(corpus, model))


def on_sparse_inputs(corpus: corpora.Corpus, make: MakeOptimizer, *, seed: int, steps: int) -> Outcome:
    torch.manual_seed(seed)
    model = SparseInputs(len(corpus.vocabulary))
    generator = torch.Generator().manual_seed(seed)
    optimizer, found = make(model), Looks()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model.loss(corpus.batch(64, CONTEXT, generator)).backward()
        optimizer.step()
        found.look(step, optimizer)
    with torch.no_grad():
        return found.outcome(model.loss(corpus.test_windows(CONTEXT)).item())


class Looks:
    """What was seen of an optimizer's codes on the way, whenever ``BAOC`` would look."""

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._promotions = 0

    def look(self, step: int, optimizer: baoc.BlockOptimizer, *, promotes: bool = False) -> None:
        if not is_due(step):
            return
        shares = _shares(optimizer)
        self._seen.append(max(shares.values(), default=0.0))
        if promotes:
            plan, told = promoted(optimizer.plan, shares, None, lambda plan: True)
            if told:
                optimizer.set_plan(plan)
                self._promotions += len(told)

    def outcome(self, loss: float) -> Outcome:
        return Outcome(loss, self._seen[0], max(self._seen[1:], default=0.0), self._promotions)


def _shares(optimizer: baoc.BlockOptimizer) -> dict[str, float]:
    numbers = optimizer.metrics()
    return {key.removeprefix("strained/"): numbers[key] for key in numbers if key.startswith("strained/")}


Runs = dict[tuple[str, str, float], list[Outcome]]
"""Of every seed, by workload, configuration and factor."""


def measure(corpus: corpora.Corpus, seeds: int, steps: int) -> Runs:
    """All runs; a configuration that is the wider one of another is trained once."""
    runs: Runs = {}

    def run(workload: str, name: str, factor: float, once: Callable[[int], Outcome]) -> None:
        if (workload, name, factor) not in runs:
            runs[workload, name, factor] = [once(seed) for seed in range(seeds)]
            print(workload, name, f"x{factor:g}:", *runs[workload, name, factor], file=sys.stderr)

    for narrow, factors in TRIED.items():
        for factor in factors:
            for name in (narrow, _wider(narrow)):
                run("text", name, factor, lambda seed, name=name, factor=factor: on_text(
                    corpus, with_plan(name), seed=seed, steps=steps, factor=factor))  # fmt: skip
            if (
                max(max(each.first, each.later) for each in runs["text", narrow, factor]) < MANY
            ):  # it would be the same run
                runs["promoted", narrow, factor] = runs["text", narrow, factor]
            run("promoted", narrow, factor, lambda seed, narrow=narrow, factor=factor: on_text(
                corpus, with_plan(narrow), seed=seed, steps=steps, factor=factor, promotes=True))  # fmt: skip
        for name in (narrow, _wider(narrow)):
            run("sparse", name, HEALTHY, lambda seed, name=name: on_sparse_inputs(
                corpus, with_plan(name), seed=seed, steps=steps))  # fmt: skip
    for narrow in ("muon-4", "muon-8"):
        for name in (narrow, _wider(narrow)):
            run("text", name, HEALTHY, lambda seed, name=name: on_text(
                corpus, with_plan(name), seed=seed, steps=steps, factor=HEALTHY))  # fmt: skip
    return runs


def _wider(name: str) -> str:
    found = wider(baoc.parse(name))
    assert found is not None
    return found.alias


def report(runs: Runs, command: str, seeds: int, steps: int) -> str:
    header = ["run", "codes", "factor", "strained after a step", "later, at most"]
    header += ["loss against the next wider codes", "with promotion", "promoted"]
    rows = []
    for (workload, name, factor), outcomes in runs.items():
        against = runs.get((workload, _wider(name), factor)) if wider(baoc.parse(name)) else None
        if workload == "promoted" or against is None:
            continue
        mended = runs.get(("promoted", name, factor)) if workload == "text" else None
        rows.append(
            [
                {"text": "small GPT", "sparse": "sparse inputs"}[workload],
                f"`{name}`",
                f"{factor:,.0f}",
                f"{max(each.first for each in outcomes):.1%}",
                f"{max(each.later for each in outcomes):.1%}",
                _changes(outcomes, against),
                _changes(mended, against) if mended else "",
                f"{sum(each.promotions > 0 for each in mended)} of {seeds} seeds" if mended else "",
            ]
        )
    return "\n".join(
        [
            "# When codes are too narrow",
            "",
            f"Made by `{command}`: {seeds} seeds, {steps} steps, lr {LR:g}, one thread.",
            "",
            *(__doc__ or "").split("\n\n")[1].splitlines(),
            "",
            f"*Sparse inputs* is a model all but {CONTEXT} of whose {SPARSE:,} inputs are zero: most of a group has no",
            "gradient for many steps, which is no fault of its codes. Strain is the share of a block's groups, at most",
            f"over blocks and seeds; `BAOC` looks after {_listed()} and so on, and promotes from {MANY:.0%} on.",
            "Losses are of the test text, each seed against the same seed.",
            "",
            *table(header, rows),
            "",
        ]
    )


def _listed() -> str:
    due = [str(step) for step in range(1, 201) if is_due(step)]
    return f"{', '.join(due)} steps"


def _changes(outcomes: list[Outcome], against: list[Outcome]) -> str:
    changes = [one.loss / other.loss - 1 for one, other in zip(outcomes, against)]
    each = ", ".join(f"{change:+.2%}" for change in changes)
    return f"{statistics.mean(changes):+.2%} ({each})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="a Markdown file; standard output if left out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs = measure(corpora.load(), arguments.seeds, arguments.steps)
    command = " ".join(["python -m experiments.strained", *sys.argv[1:]])
    text = report(runs, command, arguments.seeds, arguments.steps)
    if arguments.output:
        arguments.output.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()

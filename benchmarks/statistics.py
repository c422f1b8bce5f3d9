"""What the paper's warm-up costs: sampling at every step, the memory of the samples, and planning at the end.

    python -m benchmarks.statistics [--quick] [--json]

Sampling is timed on GPT2-small with random weights (fp32, 1 x 128 random tokens), beside the forward and backward pass
of the same round and with a cold cache, as it is in training. A time is the median of all rounds, with the quartiles.
The end of the warm-up is everything between the last sampled step and the plan. GPT2-small uses those samples.
Llama-3.2-1B uses synthetic ones, as many and on the same grids as a sampler's, so the model itself is not needed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from baoc import Budget, ModelFacts, PaperPlanner
from baoc.core.spec import DEFAULT_BETAS, Shape
from baoc.core.text import human_bytes
from baoc.planners import cost
from baoc.planners.paper import problem, units
from baoc.planners.paper.coordinates import RATIO, draw, sample_counts
from baoc.planners.paper.problem import PaperProblem
from baoc.planners.paper.sampling import Sampler
from baoc.planners.paper.statistics import GradientStatistics, TensorRecord
from baoc.tools.estimate import trainable_shapes
from baoc.tools.models import MODELS
from benchmarks.machine import OtherLoad, describe
from benchmarks.timing import paired_ratio, spread, timed

Result = dict[str, Any]
Row = dict[str, Any]

GPT2, LLAMA = "gpt2-small", "llama-3.2-1b"
TOKENS = (1, 128)
RATIOS = (0.0001, 0.0003, RATIO, 0.003, 0.01)
WARMUP = 50
MOST_TIME, MOST_MEMORY = 0.01, 0.002  # of a forward and backward pass, and of the parameters' bytes
MOST_SECONDS = {GPT2: 5.0, LLAMA: 15.0}
_CACHE = 1 << 25  # fp32 elements: more than any cache
_METRICS, _PARTITION, _RISKS, _MEMORY, _TIMES, _SOLVE, _REST = STAGES = (
    "metrics of units",
    "partition",
    "metrics and risks of blocks",
    "bytes",
    "time ratios",
    "solve",
    "write the plan",
)


def run(quick: bool = False) -> Result:
    """Measure everything. The result is plain numbers and names: rows for sampling, stages and targets."""
    load = OtherLoad()
    torch.manual_seed(0)
    model = MODELS[GPT2]().train()
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    samplers = {ratio: Sampler(params, ratio=ratio) for ratio in RATIOS}
    passes, observing = _time_sampling(model, params, samplers, rounds=4 if quick else 15)
    statistics = GradientStatistics.from_sampler(samplers[RATIO], params)
    repeats = 2 if quick else 4
    ends = [
        *_time_ends(GPT2, statistics, repeats, synthetic=False),
        *_time_ends(LLAMA, synthetic_statistics(_shapes(LLAMA)), repeats, synthetic=True),
    ]
    parameter_bytes = sum(param.numel() * param.element_size() for param in params.values())
    sampling = [
        {
            "ratio": ratio,
            "coordinates": sum(stream.coordinates.count for stream in sampler.streams.values()),
            "seconds": spread(observing[ratio]),
            "share_of_pass": paired_ratio(observing[ratio], passes),
            "bytes": sampler.nbytes,
            "share_of_parameters": sampler.nbytes / parameter_bytes,
        }
        for ratio, sampler in samplers.items()
    ]
    return {
        "machine": describe(["transformers"]),
        "other_load": load.share(),
        "model": GPT2,
        "tokens": list(TOKENS),
        "rounds": len(passes),
        "parameter_bytes": parameter_bytes,
        "pass_seconds": spread(passes),
        "sampling": sampling,
        "end_of_warmup": ends,
        "targets": _targets(sampling, ends),
    }


def synthetic_statistics(shapes: Mapping[str, Shape], seed: int = 0) -> GradientStatistics:
    """Return statistics without a model: random moments, as many and on the same grids as a sampler's.

    >>> statistics = synthetic_statistics({"weight": (1000, 1000)})
    >>> len(statistics.records["weight"].second), len(statistics.records["weight"].dots)
    (1000, 50)
    """
    generator, luck = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    records = {}
    counts = sample_counts(shapes)
    for name, shape in shapes.items():
        coordinates = draw(shape, generator, counts[name])
        second = np.exp(luck.normal(-16, luck.uniform(0.5, 2), coordinates.count))
        squares = luck.uniform(0.5, 2, WARMUP) * second.sum()
        records[name] = TensorRecord(
            name=name,
            shape=shape,
            grid=coordinates.grid,
            first=np.sqrt(second) * luck.normal(0, 0.3, coordinates.count),
            second=second,
            values=luck.normal(0, 0.02, coordinates.count),
            dots=luck.uniform(0, 0.8) * squares,
            squares=squares,
        )
    return GradientStatistics(records, WARMUP, 0, seed, RATIO, DEFAULT_BETAS, ModelFacts(shapes))


def table(result: Result) -> str:
    """The result as plain text."""
    once = result["pass_seconds"]
    lines = [
        f"{result['model']}, {' x '.join(map(str, result['tokens']))} tokens, {result['rounds']} rounds: forward and "
        f"backward {once['median']:.3f} s ({once['low']:.3f}-{once['high']:.3f}); other processes used "
        f"{_percent(result['other_load'])} of the machine",
        "",
        f"{'s':>6} {'coordinates':>11} {'sampling, ms (quartiles)':>26} {'of the pass':>11} {'held':>10} "
        f"{'of the parameters':>17}",
    ]
    for row in result["sampling"]:
        milliseconds = {key: 1000 * value for key, value in row["seconds"].items()}
        times = f"{milliseconds['median']:.2f} ({milliseconds['low']:.2f}-{milliseconds['high']:.2f})"
        lines.append(
            f"{row['ratio']:>6.2%} {row['coordinates']:>11,} {times:>26} {row['share_of_pass']['median']:>11.2%} "
            f"{human_bytes(row['bytes']):>10} {row['share_of_parameters']:>17.3%}"
        )
    ends = result["end_of_warmup"]
    lines += ["", f"{'end of the warm-up, seconds':<30}" + "".join(f"{_label(row):>22}" for row in ends)]
    for stage in (*STAGES, "total"):
        lines.append(f"  {stage:<28}" + "".join(f"{row[stage]:>22.3f}" for row in ends))
    lines += [f"  {'blocks':<28}" + "".join(f"{row['blocks']:>22}" for row in ends), ""]
    if any(row["synthetic"] for row in ends):
        lines += [f"{LLAMA}: its shapes are real, all of its samples are synthetic.", ""]
    lines += [
        f"{target['outcome']:<5} {target['what']}: {target['measured']:.3g} {target['unit']}, wanted at most "
        f"{target['limit']:g} {target['unit']}"
        for target in result["targets"]
    ]
    return "\n".join(lines)


def _shapes(name: str) -> dict[str, Shape]:
    with torch.device("meta"):
        return trainable_shapes(MODELS[name]())


def _time_sampling(
    model: nn.Module, params: Mapping[str, Tensor], samplers: Mapping[float, Sampler], rounds: int
) -> tuple[list[float], dict[float, list[float]]]:
    """Seconds of the passes, and of sampling by ratio, round by round. The first round warms up and is dropped."""
    shuffle, evict = random.Random(0).shuffle, torch.zeros(_CACHE)
    passes: list[float] = []
    observing: dict[float, list[float]] = {ratio: [] for ratio in samplers}
    for round_ in range(rounds + 1):
        tokens = torch.randint(50_257, TOKENS)
        model.zero_grad()
        seconds = timed(lambda tokens=tokens: model(tokens, labels=tokens).loss.backward())
        order = list(samplers)
        shuffle(order)
        for ratio in order:
            evict.add_(1)
            spent = timed(lambda ratio=ratio: samplers[ratio].observe(params))
            if round_:
                observing[ratio].append(spent)
        if round_:
            passes.append(seconds)
    return passes, observing


def _time_ends(name: str, statistics: GradientStatistics, repeats: int, *, synthetic: bool) -> list[Row]:
    """One row for the first end of a warm-up in this process, and one of medians for those after it."""
    runs = [_time_end(statistics) for _ in range(repeats + 1)]
    later = {key: float(np.median([run[key] for run in runs[1:]])) for key in (*STAGES, "total")}
    common = {"model": name, "synthetic": synthetic, "blocks": runs[0]["blocks"]}
    return [{**common, "run": "first", **runs[0]}, {**common, "run": "cached", **later}]


def _time_end(statistics: GradientStatistics) -> dict[str, Any]:
    """Return the seconds of every stage from statistics to the paper's plan."""
    spent = dict.fromkeys(STAGES, 0.0)
    with _clocked(spent):
        began = time.perf_counter()
        ready = PaperProblem(PaperPlanner(), statistics.model, statistics)
        spent[_RISKS] = time.perf_counter() - began - math.fsum(spent.values())
        plan = ready.plan(Budget(0.5))
        total = time.perf_counter() - began
        spent[_REST] = total - math.fsum(spent.values())
    return {**spent, "total": total, "blocks": len(plan.blocks)}


@contextmanager
def _clocked(spent: dict[str, float]) -> Iterator[None]:
    """Add up the seconds of the planner's stages while it runs."""

    def clock(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                spent[stage] += time.perf_counter() - began

        return run

    places = (
        (problem, "diagnostics_of", _METRICS),
        (units, "structural_units", _PARTITION),
        (problem, "refine", _PARTITION),
        (cost, "memory", _MEMORY),
        (cost, "update_ratios", _TIMES),
        (problem, "solve", _SOLVE),
    )
    with ExitStack() as stack:
        for owner, name, stage in places:
            stack.enter_context(mock.patch.object(owner, name, clock(stage, getattr(owner, name))))
        yield


def _targets(sampling: list[Row], ends: list[Row]) -> list[Row]:
    papers = next(row for row in sampling if row["ratio"] == RATIO)
    share = f"at s = {RATIO:.1%}"
    rows = [
        (f"sampling {share}, of forward and backward", 100 * papers["share_of_pass"]["median"], 100 * MOST_TIME, "%"),
        (f"samples {share}, of the parameters' bytes", 100 * papers["share_of_parameters"], 100 * MOST_MEMORY, "%"),
        *(
            (f"end of the warm-up of {row['model']}, first in a process", row["total"], MOST_SECONDS[row["model"]], "s")
            for row in ends
            if row["run"] == "first"
        ),
    ]
    return [
        {"what": what, "measured": value, "limit": limit, "unit": unit, "outcome": "pass" if value <= limit else "miss"}
        for what, value, limit, unit in rows
    ]


def _label(row: Row) -> str:
    return f"{row['model']}, {row['run']}"


def _percent(share: float | None) -> str:
    return "an unknown share" if share is None else f"{share:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="4 rounds instead of 15, and 2 later plans instead of 4")
    arguments = parser.parse_args()
    result = run(arguments.quick)
    print(json.dumps(result, indent=2) if arguments.json else table(result))


if __name__ == "__main__":
    main()

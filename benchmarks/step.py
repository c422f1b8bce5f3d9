"""How long an optimizer's step takes, ours and its peers', in the same process on the same parameters.

    python -m benchmarks.step [--quick] [--json] [--only REGEX] [--repeats N] [--workload gpt2|small|large|sweep]

All rows of a workload are alive at once and share their fp32 parameters and gradients. A round steps each of them once,
in a new order every time; a time is the median over rounds with its quartiles, and the ratio to torch's fused AdamW is
taken within each round. The first step is apart (it allocates state, and some peers compile), and so is the step whose
memory is watched. How bytes are counted: `benchmarks/traffic.py`; bandwidth and memory: `benchmarks/machine.py`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from baoc import BlockOptimizer, state_bytes
from baoc.core.text import human_bytes, human_count
from baoc.core.text import table as aligned
from benchmarks import machine, matmul, targets, training_step
from benchmarks.rows import FUSED, OURS, PEERS, Params, Row, rows, uniform
from benchmarks.timing import Spread, interleaved, paired_ratio, spread, timed
from benchmarks.traffic import bytes_moved
from benchmarks.workloads import GPT2, WORKLOADS, Shapes, matrices, parameters

SWEEP = "sweep"
CHOICES = (*WORKLOADS, SWEEP)
MEASURED, NOT_INSTALLED = "measured", "not installed"

SWEEP_SIZES = (1e5, 3e5, 1e6, 3e6, 1e7, 3e7, 1e8)
QUICK_SWEEP_SIZES = (1e5, 1e6, 1e7)
SWEEP_ROWS = (uniform("adamw-16"), uniform("adamw-8"), FUSED)

REPEATS, QUICK_REPEATS = 15, 3
SECONDS_EACH, QUICK_SECONDS_EACH = 20.0, 2.0  # a row that has taken so long sits out further rounds
BUFFER, QUICK_BUFFER = 1 << 27, 1 << 24  # elements: 512 MiB and 64 MiB


def run(
    quick: bool = False, only: str | None = None, repeats: int | None = None, workloads: Sequence[str] = CHOICES
) -> dict[str, Any]:
    """Measure. ``only`` is a regular expression on row names; torch's fused AdamW is always there."""
    repeats = (QUICK_REPEATS if quick else REPEATS) if repeats is None else repeats
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}; it must be at least 1.")
    seconds_each = QUICK_SECONDS_EACH if quick else SECONDS_EACH
    chosen = {name: _matching(rows(name), only) for name in WORKLOADS if name in workloads}
    machine.warm_up()
    bandwidth = machine.Bandwidth(QUICK_BUFFER if quick else BUFFER)
    bandwidth.measure()
    measured = {}
    for name, mine in chosen.items():
        title, shapes = WORKLOADS[name]
        _progress(f"{title}: {len(mine)} rows")
        measured[name] = {"title": title, **_measure(shapes(), mine, repeats, seconds_each)}
        _forget_compiled()
        if name == GPT2:
            _share_training(measured[name], quick)
        bandwidth.measure()  # again: neighbours on the machine come and go
    best = bandwidth.measure()
    for workload in measured.values():
        _share_bandwidth(workload, best)
    sizes = (QUICK_SWEEP_SIZES if quick else SWEEP_SIZES) if SWEEP in workloads else ()
    return {
        "machine": machine.describe(PEERS),
        "bandwidth": best,
        "repeats": repeats,
        "workloads": measured,
        "sweep": [_sweep_point(int(size), repeats, seconds_each) for size in sizes],
    }


def _matching(candidates: Iterable[Row], only: str | None) -> list[Row]:
    candidates = list(candidates)
    found = [row for row in candidates if only is None or row.name == FUSED.name or re.search(only, row.name)]
    if found == [FUSED] and not re.search(only or "", FUSED.name):
        raise ValueError(f"{only!r} matches no row. Rows: {', '.join(row.name for row in candidates)}.")
    return found


def _measure(shapes: Shapes, candidates: Sequence[Row], repeats: int, seconds_each: float) -> dict[str, Any]:
    params = parameters(shapes)
    numel = sum(param.numel() for param in params.values())
    optimizers: dict[str, Optimizer] = {}
    records: dict[str, dict[str, Any]] = {}
    for row in candidates:
        optimizer, records[row.name] = _start(row, params)
        if optimizer is not None:
            optimizers[row.name] = optimizer
            records[row.name] |= {
                "plan": _shares(optimizer, numel),
                "state_bytes_per_parameter": state_bytes(optimizer) / numel,
                "bytes_per_parameter": bytes_moved(optimizer) / numel,
                "extra_peak_bytes": machine.extra_peak(optimizer.step),
                "matmul_operations": matmul.operations(optimizer),
            }
    steps = {name: optimizer.step for name, optimizer in optimizers.items()}
    others = machine.OtherLoad()  # from here: the compilers that a first step starts are not others
    samples = interleaved(steps, repeats, seconds_each)
    other_load = others.share()
    for name, seconds in samples.items():
        records[name] |= {"seconds": seconds, "step": spread(seconds)}
    for name in optimizers:
        records[name]["ratio"] = paired_ratio(records[name]["seconds"], records[FUSED.name]["seconds"])
    return {
        "tensors": len(shapes),
        "parameters": numel,
        "other_load": other_load,
        "rows": list(records.values()),
    }


def _sweep_point(size: int, repeats: int, seconds_each: float) -> dict[str, Any]:
    _progress(f"sweep: {human_count(size)} parameters")
    measured = _measure(matrices(size), SWEEP_ROWS, repeats, seconds_each)
    return {
        "parameters": measured["parameters"],
        "seconds": {row["name"]: row["step"] for row in measured["rows"]},
    }


def _share_bandwidth(workload: dict[str, Any], bandwidth: float) -> None:
    for row in workload["rows"]:
        if row["status"] == MEASURED:
            moved = row["bytes_per_parameter"] * workload["parameters"]
            row["bandwidth_share"] = moved / row["step"]["median"] / bandwidth


def _share_training(workload: dict[str, Any], quick: bool) -> None:
    """What part of a training step the update is, and of the rate of matrix products those that make them reach."""
    _progress("  forward and backward pass")
    workload["training_step"] = training_step.forward_and_backward(quick)
    workload["matmul_rate"] = matmul.rate(quick)
    for row in workload["rows"]:
        if row["status"] == MEASURED:
            seconds = row["step"]["median"]
            if workload["training_step"] is not None:
                row["training_share"] = seconds / (seconds + workload["training_step"]["median"])
            if row["matmul_operations"]:
                row["matmul_share"] = row["matmul_operations"] / seconds / workload["matmul_rate"]


def _start(row: Row, params: Params) -> tuple[Optimizer | None, dict[str, Any]]:
    """Build a row and time its first step. A peer that is missing or fails is reported; ours must not fail."""
    record: dict[str, Any] = {"name": row.name, "status": NOT_INSTALLED, "seconds": []}
    if not row.installed:
        return None, record
    try:
        optimizer = row.build(params)
        record["first_seconds"] = timed(optimizer.step)
    except Exception as error:
        if row.package not in PEERS:
            raise
        return None, record | {"status": f"failed: {type(error).__name__}"}
    _progress(f"  {row.name}: first step {record['first_seconds']:.2f} s")
    return optimizer, record | {"status": MEASURED}


def _shares(optimizer: Optimizer, numel: int) -> dict[str, float]:
    """Which share of the parameters each configuration of ours has, largest first."""
    if not isinstance(optimizer, BlockOptimizer):
        return {}
    shares: dict[str, float] = {}
    for block in optimizer.plan.blocks:
        alias = block.configuration.alias
        shares[alias] = shares.get(alias, 0.0) + block.numel / numel
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _forget_compiled() -> None:
    if "torch._dynamo" in sys.modules:  # else nothing was compiled, and importing it takes seconds
        torch.compiler.reset()


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- what a person reads ----


def table(result: dict[str, Any]) -> str:
    """Every workload and the sweep as plain text."""
    parts = [f"memory bandwidth: {result['bandwidth'] / 1e9:.1f} GB/s"]
    for workload in result["workloads"].values():
        tensors = f"{workload['tensors']:,} tensor{'s' if workload['tensors'] > 1 else ''}"
        size = f"{human_count(workload['parameters'])} parameters in {tensors}"
        others = workload["other_load"]
        load = "" if others is None else f"; other processes took {others:.1%} of the processors' time"
        parts.append(
            f"{workload['title']}: {size}{load}\n\n{workload_table(workload)}{_plans(workload)}{_products(workload)}"
        )
    if result["sweep"]:
        parts.append(f"step time against parameters, ms\n\n{sweep_table(result['sweep'])}")
    return "\n\n".join(parts)


def workload_table(workload: dict[str, Any]) -> str:
    header = [
        "optimizer",
        "first step",
        "step, ms",
        "x torch fused",
        "B/param",
        "bandwidth",
        "extra peak",
        "of training",
    ]
    return aligned(header, [_cells(row) for row in workload["rows"]], right=header[1:])


def _cells(row: dict[str, Any]) -> list[str]:
    if row["status"] != MEASURED:
        return [row["name"], row["status"], *["-"] * 6]
    extra, share = row["extra_peak_bytes"], row.get("training_share")
    return [
        row["name"],
        f"{row['first_seconds']:.2f} s",
        _shown(row["step"], 1e3, 1),
        _shown(row["ratio"], 1, 2),
        f"{row['bytes_per_parameter']:.1f}",
        f"{row['bandwidth_share']:.0%}",
        "-" if extra is None else human_bytes(extra),
        "-" if share is None else f"{share:.1%}",
    ]


def _shown(value: Spread, factor: float, digits: int) -> str:
    median, low, high = (f"{factor * value[key]:.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} ({low}-{high})"


def _plans(workload: dict[str, Any]) -> str:
    """What the rows with several configurations are made of."""
    mixed = [row for row in workload["rows"] if len(row.get("plan", ())) > 1]
    lines = [
        f"{row['name']}: {', '.join(f'{name} {share:.0%}' for name, share in row['plan'].items())}" for row in mixed
    ]
    return "\n\n" + "\n".join(lines) if lines else ""


def _products(workload: dict[str, Any]) -> str:
    """What the passes and the matrix products of a training step take."""
    lines = []
    if workload.get("training_step"):
        lines.append(f"forward and backward pass of 4 x 128 tokens: {_shown(workload['training_step'], 1e3, 0)} ms")
    if workload.get("matmul_rate"):
        lines.append(f"products of matrices: {workload['matmul_rate'] / 1e9:.0f} GFLOP/s")
    lines += [
        f"{row['name']}: {row['matmul_operations'] / 1e12:.2f} TFLOP, {row['matmul_share']:.0%} of that rate"
        for row in workload["rows"]
        if row.get("matmul_share")
    ]
    return "\n\n" + "\n".join(lines) if lines else ""


def sweep_table(sweep: Sequence[dict[str, Any]]) -> str:
    names = list(sweep[0]["seconds"])
    lines = [
        [human_count(point["parameters"]), *(_shown(point["seconds"][name], 1e3, 2) for name in names)]
        for point in sweep
    ]
    return aligned(["parameters", *names], lines, right=["parameters", *names])


def targets_table(result: dict[str, Any]) -> str:
    verdicts = targets.judge(result)
    header = ["target", "limit", "measured", "outcome"]
    lines = [[verdict.what, verdict.limit, verdict.measured, verdict.outcome] for verdict in verdicts]
    return f"{targets.summary(verdicts)}\n\n{aligned(header, lines, right=['limit', 'measured'])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REPEATS} rounds and a short sweep")
    parser.add_argument("--only", metavar="REGEX", help=f"rows whose name matches, such as '^{OURS}'")
    parser.add_argument("--repeats", metavar="N", type=int, help=f"rounds (default: {REPEATS})")
    parser.add_argument(
        "--workload", choices=CHOICES, action="append", help="may be given several times (default: all)"
    )
    arguments = parser.parse_args()
    try:
        result = run(arguments.quick, arguments.only, arguments.repeats, arguments.workload or CHOICES)
    except (ValueError, re.error) as error:
        parser.error(str(error))
    print(json.dumps(result, indent=2) if arguments.json else f"{table(result)}\n\n{targets_table(result)}")


if __name__ == "__main__":
    main()

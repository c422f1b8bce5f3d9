"""How long Newton-Schulz iterations take and how exact they are, beside the plain iteration.

    python -m benchmarks.newton_schulz [--output PAGE] [--repeats N] [--quick]

The plain iteration multiplies the whole matrix in every iteration, and computes the whole of symmetric products. Times
are processor seconds of this process: they hardly depend on what else runs. Both are run in every round.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from baoc.core.mechanisms.newton_schulz import (
    MUON,
    POLAR_EXPRESS,
    YOU_JIACHENG,
    Coefficients,
    orthogonalised,
    workspace,
)
from benchmarks import machine
from benchmarks.markdown import save, table
from benchmarks.timing import Spread, interleaved, paired_ratio, spread

Shape = tuple[int, int]

SETS: Mapping[str, Coefficients] = {"You Jiacheng": YOU_JIACHENG, "Polar Express": POLAR_EXPRESS, "Muon": MUON}

GPT2: Mapping[Shape, int] = {(768, 2304): 12, (768, 768): 12, (768, 3072): 12, (3072, 768): 12}
"""GPT2-small's hidden matrices: shapes and how many there are."""
GPT2_SPLIT: Mapping[Shape, int] = {**GPT2, (768, 2304): 0, (768, 768): 48}
"""The same with queries, keys and values apart."""
TIMED: tuple[Shape, ...] = (*GPT2, (1024, 4096), (1024, 1536), (2048, 2048), (256, 256))
QUICK: tuple[Shape, ...] = ((64, 192), (64, 64))
REPEATS, QUICK_REPEATS = 9, 3
SIDE, LENGTHS = 192, (192, 768)


def plain(x: Tensor, coefficients: Coefficients = YOU_JIACHENG) -> Tensor:
    """Iterate as it is written down, on the short side."""
    if x.shape[-2] > x.shape[-1]:
        return plain(x.mT.contiguous(), coefficients).mT.contiguous()
    x = x / torch.linalg.matrix_norm(x.float(), keepdim=True).to(x.dtype)
    gram, polynomial = (x.new_empty(len(x), x.shape[1], x.shape[1]) for _ in range(2))
    other = torch.empty_like(x)
    for a, b, c in coefficients:
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(x, polynomial, x, beta=a, out=other)
        x, other = other, x
    return x


# ---- times ----

Times = dict[Shape, tuple[list[float], list[float]]]
"""Seconds of the plain iteration and of ours, round by round."""


def times(shapes: Sequence[Shape], repeats: int) -> Times:
    """Time both on one matrix of every shape."""
    actions: dict[str, Callable[[], object]] = {}
    for shape in shapes:
        x = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
        memory = torch.empty_like(x), torch.empty(workspace(*shape) - x.numel())
        actions[f"plain {shape}"] = lambda x=x: plain(x)  # type: ignore[misc]
        actions[f"ours {shape}"] = lambda x=x, m=memory: orthogonalised(m[0].copy_(x), YOU_JIACHENG, m[1])  # type: ignore[misc]
    for action in actions.values():
        action()
    found = interleaved(actions, repeats, clock="process")
    return {shape: (found[f"plain {shape}"], found[f"ours {shape}"]) for shape in shapes}


def total(measured: Times, counts: Mapping[Shape, int]) -> tuple[list[float], list[float]]:
    """Seconds of all matrices of a model, round by round."""
    rounds = range(min(len(ours) for _, ours in measured.values()))
    usual, ours = ([sum(n * measured[s][i][r] for s, n in counts.items()) for r in rounds] for i in range(2))
    return usual, ours


# ---- accuracy ----


def with_spectrum(values: Tensor, length: int) -> Tensor:
    """A matrix with these singular values and random singular vectors, in fp64."""
    generator, side = torch.Generator().manual_seed(0), len(values)
    left = torch.linalg.qr(torch.randn(side, side, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(length, side, generator=generator, dtype=torch.float64))[0]
    return ((left * values) @ right.mT).unsqueeze(0)


def spectra(side: int) -> Iterator[tuple[str, Tensor]]:
    """Singular values of several kinds, with their names."""
    index = torch.arange(1, side + 1, dtype=torch.float64)
    for power in (0, 0.5, 1, 1.5, 2, 3):
        yield f"i^-{power}" if power else "all one", index**-power
    yield "8 large, others 1e-4", torch.where(index <= 8, 1.0, 1e-4)


def error(found: Tensor, exact: Tensor) -> float:
    """The relative distance in the Frobenius norm."""
    return float((found.double() - exact).norm() / exact.norm())


def errors(length: int) -> list[list[str]]:
    """Errors against fp64, by spectrum: the plain iteration and ours in fp32, then in half precision."""
    lines = []
    for name, values in spectra(SIDE):
        x = with_spectrum(values, length)
        exact = plain(x)
        found = (
            plain(x.float()), orthogonalised(x.float(), YOU_JIACHENG),
            plain(x.bfloat16()), orthogonalised(x.float(), YOU_JIACHENG, dtype=torch.bfloat16),
            orthogonalised(x.float(), YOU_JIACHENG, dtype=torch.float16),
        )  # fmt: skip
        lines.append([f"{SIDE} x {length}", name, *(f"{error(each, exact):.1e}" for each in found)])
    return lines


def distances() -> list[list[str]]:
    """RMS distance of the singular values from one in fp64, by spectrum and coefficients."""
    lines = []
    for name, values in spectra(SIDE):
        found = (torch.linalg.svdvals(plain(with_spectrum(values, SIDE), each)) - 1 for each in SETS.values())
        lines.append([name, *(f"{float(each.square().mean().sqrt()):.3f}" for each in found)])
    return lines


# ---- the page ----


def page(measured: Times, reports: Sequence[tuple[str, Mapping[Shape, int]]], command: str) -> str:
    rows = [(f"{shape[0]} x {shape[1]}", *measured[shape]) for shape in measured]
    rows += [(name, *total(measured, counts)) for name, counts in reports]
    timed = [
        [name, _shown(spread(usual), 1e3, 0), _shown(spread(ours), 1e3, 0), _shown(paired_ratio(ours, usual), 1, 2)]
        for name, usual, ours in rows
    ]
    about = machine.describe(())
    parts = [
        "# Newton-Schulz iterations",
        f"Made by `{command}` with torch {about['torch']} on {about['processor']}, {about['threads']} thread(s).",
        "Singular values are brought to one by five iterations. Matrices at least 1.5 times as long as wide are "
        "multiplied through their Gram matrix, which is computed anew after two iterations; CPUs compute little more "
        "than half of symmetric products. *Plain* does neither.",
        "## Times",
        "Milliseconds of processor time in fp32: median (quartiles) over rounds in which both ran.",
        table(["matrix", "plain", "ours", "ours / plain"], timed),
        "## Errors",
        "Relative error in the Frobenius norm against the plain iteration in fp64, by singular values. Half "
        "precision was emulated on the CPU.",
        table(
            ["matrix", "singular values", "plain fp32", "ours fp32", "plain bf16", "ours bf16", "ours fp16"],
            [line for length in LENGTHS for line in errors(length)],
        ),
        "## Coefficients",
        f"RMS distance of the singular values from one after five iterations in fp64, {SIDE} x {SIDE}.",
        table(["singular values", *SETS], distances()),
    ]
    return "\n\n".join(parts) + "\n"


def _shown(value: Spread, factor: float, digits: int) -> str:
    median, low, high = (f"{factor * value[key]:.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} ({low}-{high})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="the page, a Markdown file; what follows '## Reading' is kept")
    parser.add_argument("--repeats", metavar="N", type=int, help=f"rounds (default: {REPEATS})")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REPEATS} rounds of small matrices")
    options = parser.parse_args(arguments)
    repeats = options.repeats or (QUICK_REPEATS if options.quick else REPEATS)
    reports = [] if options.quick else [("GPT2-small, 48", GPT2), ("GPT2-small, q, k, v apart, 72", GPT2_SPLIT)]
    output = ["--output", os.path.relpath(options.output)] if options.output else []
    text = page(
        times(QUICK if options.quick else TIMED, repeats),
        reports,
        shlex.join(["python", "-m", "benchmarks.newton_schulz", *output]),
    )
    print(text, end="")
    if options.output:
        save(text, options.output)


if __name__ == "__main__":
    main()

"""How long an update must take on a GPU at the least: the bytes that it moves, by the bandwidth of memory.

    python -m benchmarks.roofline --bandwidth 3350 --page docs/gpu.md

No time here was measured. `baoc.planners.cost` says what an update moves and, for those with products of matrices, what
it computes. Parameters, gradients and state are sharded evenly over ranks, and every matrix is one rank's to multiply.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from baoc import Configuration, parse
from baoc.core.roles import role_of
from baoc.core.spec import Shape
from baoc.planners import cost

CONFIGURATIONS = (
    *("adamw-32", "adamw-16", "adamw-8", "adamw[m=int8,v=factored]", "adamw[m=int4,v=factored]", "lion-8", "lion-4"),
    *("muon-8", "muon-4", "spectral", "sinkhorn", "colnorm", "sgdwm-8", "sgd"),
)
HIDDEN_ONLY = "else adamw[m=int8,v=factored]"  # what embeddings, heads and vectors get where a mechanism suits no such
BEGIN, END = "<!-- made by benchmarks.roofline -->", "<!-- end of what benchmarks.roofline makes -->"


class Model(NamedTuple):
    """A transformer as Llama 2 has them."""

    name: str
    width: int
    layers: int
    hidden: int  # of its MLPs
    key_width: int  # of keys and values, with all their heads
    vocabulary: int = 32_000

    def shapes(self) -> dict[str, Shape]:
        """Of all parameters, by names that tell embeddings and heads."""
        width, hidden, keys = self.width, self.hidden, self.key_width
        layer = {
            "q": (width, width),
            "k": (keys, width),
            "v": (keys, width),
            "o": (width, width),
            "gate": (hidden, width),
            "up": (hidden, width),
            "down": (width, hidden),
            "norm1": (width,),
            "norm2": (width,),
        }
        layers = {f"layers.{i}.{name}": shape for i in range(self.layers) for name, shape in layer.items()}
        ends = {"embed_tokens": (self.vocabulary, width), "norm": (width,), "lm_head": (self.vocabulary, width)}
        return {**layers, **ends}


MODELS = (Model("7B", 4096, 32, 11_008, 4096), Model("70B", 8192, 80, 28_672, 1024))
RANKS = {"7B": 8, "70B": 64}


class Row(NamedTuple):
    """One configuration's update of a whole model."""

    configuration: str
    state_bytes: int
    moved_bytes: int
    operations: int


def rows(model: Model, configurations: Sequence[str], element_bytes: int) -> list[Row]:
    """``element_bytes``: of parameters and gradients."""
    found = []
    shapes = model.shapes()
    for spelling in configurations:
        chosen = [(shape, _suited(spelling, name, shape)) for name, shape in shapes.items()]
        state = sum(each.state_bytes(shape) for shape, each in chosen)
        moved = sum(cost.bytes_moved(shape, each, element_bytes, element_bytes) for shape, each in chosen)
        found.append(Row(spelling, state, moved, sum(cost.operations(shape, each, "cuda") for shape, each in chosen)))
    return found


def _suited(spelling: str, name: str, shape: Shape) -> Configuration:
    return parse(f"{spelling} {HIDDEN_ONLY}").suited(shape, role_of(shape, name))


def table(model: Model, found: Sequence[Row], ranks: int, bandwidth: float, teraflops: float) -> str:
    """Markdown; ``bandwidth`` in GB/s."""
    numel = sum(math.prod(shape) for shape in model.shapes().values())
    header = ("configuration", "state, bytes/parameter", "moved, bytes/parameter", "state per rank", "update per rank")
    lines = [f"| {' | '.join(header)} | products per rank |", "|---" * (len(header) + 1) + "|"]
    for row in found:
        seconds = row.moved_bytes / ranks / (bandwidth * 1e9)
        products = f"{1e3 * row.operations / ranks / (teraflops * 1e12):.1f} ms" if row.operations else "-"
        per = f"{row.state_bytes / numel:.2f} | {row.moved_bytes / numel:.1f}"
        held = f"{row.state_bytes / ranks / 2**30:.2f} GiB"
        lines.append(f"| {row.configuration} | {per} | {held} | {1e3 * seconds:.2f} ms | {products} |")
    return "\n".join(lines)


def page(bandwidth: float, teraflops: float, ranks: Mapping[str, int]) -> str:
    """The tables of both models, for bf16 parameters and gradients."""
    parts = []
    for model in MODELS:
        parts += [f"### {model.name}, {ranks[model.name]} ranks", ""]
        found = rows(model, CONFIGURATIONS, element_bytes=2)
        parts += [table(model, found, ranks[model.name], bandwidth, teraflops), ""]
    command = f"python -m benchmarks.roofline --bandwidth {bandwidth:g} --teraflops {teraflops:g}"
    said = (
        f"bf16 parameters and gradients; {bandwidth:g} GB/s; {teraflops:g} TFLOP/s for products of matrices. Computed "
        f"by `{command}`, not measured."
    )
    return "\n".join([said, "", *parts]).rstrip()


def inserted(text: str, made: str) -> str:
    """A page with the tables between its marks."""
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise ValueError(f"the page has no {BEGIN} and {END} to put the tables between.")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", type=float, default=3350.0, help="GB/s; default: %(default)g, an H100's")
    parser.add_argument("--teraflops", type=float, default=400.0, help="of bf16 products; default: %(default)g")
    parser.add_argument("--ranks", type=int, help=f"default: {RANKS}")
    parser.add_argument("--page", type=Path, help="put the tables into this page")
    options = parser.parse_args(arguments)
    ranks = dict.fromkeys(RANKS, options.ranks) if options.ranks else RANKS
    made = page(options.bandwidth, options.teraflops, ranks)
    print(made)
    if options.page:
        options.page.write_text(inserted(options.page.read_text(), made))


if __name__ == "__main__":
    main()

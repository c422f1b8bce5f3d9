"""Compile every Triton kernel for GPUs that are not there, and read what came out.

    python -m benchmarks.triton_kernels                          # all families, all targets: some minutes
    python -m benchmarks.triton_kernels adamw-8 --target sm_90

A kernel that spills registers, fuses products into sums, or reads an aligned tensor in less than vectors is an error.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import baoc
from baoc.core.spec import Reach
from baoc.optim.kernels.triton.families import Family, Form, Use, form
from baoc.optim.kernels.triton.tables import WARPS, Tiles
from benchmarks import machine

CONFIGURATIONS = (*map(str, (*baoc.CATALOG, *baoc.EXTENDED)), "adamw[m=bf16,v=int8]", "adamw[m=int8,v=factored-bf16]")
SHAPES = ((96, 512), (61, 83), (5008,), (64,))  # rows of whole vectors, and not; large vectors, and small
DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16))
VECTOR = {"fp32": 16, "bf16": 8, "fp16": 8}  # bytes that a thread loads at once of four elements
ABOUT = """\
Every kernel of `kernel="triton"`, compiled on a machine without a GPU; nothing here was run or timed. Registers are the
most that a thread of any variant takes (variants differ in the dtypes of parameters and gradients, and in the kind of
weight decay). The command ends in an error if a kernel spills registers, if the compiler was left to fuse products into
sums, or if the elements of aligned rows are read in less than vectors: 16 bytes of fp32 and 8 of bf16 for a thread."""


class Target(NamedTuple):
    """A GPU to compile for."""

    name: str
    backend: str
    arch: int | str
    threads: int  # in a warp


TARGETS = {
    target.name: target
    for target in (
        *(Target(f"sm_{arch}", "cuda", arch, 32) for arch in (80, 90, 100)),
        Target("gfx942", "hip", "gfx942", 64),
    )
}


class Kernel(NamedTuple):
    """A kernel and the constants that it is compiled for."""

    name: str
    constants: tuple[tuple[str, Any], ...]

    @property
    def is_aligned(self) -> bool:
        return bool(dict(self.constants).get("ALIGNED", False))

    @property
    def elements(self) -> tuple[str, ...]:
        """The dtypes of the parameters and gradients that it reads."""
        held = dict(self.constants)
        names = ["GRAD"] * ("GRAD" in held)
        if held.get("COUPLED") or held.get("MOVES") or self.name == "measure":
            names.append("PARAM")
        return tuple(sorted({held[name] for name in names}))


class Compiled(NamedTuple):
    """What was made of a kernel."""

    registers: int
    spills: int  # bytes
    shared: int  # bytes
    loads: Mapping[int, int]  # of global memory: bytes at once -> how many in the code
    stores: Mapping[int, int]
    fused: int  # multiply-adds that the compiler was left to make


def families(configurations: Iterable[str]) -> Iterator[Family]:
    """Every family that tensors of these configurations are in."""
    found: dict[Family, None] = {}
    for spelling in configurations:
        for shape in SHAPES:
            layout = baoc.parse(spelling).layout(shape)
            uses: tuple[Use, ...] = ("direction", "move") if layout.reach is Reach.MATRIX else ("step",)
            for dtypes in DTYPES:
                for use in uses:
                    how = form(layout, torch.Size(shape), *dtypes, use)
                    if isinstance(how, Form):
                        found[how.family] = found[how.family._replace(aligned=False)] = None
    yield from found


def kernels_of(family: Family, tiles: Tiles) -> Iterator[Kernel]:
    """The kernels that a family launches."""
    from baoc.optim.kernels.triton import launch

    for index in range(len(family.reductions)):
        yield Kernel("add_up", tuple(launch.sums_constants(family, index, tiles).items()))
    if family.uses_rms:
        yield Kernel("measure", tuple(launch.measure_constants(family, tiles).items()))
    yield Kernel("update", tuple(launch.update_constants(family, tiles).items()))


def compiled(kernel: Kernel, target: Target) -> Compiled:
    """Compile a kernel as a launch on the target would."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from baoc.optim.kernels.triton import launch

    function = getattr(launch, kernel.name)
    constants = dict(kernel.constants)
    pointers = dict(zip(function.arg_names, ("*i64", "*i32", "*fp32", "*fp32")))
    source = ASTSource(
        function,
        signature=pointers | dict.fromkeys(constants, "constexpr"),
        constexprs={(function.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in range(len(pointers))},
    )
    made = triton.compile(source, target=GPUTarget(*target[1:]), options=launch.options(target.backend))
    return _read_cuda(made) if target.backend == "cuda" else _read_hip(made)


def _read_cuda(made: Any) -> Compiled:
    import triton

    ptx = made.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    loads, stores = (_widths(ptx, rf"\b{kind}\.global\S*?(?:\.v(\d))?\.[bfsu](\d+)\b") for kind in ("ld", "st"))
    fused = len(re.findall(r"\bfma\.", ptx))
    return Compiled(used["REG"], used["STACK"] + used["LOCAL"], made.metadata.shared, loads, stores, fused)


def _widths(text: str, pattern: str) -> dict[int, int]:
    widths: dict[int, int] = {}
    for vector, bits in re.findall(pattern, text):
        width = int(vector or 1) * int(bits) // 8
        widths[width] = widths.get(width, 0) + 1
    return dict(sorted(widths.items()))


_HIP_WIDTHS = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4}


def _read_hip(made: Any) -> Compiled:
    code = made.asm["amdgcn"]
    spills = sum(map(int, re.findall(r"\.(?:[vs]gpr_spill_count|private_segment_fixed_size):\s*(\d+)", code)))
    registers = int(re.findall(r"\.vgpr_count:\s*(\d+)", code)[0])
    loads, stores = (_hip_widths(code, kind) for kind in ("load", "store"))
    # the code has fused operations for divisions and roots, so it is what the compiler was given that counts
    fused = len(re.findall(r"\bcontract\b|llvm\.fma|fmuladd", made.asm["llir"]))
    return Compiled(registers, spills, made.metadata.shared, loads, stores, fused)


def _hip_widths(code: str, kind: str) -> dict[int, int]:
    widths: dict[int, int] = {}
    for name, count in re.findall(rf"\b(?:global|buffer)_{kind}_([a-z]+)(?:_d16\w*)?(?:x(\d))?\b", code):
        width = _HIP_WIDTHS[name] * int(count or 1)
        widths[width] = widths.get(width, 0) + 1
    return dict(sorted(widths.items()))


def problems(kernel: Kernel, target: Target, made: Compiled) -> list[str]:
    """What must not be."""
    found = []
    if made.spills:
        found.append(f"spills {made.spills} bytes of registers")
    if made.fused:
        found.append(f"fuses {made.fused} products into sums")
    for dtype in kernel.elements if kernel.is_aligned else ():
        if made.loads.get(VECTOR[dtype], 0) == 0:
            found.append(f"loads no {VECTOR[dtype]} bytes at once of {dtype}")
    return found


def table(results: Mapping[Kernel, Mapping[Target, Compiled]]) -> str:
    """One line for each kernel, format of its states and alignment, with the worst of its variants."""
    lines = ["| kernel | m | v | aligned | variants |" + "".join(f" {name} |" for name in TARGETS)]
    lines += ["|---|---|---|---|---|" + "---|" * len(TARGETS)]
    groups: dict[tuple[str, ...], list[Mapping[Target, Compiled]]] = {}
    for kernel, by_target in results.items():
        constants = dict(kernel.constants)
        what = constants.get("MECHANISM", constants.get("OF", ""))
        states = constants.get("M", "-"), constants.get("V", "-")
        key = f"{kernel.name} {what}".strip(), *states, "yes" if kernel.is_aligned else "no"
        groups.setdefault(key, []).append(by_target)
    for key, variants in groups.items():
        cells = [_cell([each[target] for each in variants if target in each]) for target in TARGETS.values()]
        lines.append(f"| {' | '.join(key)} | {len(variants)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(made: Sequence[Compiled]) -> str:
    if not made:
        return "-"
    registers, shared = max(each.registers for each in made), max(each.shared for each in made)
    return f"{registers}, {shared} B shared" if shared else str(registers)


def page(results: Mapping[Kernel, Mapping[Target, Compiled]], command: str) -> str:
    about: dict[str, Any] = machine.describe(("triton",))
    made = f"Made by `{command}` with torch {about['torch']} and triton {about['packages']['triton']}."
    count = sum(map(len, results.values()))
    said = f"{count} compilations, {WARPS} warps in a program: no spills, no fused products, vectors where rows allow."
    return f"# The Triton kernels, compiled\n\n{ABOUT}\n\n{said}\n\n{table(results)}\n\n{made}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configurations", nargs="*", help="default: all")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--output", type=Path, help="the page, a Markdown file")
    options = parser.parse_args(arguments)
    results: dict[Kernel, dict[Target, Compiled]] = {}
    wrong: list[str] = []
    for target in map(TARGETS.__getitem__, options.target or TARGETS):
        tiles = Tiles.on(target.threads)
        needed = {
            kernel: None for family in families(options.configurations or CONFIGURATIONS)
            for kernel in kernels_of(family, tiles)
        }  # fmt: skip
        for number, kernel in enumerate(needed, start=1):
            made = compiled(kernel, target)
            results.setdefault(_without_tiles(kernel), {})[target] = made
            found = problems(kernel, target, made)
            wrong += [f"{target.name}: {kernel.name} {dict(kernel.constants)} {each}" for each in found]
            print(f"\r{target.name} {number}/{len(needed)}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    output = ["--output", os.path.relpath(options.output)] if options.output else []
    text = page(results, shlex.join(["python", "-m", "benchmarks.triton_kernels", *output, *options.configurations]))
    if wrong:
        sys.exit("\n".join(wrong))
    print(text, end="")
    if options.output:
        options.output.write_text(text)


def _without_tiles(kernel: Kernel) -> Kernel:
    """Targets differ in them."""
    constants = tuple((name, value) for name, value in kernel.constants if name not in ("SEGMENTS", "TILES"))
    return kernel._replace(constants=constants)


if __name__ == "__main__":
    main()

"""What torch's compiler would have a GPU do for `kernel="compiled"`: kernel launches and whole-tensor temporaries.

    python -m benchmarks.compiled_kernels [--output docs/results/compiled_kernels.md] [CONFIGURATION:SHAPE[:DTYPE] ...]

Needs triton (`pip install --group bench`, on Linux) but no GPU: an optimizer takes one step on the CPU, and Inductor
gets the traced graph as if its tensors were on an H100. It schedules and writes its code for that; the code is read,
never run. This hangs on internals of torch, as they are in the version of `constraints.txt`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.util
import math
import os
import re
import shlex
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._pytree import tree_map_only

import baoc
from baoc.core.codecs.quantized import INT8_GROUP
from baoc.optim.kernels import compiled
from benchmarks import machine

DEFAULT = (
    *(f"{name}:4096x1024" for name in ("adamw-32", "adamw-16", "adamw-8", "sgdwm-8")),
    *(f"adamw-8:{parameter}" for parameter in ("1024x1024", "4096x192", "4096x1000", "4096x1024:bfloat16")),
    *(f"{name}:4096x1024" for name in ("adamw[m=int8,v=factored]", "adafactor-32")),
)
WHOLE = 0.5  # an allocation counts as a whole tensor from this share of the parameter's elements on
CUDA = torch.device("cuda", 0)
H100 = types.SimpleNamespace(  # what Inductor asks about; gcnArchName is AMD's
    name="NVIDIA H100", major=9, minor=0, gcnArchName="", multi_processor_count=132, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=1 << 16,
)  # fmt: skip
ABOUT = f"""\
The Triton kernels that one step with `kernel="compiled"` launches for one parameter, and the temporaries of at least
{WHOLE:.0%} of the parameter's elements that it allocates. Inductor generated the code for an H100 that is not there,
with dynamic sizes, as the library runs it, and the code was read: nothing ran on a GPU, and no speed was measured.
An int8 state has a scale per {INT8_GROUP} elements of a row: rows of less, or of no multiple of that, are cases
apart."""


class Case(NamedTuple):
    """A configuration and the one parameter that it updates."""

    configuration: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def parse(text: str) -> Case:
        found = re.fullmatch(r"(.+?):(\d+(?:x\d+)*)(?::(\w+))?", text)
        dtype = getattr(torch, found[3] or "float32", None) if found else None
        if not found or not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"{text!r} is not CONFIGURATION:SHAPE[:DTYPE], such as 'adamw-8:4096x1024:bfloat16'.")
        baoc.parse(found[1])  # raises what would otherwise come after minutes
        return Case(found[1], tuple(map(int, found[2].split("x"))), dtype)


class Code(NamedTuple):
    """What generated code does."""

    launches: int
    allocations: tuple[tuple[str, int], ...]  # dtype and number of elements


def read(source: str, sizes: Mapping[str, int]) -> Code:
    """Read generated code; ``sizes`` has the values of the symbols that stand for sizes in it."""
    launches, allocations = 0, []
    for node in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        called = ast.unparse(node.func)
        if re.fullmatch(r"triton_\w+\.run", called):
            launches += 1
        elif called == "empty_strided_cuda":
            shape, _, dtype = map(ast.unparse, node.args)
            allocations.append((dtype.removeprefix("torch."), math.prod(eval(shape, {}, dict(sizes)))))
        elif re.match(r"extern_kernels\.|torch\.ops\.|aten\.|cpp_|empty_strided", called):
            raise NotImplementedError(f"the generated code calls {called}; what that launches is not known.")
    return Code(launches, tuple(allocations))


class _Generated(BaseException):
    """Leaves Inductor with the code, which is not loaded. It would wrap an ``Exception``."""


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """Torch answers Inductor's questions as if there were an H100. Inductor caches answers: enter before it asks."""
    from torch._inductor import config

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: H100,
        "get_device_capability": lambda device=None: (H100.major, H100.minor),
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "current_device": lambda: 0,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,  # not the same function as above: Dynamo tells them apart
    }
    with (
        tempfile.TemporaryDirectory() as caches,
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=caches, TRITON_CACHE_DIR=caches),
        config.patch(compile_threads=1),  # no pool of processes, which would know nothing of all this
        mock.patch.multiple(torch.cuda, **answers),
        mock.patch("torch._dynamo.device_interface.CudaInterface.get_device_properties", lambda device=None: H100),
        mock.patch("torch.utils._triton.triton_hash_with_backend", lambda: ""),  # asks the driver
    ):
        yield


def inspect(case: Case) -> Code:
    """Take a step, and add up what its graphs would do. They run in turn, so the largest one's memory counts."""
    from torch._inductor import compile_fx, graph

    ran: list[Code] = []

    def stop(lowering: Any) -> None:
        sizes = {str(symbol): int(value) for symbol, value in lowering.sizevars.backed_var_to_val.items()}
        raise _Generated(lowering.codegen()[0].value, sizes)

    def generate(backend: Any, traced: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        runnable = copy.deepcopy(traced).forward  # Inductor changes what it is given
        try:
            compile_fx.compile_fx(traced, inputs, inner_compile=_compile_for_gpu, config_patches=backend.config)
        except _Generated as generated:
            code = read(*generated.args)

        def run(*args: torch.Tensor) -> Any:
            ran.append(code)
            return runnable(*args)

        return run

    torch._dynamo.reset()
    compiled._compiled_step.cache_clear()
    param = torch.nn.Parameter(torch.ones(case.shape, dtype=case.dtype))
    param.grad = torch.ones_like(param)
    with (
        mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", generate),
        mock.patch.object(graph.GraphLowering, "compile_to_module", stop),
    ):
        baoc.BlockOptimizer([param], plan=case.configuration, kernel="compiled").step()
    largest = max(ran, key=lambda code: sum(numel for _, numel in code.allocations))
    return Code(sum(code.launches for code in ran), largest.allocations)


def _compile_for_gpu(traced: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Inductor's part, on a graph of plain operators that is moved first. On fake tensors, they need no driver."""
    for node in traced.graph.nodes:
        assert node.op != "get_attr", "a constant tensor would stay on the CPU"
        node.args, node.kwargs = tree_map_only(torch.device, lambda _: CUDA, (node.args, dict(node.kwargs)))
        node.meta["val"] = tree_map_only(torch.Tensor, _on_gpu, node.meta.get("val"))
    traced.recompile()
    moved = tree_map_only(torch.Tensor, _on_gpu, list(inputs))
    return torch._inductor.compile_fx.compile_fx_inner(traced, moved, **options)


def _on_gpu(tensor: Any) -> Any:
    """The same fake tensor elsewhere, with the same symbols for its sizes."""
    meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    return type(tensor)(tensor.fake_mode, meta, CUDA)


def table(results: Mapping[Case, Code]) -> str:
    lines = ["| configuration | shape | dtype | kernels | whole-tensor temporaries |", "|---|---|---|---|---|"]
    for case, code in results.items():
        shape, dtype = "x".join(map(str, case.shape)), str(case.dtype).removeprefix("torch.")
        whole = Counter(kind for kind, numel in code.allocations if numel >= WHOLE * math.prod(case.shape))
        temporaries = ", ".join(f"{count} {kind}" for kind, count in whole.items()) or "none"
        lines.append(f"| {case.configuration} | {shape} | {dtype} | {code.launches} | {temporaries} |")
    return "\n".join(lines)


def page(results: Mapping[Case, Code], command: str) -> str:
    about: dict[str, Any] = machine.describe(("triton",))
    made = f"Made by `{command}` with torch {about['torch']} and triton {about['packages']['triton']}."
    return f"# What the compiled kernel is on a GPU\n\n{ABOUT}\n\n{table(results)}\n\n{made}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CONFIGURATION:SHAPE[:DTYPE]", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--output", type=Path, help="the page, a Markdown file")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        parser.error("this needs triton: pip install --group bench (on Linux).")
    try:
        cases = [Case.parse(text) for text in options.cases or DEFAULT]
    except ValueError as error:
        parser.error(str(error))
    results = {}
    with pretended_gpu():
        for case in cases:
            print(f"== {case.configuration} {case.shape} {case.dtype}", file=sys.stderr, flush=True)
            results[case] = inspect(case)
    output = ["--output", os.path.relpath(options.output)] if options.output else []
    text = page(results, shlex.join(["python", "-m", "benchmarks.compiled_kernels", *output, *options.cases]))
    print(text, end="")
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()

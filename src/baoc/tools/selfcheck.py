"""``baoc selfcheck``: verify the Triton kernels on a GPU, and time them next to other optimizers."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from baoc.core.configuration import CATALOG, EXTENDED, Configuration, parse
from baoc.core.spec import Reach
from baoc.core.text import human_bytes, table
from baoc.optim.kernels.eager import EagerKernel
from baoc.optim.kernels.graphs import replaying
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.triton import TritonKernel
from baoc.optim.kernels.triton.verify import ExactRoots, Promise, Trial, differences, gradient, machine
from baoc.optim.optimizer import BlockOptimizer
from baoc.optim.state import state_bytes

CONFIGURATIONS = tuple(map(str, (*CATALOG, *EXTENDED)))
TINY_CONFIGURATIONS = ("adamw-16", "adamw-8", "lion-4", "adamw[m=int8,v=factored]")
TIMED = ("adamw-32", "adamw-16", "adamw-8", "adamw[m=int8,v=factored]", "adamw[m=int4,v=factored]", "lion-8", "muon-8")
SHAPES = [(17, 272), (16, 301), (12, 4, 9, 9), (4100,), (7,)]
"""Aligned rows with an incomplete last group, rows that are not aligned, a convolution, a large and a small vector."""
DTYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16))
OnPart = Callable[[int, int, str], None]

_STEPS = 3
_AS_PROMISED = "as promised"
_BEHAVIOR_SHAPE = (64, 272)
_BEHAVIOR_STEPS = 5
_BEHAVIOR_CONFIGURATIONS = ("adamw-8", "adamw[m=int8,v=factored]", "muon-8")


@dataclass(frozen=True)
class Equality:
    """How far the results of two kernels differ after some steps."""

    configuration: str
    dtypes: str  # of parameters and gradients
    promised: Promise
    found: str
    passed: bool


@dataclass(frozen=True)
class Report:
    """The results on one device."""

    machine: dict[str, str]
    equalities: tuple[Equality, ...]
    timings: tuple[Timing, ...]

    @property
    def passed(self) -> bool:
        """Whether all comparisons passed, and all configurations could be timed."""
        return all(each.passed for each in self.equalities) and not any(each.failed for each in self.timings)

    def content(self) -> dict[str, Any]:
        """Return the report as JSON."""
        return {
            "machine": self.machine,
            "passed": self.passed,
            "equalities": [asdict(each) for each in self.equalities],
            "timings": [asdict(each) for each in self.timings],
        }

    def __str__(self) -> str:
        equal = [[each.configuration, each.dtypes, each.promised, each.found] for each in self.equalities]
        header = ["optimizer", "first step", "step", "of fused", "state", "peak"]
        timed = [_row(each, self.timings) for each in self.timings if each.problem is None]
        lines = [f"{key}: {value}" for key, value in self.machine.items()]
        lines += ["", table(["configuration", "dtypes", "promised", "found"], equal)]
        lines += ["", table(header, timed, right=header[1:])] if timed else []
        lines += [f"{each.optimizer}: {each.problem}" for each in self.timings if each.problem is not None]
        failed = sum(not each.passed for each in self.equalities)
        lines += ["", f"{failed} of {len(self.equalities)} comparisons FAILED" if failed else
                  f"all {len(self.equalities)} comparisons passed"]  # fmt: skip
        return "\n".join(lines)


def check(device: torch.device, *, tiny: bool = False, times: bool = True, on_part: OnPart = lambda *_: None) -> Report:
    """Compare all configurations with the eager kernel on the CPU, then time some of them and other optimizers.

    Skipped steps and steps in a CUDA graph are compared with ordinary steps on the same device. An error is one line of
    the report, not the end of it.

    Args:
        device: A GPU, or the CPU if Triton runs in its interpreter.
        tiny: Check a few configurations of small tensors only.
        times: Whether to time steps as well.
        on_part: Called after each part with its number, the number of parts, and its name.

    Returns:
        The results.
    """
    configurations = TINY_CONFIGURATIONS if tiny else CONFIGURATIONS
    parts = len(configurations) + 1 + times
    equalities: list[Equality] = []
    for done, name in enumerate(configurations, 1):
        equalities += compare(name, device, every_dtype=not tiny)
        on_part(done, parts, name)
    equalities += compare_behavior(device)
    on_part(len(configurations) + 1, parts, "skipped steps, steps in a graph")
    timings = time_steps(configurations[:2] if tiny else TIMED, device, tiny) if times else []
    if times:
        on_part(parts, parts, "times")
    return Report(machine(device), tuple(equalities), tuple(timings))


def compare(spelling: str, device: torch.device, *, every_dtype: bool = True) -> list[Equality]:
    """Compare the Triton kernel on a device with the eager kernel on the CPU.

    Args:
        spelling: The configuration.
        device: The device to check.
        every_dtype: Whether to compare all of :data:`DTYPES`, or fp32 only.

    Returns:
        One result per pair of dtypes.
    """
    return [_compared(spelling, dtypes, device) for dtypes in (DTYPES if every_dtype else DTYPES[:1])]


def _compared(spelling: str, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device) -> Equality:
    configuration, left = parse(spelling), _Left()
    shapes, promised = shapes_for(configuration), promise(configuration)
    start, expected = (Trial(configuration, shapes, dtypes[0]) for _ in range(2))
    try:
        found = Trial(configuration, shapes, dtypes[0], device)
        kernel = TritonKernel(device, lambda: left)
        for step in range(_STEPS):
            grads = [gradient(shape, step).to(dtypes[1]) for shape in shapes]
            with ExactRoots():
                expected.step(EagerKernel(), grads)
                found.step(kernel, [grad.to(device) for grad in grads])
        problems = [str(each) for each in differences(expected, found, promised, start)]
    except Exception as error:
        problems = [first_line(error)]
    said = "left to another kernel" if left.jobs else "; ".join(problems) or _AS_PROMISED
    named = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return Equality(spelling, named, promised, said, bool(left.jobs) or not problems)


class _Left:
    """Records jobs without Triton code."""

    name = "none"

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def run(self, jobs: Iterable[Job]) -> bool:
        self.jobs += jobs
        return False


def shapes_for(configuration: Configuration) -> list[tuple[int, ...]]:
    """Return the shapes of :data:`SHAPES` that have Triton code.

    Adafactor factors the last two dims, as torch does: for it, a convolution is a stack of matrices.
    """
    return [shape for shape in SHAPES if configuration.mechanism_name != "adafactor" or len(shape) < 3]


def promise(configuration: Configuration) -> Promise:
    """Return how close a configuration's results on a GPU are to those on a CPU."""
    promises: dict[Reach, Promise] = {Reach.ROWS: "bits", Reach.SUMS: "rounding", Reach.MATRIX: "products"}
    return promises[configuration.layout((64, 64)).reach]


def compare_behavior(device: torch.device) -> Iterator[Equality]:
    """Compare skipped steps, and steps in a CUDA graph, with ordinary steps on the same device, bit for bit."""
    for configuration in _BEHAVIOR_CONFIGURATIONS:
        yield _equality(configuration, "a skipped step", lambda name: _skipped(name, device))
        if device.type == "cuda":
            yield _equality(configuration, "replayed", lambda name: _replayed(name, device))


def _equality(configuration: str, what: str, pair: Callable[[str], tuple[list[Tensor], list[Tensor]]]) -> Equality:
    try:
        expected, found = pair(configuration)
        apart = sum(not torch.equal(one, other) for one, other in zip(expected, found))
        said = f"{apart} of {len(expected)} tensors differ" if apart else _AS_PROMISED
    except Exception as error:
        said = first_line(error)
    return Equality(f"{configuration}, {what}", "float32, float32", "bits", said, said == _AS_PROMISED)


def _skipped(configuration: str, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Train without the bad steps, and with them."""
    results = []
    for bad in ((), (0, 3)):
        param, optimizer = _optimizer(configuration, device, on_nonfinite="skip")
        for step in range(_BEHAVIOR_STEPS):
            param.grad = gradient(_BEHAVIOR_SHAPE, step).to(device)
            if step in bad:
                param.grad[3, 77] = math.nan
            if bad or step not in (0, 3):
                optimizer.step()
        results.append(_tensors(param, optimizer))
    return results[0], results[1]


def _replayed(configuration: str, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Train with ordinary steps, and with the last steps from a graph."""
    results = []
    for captures in (False, True):
        param, optimizer = _optimizer(configuration, device)
        param.grad = torch.zeros_like(param)
        graph: torch.cuda.CUDAGraph | None = None
        for step in range(_BEHAVIOR_STEPS):
            optimizer.param_groups[0]["lr"] *= 0.9
            param.grad.copy_(gradient(_BEHAVIOR_SHAPE, step))
            if captures and step == 2:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    optimizer.step()
            if graph is None:
                optimizer.step()
            else:
                with replaying():
                    optimizer.step()
                graph.replay()
        results.append(_tensors(param, optimizer))
    return results[0], results[1]


def _optimizer(
    configuration: str, device: torch.device, on_nonfinite: str = "step"
) -> tuple[nn.Parameter, BlockOptimizer]:
    start = torch.randn(_BEHAVIOR_SHAPE, generator=torch.Generator().manual_seed(1))
    param = nn.Parameter(start.to(device))
    return param, BlockOptimizer([param], 1e-2, plan=configuration, kernel="triton", on_nonfinite=on_nonfinite)


def _tensors(param: nn.Parameter, optimizer: BlockOptimizer) -> list[Tensor]:
    state = optimizer.state_dict()["state"][0]
    return [param.detach(), *(held if isinstance(held, Tensor) else torch.tensor(held) for held in state.values())]


def _row(timing: Timing, timings: tuple[Timing, ...]) -> list[str]:
    fused = next((each.seconds for each in timings if each.optimizer == "torch AdamW fused" and each.seconds), None)
    assert timing.seconds is not None and timing.first_seconds is not None
    ratio = f"{timing.seconds / fused:.2f}x" if fused else "-"
    sizes = [human_bytes(each) if each is not None else "-" for each in (timing.state_bytes, timing.peak_bytes)]
    return [timing.optimizer, f"{timing.first_seconds:.3f} s", f"{1e3 * timing.seconds:.2f} ms", ratio, *sizes]


# ---- times ----

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
_TIMED_STEPS = 20
_PEERS = {
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit"),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit"),
}


@dataclass(frozen=True)
class Timing:
    """The times of one optimizer on all parameters of a model."""

    optimizer: str
    first_seconds: float | None = None  # includes compilation
    seconds: float | None = None  # median
    state_bytes: int | None = None
    peak_bytes: int | None = None  # of a step, without parameters, gradients and state; GPUs only
    problem: str | None = None
    failed: bool = False  # the problem is ours


def time_steps(configurations: Sequence[str], device: torch.device, tiny: bool) -> list[Timing]:
    """Time torch's fused AdamW, our configurations, and other optimizers.

    Args:
        configurations: The configurations to time.
        device: The device of all parameters.
        tiny: Use small tensors and few steps.

    Returns:
        One result per optimizer; its ``problem`` says why it could not be timed, such as a missing package.
    """
    makers: dict[str, Make | str] = {
        "torch AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
        **{name: _ours(name, device) for name in configurations},
        **{name: _peer(*where) for name, where in _PEERS.items() if device.type == "cuda"},
    }
    shapes = _shapes(16, 1) if tiny else _shapes(1024, 12)
    return [_timed(name, make, shapes, device, 2 if tiny else _TIMED_STEPS) for name, make in makers.items()]


def _ours(configuration: str, device: torch.device) -> Make:
    return lambda params: BlockOptimizer(params, lr=1e-4, plan=f"{configuration} else adamw-32", kernel="triton")


def _peer(module: str, name: str) -> Make | str:
    try:
        optimizer = getattr(importlib.import_module(module), name)
    except ImportError as error:
        return f"not installed ({error})"
    return lambda params: optimizer(params, lr=1e-4)


def _shapes(width: int, depth: int) -> list[tuple[int, ...]]:
    """Return the shapes of a transformer: width 1,024 and depth 12 have 184M parameters in 146 tensors."""
    layer = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), *[(width,)] * 8]
    return [(32 * width, width), *layer * depth, (width,)]


def _timed(name: str, make: Make | str, shapes: Sequence[tuple[int, ...]], device: torch.device, steps: int) -> Timing:
    if isinstance(make, str):
        return Timing(name, problem=make)
    params = [nn.Parameter(torch.full(shape, 0.1, device=device)) for shape in shapes]
    for param in params:
        param.grad = torch.full_like(param, 0.01)
    try:
        optimizer = make(params)
        first = _seconds(optimizer.step, device)
        seconds = sorted(_seconds(optimizer.step, device) for _ in range(steps))[steps // 2]
        return Timing(name, first, seconds, state_bytes(optimizer), _peak(optimizer.step, device))
    except Exception as error:
        return Timing(name, problem=first_line(error), failed=name not in _PEERS)


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _seconds(step: Callable[[], Any], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    step()
    _wait(device)
    return time.perf_counter() - start


def _peak(step: Callable[[], Any], device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    _wait(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""What somebody with a GPU runs once: are the Triton kernels right here, and how fast are they beside their peers?"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from baoc.core.configuration import BEYOND, CATALOG
from baoc.core.text import human_bytes, table
from baoc.selfcheck.behaviour import compare_behaviour
from baoc.selfcheck.equality import Equality, compare
from baoc.selfcheck.timing import Timing, time_steps

CONFIGURATIONS = tuple(map(str, (*CATALOG, *BEYOND)))
TINY_CONFIGURATIONS = ("adamw-16", "adamw-8", "lion-4", "adamw[m=int8,v=factored]")
OnPart = Callable[[int, int, str], None]
TIMED = ("adamw-32", "adamw-16", "adamw-8", "adamw[m=int8,v=factored]", "adamw[m=int4,v=factored]", "lion-8", "muon-8")


@dataclass(frozen=True)
class Report:
    """What was found on one device."""

    machine: dict[str, str]
    equalities: tuple[Equality, ...]
    timings: tuple[Timing, ...]

    @property
    def passed(self) -> bool:
        return all(each.passed for each in self.equalities)

    def content(self) -> dict[str, Any]:
        """As JSON."""
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
    """Compare all configurations with the eager kernel on the CPU, then time some of them and what peers there are.

    Steps that the device leaves out, and those of a CUDA graph, are compared with usual ones.

    Args:
        device: a GPU, or the CPU where Triton interprets.
        tiny: few configurations of small tensors.
        times: time steps as well.
        on_part: called after each part with its number, how many there are, and what it was.
    """
    configurations = TINY_CONFIGURATIONS if tiny else CONFIGURATIONS
    parts = len(configurations) + 1 + times
    equalities: list[Equality] = []
    for done, name in enumerate(configurations, 1):
        equalities += compare(name, device, every_dtype=not tiny)
        on_part(done, parts, name)
    equalities += compare_behaviour(device)
    on_part(len(configurations) + 1, parts, "steps left out, steps in a graph")
    timings = time_steps(configurations[:2] if tiny else TIMED, device, tiny) if times else []
    if times:
        on_part(parts, parts, "times")
    return Report(_machine(device), tuple(equalities), tuple(timings))


def _row(timing: Timing, timings: tuple[Timing, ...]) -> list[str]:
    fused = next((each.seconds for each in timings if each.optimizer == "torch AdamW fused" and each.seconds), None)
    assert timing.seconds is not None and timing.first_seconds is not None
    ratio = f"{timing.seconds / fused:.2f}x" if fused else "-"
    sizes = [human_bytes(each) if each is not None else "-" for each in (timing.state_bytes, timing.peak_bytes)]
    return [timing.optimizer, f"{timing.first_seconds:.3f} s", f"{1e3 * timing.seconds:.2f} ms", ratio, *sizes]


def _machine(device: torch.device) -> dict[str, str]:
    import triton

    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else f"{platform.processor() or 'cpu'}, interpreted",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "driver": f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}",
        "python": platform.python_version(),
    }

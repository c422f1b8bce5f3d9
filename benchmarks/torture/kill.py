"""SIGKILL at random points of a training script. Every run that was killed and resumed must end like one that was not.

A point is the n-th function call within a stage: warm-up, planner, migration, save, rename, replan, or anything else.
Calls are counted in a run without kills. Then a stage is drawn, and one of its calls, so that rare stages are hit as
often as long ones. Processes are forked from one that has imported everything, so a life takes a second.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.torture.training import SCENARIOS, Scenario, train

ELSEWHERE, RENAME, LOAD = "training", "rename", "load"
STAGES = {
    ("sampling.py", "observe"): "warm-up",
    ("effects.py", "initial_plan"): "planner",
    ("planner.py", "initial_plan"): "planner",
    ("planner.py", "plan"): "planner",
    ("optimizer.py", "_change_plan"): "migration",
    ("serialization.py", "save"): "save",
    ("files.py", "replaced"): "save",
    ("optimizer.py", "replan"): "replan",
    ("optimizer.py", "load_state_dict"): LOAD,
}
_AGAIN = 0.4  # how often a resumed run is killed once more


class Clock:
    """Counts the calls of every stage, and kills its process at one of them."""

    def __init__(self, stage: str = "", call: int = -1) -> None:
        self.calls: Counter[str] = Counter()
        self._at = stage, call
        self._stack: list[tuple[int, str]] = []

    def start(self) -> None:
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            stage = STAGES.get((os.path.basename(frame.f_code.co_filename), frame.f_code.co_name))
            if stage is not None:
                self._stack.append((id(frame), stage))
            self._count(self._stage())
        elif event == "return" and self._stack and self._stack[-1][0] == id(frame):
            self._stack.pop()
        elif event in ("c_call", "c_return") and getattr(argument, "__name__", "") in ("replace", "rename"):
            self._count(RENAME if argument.__module__ in ("posix", "nt") else self._stage())  # before it and after it

    def _stage(self) -> str:
        stages = [stage for _, stage in self._stack]
        return "replan" if "replan" in stages else stages[-1] if stages else ELSEWHERE

    def _count(self, stage: str) -> None:
        if (stage, self.calls[stage]) == self._at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls[stage] += 1


def life(folder: Path, scenario: Scenario, number: int, victim: int = -1, stage: str = "", call: int = -1) -> bool:
    """Train from the last checkpoint in new processes. Return whether the victim was killed before the end."""
    os.environ["LIFE"] = str(number)
    children = [
        _forked(folder, scenario, rank, stage if rank == victim else "", call) for rank in range(scenario.ranks)
    ]
    left, killed = set(children), False
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if os.WIFSIGNALED(status):
            killed = True
            for other in left:  # as launchers do
                os.kill(other, signal.SIGKILL)
        elif os.WEXITSTATUS(status) and not killed:
            raise RuntimeError("\n".join(file.read_text() for file in folder.glob("error-*")))
    return killed


def _forked(folder: Path, scenario: Scenario, rank: int, stage: str, call: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        clock = Clock(stage, call)
        clock.start()
        train(folder, scenario, rank)
        sys.setprofile(None)
        (folder / f"calls-{rank}.json").write_text(json.dumps(clock.calls))
        code = 0
    except BaseException:  # also of a rank whose neighbour was killed
        (folder / f"error-{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _new(place: str, name: str) -> Path:
    folder = Path(place, name)
    folder.mkdir()
    return folder


def ends(folder: Path, scenario: Scenario) -> list[str]:
    return [(folder / f"end-{rank}.json").read_text() for rank in range(scenario.ranks)]


def _calls(folder: Path, scenario: Scenario) -> list[dict[str, int]]:
    return [json.loads((folder / f"calls-{rank}.json").read_text()) for rank in range(scenario.ranks)]


def run(times: int, seed: int = 0, names: list[str] | None = None) -> dict[str, Any]:
    """Kill ``times`` processes. Return the kills by stage and scenario, and the runs that ended differently."""
    draw = random.Random(seed)
    chosen = {name: SCENARIOS[name] for name in names or SCENARIOS}
    kills: Counter[str] = Counter()
    lives, runs = 0, 0
    different: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        expected, calls = {}, {}
        train(_new(place, "imports"), SCENARIOS["effects"])  # late imports would be made in every life
        for name, scenario in chosen.items():
            folder = _new(place, f"uninterrupted {name}")
            life(folder, scenario, 0)
            expected[name] = ends(folder, scenario)
            calls[name] = _calls(folder, scenario)
            life(folder, scenario, 1)  # from its last checkpoint, which only loads
            for rank, again in enumerate(_calls(folder, scenario)):
                calls[name][rank][LOAD] = again[LOAD]
        while sum(kills.values()) < times:
            name = list(chosen)[runs % len(chosen)]
            folder = _new(place, f"run {runs}")
            runs += 1
            points = []
            is_killed = True
            while is_killed:
                lives += 1
                victim = draw.randrange(chosen[name].ranks)
                stage = draw.choice(sorted(calls[name][victim]))
                call = draw.randrange(calls[name][victim][stage])
                wanted = sum(kills.values()) < times and (not points or draw.random() < _AGAIN)
                is_killed = life(folder, chosen[name], lives, victim if wanted else -1, stage, call)
                if is_killed:
                    kills[f"{name}: {stage}"] += 1
                    points.append(f"{stage} {call} on rank {victim}")
            if ends(folder, chosen[name]) != expected[name]:
                different.append(f"{name}, killed at {', '.join(points)}")
            print(f"{sum(kills.values())} kills, {len(different)} runs ended differently", end="\r", file=sys.stderr)
            for file in folder.iterdir():
                file.unlink()
    stages: Counter[str] = Counter()
    for key, count in kills.items():
        stages[key.partition(": ")[2]] += count
    return {
        "kills": sum(kills.values()),
        "runs": runs,
        "stages": dict(stages),
        "by": dict(kills),
        "different": different,
    }

"""What `import baoc` costs, and who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import baoc

SOURCE = Path(baoc.__file__).parent
# Each room imports only from rooms above it. A subpackage is one room.
ROOMS = [
    "_version",
    "solve",
    "spec",
    "text",
    "codecs",
    "mechanisms",
    "configuration",
    "measure",
    "plan",
    "groups",
    "kernels",
    "migrate",
    "torch_state",
    "checkpoint",
    "optimizer",
    "coordinates",
    "sampling",
    "profiles",
    "metrics",
    "partition",
    "risk",
    "cost",
    "planner",
    "profiler",
    "configurator",
    "models",
    "estimate",
    "report",
    "cli",
    "__main__",
]


def test_importing_baoc_is_light():
    code = "import torch, sys; before = set(sys.modules); import baoc; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    third_party = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names) - {"baoc"}
    assert third_party <= {"torch", "numpy"}
    assert not [name for name in loaded if name.startswith(("torch._dynamo", "torch._inductor", "torch.distributed"))]


def test_imports_only_go_down_the_layers():
    def room(parts: tuple[str, ...]) -> str:
        return parts[0].removesuffix(".py")

    for path in SOURCE.rglob("*.py"):
        own = room(path.relative_to(SOURCE).parts)
        if own == "__init__":
            continue
        assert own in ROOMS, f"{path.name}: give the room {own!r} its place in ROOMS"
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.ImportFrom) and node.module == "baoc":
                modules = [alias.name for alias in node.names if alias.name in ROOMS]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("baoc."):
                modules = [node.module.split(".")[1]]
            for imported in modules:
                assert ROOMS.index(imported) <= ROOMS.index(own), f"{own} imports {imported}"

"""What `import baoc` costs, and who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import baoc

SOURCE = Path(baoc.__file__).parent
# A room is a package, or a module that stands by itself, and what it may import besides itself.
ENGINE = {"core", "solve", "optim", "profiling", "planning"}
ROOMS: dict[str, set[str]] = {
    "_version": set(),
    "core": set(),
    "solve": set(),
    "models": set(),
    "optim": {"core"},
    "profiling": {"core"},
    "planning": {"core", "solve", "profiling"},
    "plan": ENGINE,
    "calibrate": ENGINE,
    "configurator": ENGINE,
    "integrations": {"core", "optim", "configurator"},
    "report": {*ENGINE, "configurator"},
    "fit": {*ENGINE, "models", "report"},
    "selfcheck": {"core", "optim"},
    "cli": {*ENGINE, "_version", "calibrate", "fit", "models", "plan", "report", "selfcheck"},
    "__main__": {"cli"},
}
# Within core and optim too, imports only go down.
LAYERS = {
    "core": [
        "spec",
        "sharding",
        "rounding",
        "text",
        "notice",
        "files",
        "roles",
        "codecs",
        "mechanisms",
        "configuration",
        "plan",
        "budget",
    ],
    "optim": [
        *("place", "measure", "blocks", "groups", "state", "kernels", "offload", "engine", "guard", "watch"),
        *("rehearsal", "checks", "migrate", "lr_match", "torch_state", "checkpoint", "optimizer"),
    ],
}


def imports(path: Path) -> set[tuple[str, ...]]:
    """Modules of the package that a file imports, as parts below ``baoc``."""
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "baoc":
            inside = tuple((node.module or "").split(".")[1:])
            found |= {(*inside, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")[1:]) for alias in node.names if alias.name.split(".")[0] == "baoc"}
    return found


def files() -> list[tuple[str, Path]]:
    inside = [path.relative_to(SOURCE) for path in SOURCE.rglob("*.py")]
    return [(path.parts[0].removesuffix(".py"), SOURCE / path) for path in inside if path.parts != ("__init__.py",)]


def test_importing_baoc_is_light():
    code = "import torch, sys; before = set(sys.modules); import baoc; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    third_party = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names) - {"baoc"}
    assert third_party <= {"torch", "numpy"}
    assert not [name for name in loaded if name.startswith(("torch._dynamo", "torch._inductor", "torch.distributed"))]


def test_a_module_is_not_hidden_behind_a_function():
    code = "import baoc.plan, sys; print(baoc.plan is sys.modules['baoc.plan'], callable(baoc.make_plan))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["True"] * 2
    for name in baoc.__all__:
        assert not isinstance(getattr(baoc, name), type(sys)), f"baoc.{name} is a module"


def test_every_room_imports_what_it_may():
    for room, path in files():
        assert room in ROOMS, f"{path.name}: give the room {room!r} its place in ROOMS"
        for module in imports(path):
            if module and module[0] in ROOMS:
                assert module[0] == room or module[0] in ROOMS[room], f"{path.relative_to(SOURCE)} imports {module[0]}"


@pytest.mark.parametrize("room", LAYERS)
def test_imports_only_go_down_the_layers(room):
    layers = LAYERS[room]
    for path in (SOURCE / room).rglob("*.py"):
        own = path.relative_to(SOURCE / room).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        assert own in layers, f"{path.name}: give {own!r} its place in LAYERS[{room!r}]"
        for module in imports(path):
            if module[:1] == (room,) and len(module) > 1 and module[1] in layers:
                assert layers.index(module[1]) <= layers.index(own), f"{room}.{own} imports {module[1]}"


def test_the_package_knows_nothing_of_what_stands_outside():
    for _, path in files():
        text = path.read_text()
        assert "experiments" not in text and "benchmarks" not in text, path.relative_to(SOURCE)

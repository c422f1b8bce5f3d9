"""What `import baoc` costs, and who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import baoc

SOURCE = Path(baoc.__file__).parent
# A room is a package, or a module beside the packages, and what it may import besides itself.
ENGINE = {"core", "solve", "optim", "planners"}
ROOMS: dict[str, set[str]] = {
    "_version": set(),
    "core": set(),
    "solve": set(),
    "optim": {"core"},
    "planners": {"core", "solve"},
    "plan": ENGINE,
    "planning": {*ENGINE, "plan"},
    "resume": {*ENGINE, "planning"},
    "optimizer": {*ENGINE, "planning", "resume"},
    "integrations": {*ENGINE, "optimizer"},
    "tools": {*ENGINE, "_version", "plan"},
    "_api": {*ENGINE, "_version", "optimizer", "plan", "resume"},
    "__main__": {"tools"},
}
# Within a package too, imports only go down: a module may import those to its left.
LAYERS = {
    "core": [
        *("spec", "sharding", "rounding", "text", "files", "roles", "codecs", "mechanisms", "configuration"),
        *("splits", "fused", "block", "plan", "budget"),
    ],
    "optim": [
        *(
            "agreement",
            "state",
            "groups",
            "members",
            "kernels",
            "low_bits",
            "staging",
            "engine",
            "guard",
            "conversion",
            "migrate",
        ),
        *("assignment", "torch_state", "checkpoint", "optimizer", "release"),
    ],
    "planners": [
        *("model_facts", "base", "total", "patterns", "cost", "placement", "lr_multipliers", "trust"),
        *("effect_table", "scaling", "weights", "simplify", "effect_classes", "effect_problem", "effects", "paper"),
    ],
    "planners/paper": [
        *("units", "coordinates", "sampling", "statistics", "metrics", "risk", "refine"),
        *("times", "problem", "planner"),
    ],
    "tools": ["models", "estimate", "calibrate", "selfcheck", "report", "fit", "cli"],
    "integrations": ["common", "trainers"],
}


def imports(path: Path) -> set[tuple[str, ...]]:
    """Modules of the package that a file imports, as parts below ``baoc``. Imports for types alone do not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(tree):
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
    names = "set(sys.modules)"
    code = f"import torch, sys; before = {names}; import baoc; baoc.BAOC; print(*sorted({names} - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    third_party = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names) - {"baoc"}
    assert third_party <= {"torch", "numpy"}
    assert not [name for name in loaded if name.startswith(("torch._dynamo", "torch._inductor", "torch.distributed"))]


def test_public_names_are_imported_on_first_use():
    code = (
        "import sys, baoc; assert 'torch' not in sys.modules; from baoc import *\n"
        "assert set(baoc.__all__) <= set(dir(baoc)) & set(globals()) and not hasattr(baoc, 'nothing')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for module in ("optimizer", "resume", "optim", "planners", "integrations.common"):  # each may be the first
        subprocess.run([sys.executable, "-c", f"import baoc.{module}"], check=True)


def test_a_module_is_not_hidden_behind_a_function():
    code = "import baoc.plan, sys; print(baoc.plan is sys.modules['baoc.plan'], callable(baoc.make_plan))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["True"] * 2
    for name in baoc.__all__:
        assert not isinstance(getattr(baoc, name), type(sys)), f"baoc.{name} is a module"


def test_every_room_imports_what_it_may():
    assert {room for room, _ in files()} == set(ROOMS), "ROOMS names packages that do not exist"
    for room, path in files():
        assert room in ROOMS, f"{path.name}: give the room {room!r} its place in ROOMS"
        for module in imports(path):
            if module and module[0] in ROOMS:
                assert module[0] == room or module[0] in ROOMS[room], f"{path.relative_to(SOURCE)} imports {module[0]}"


@pytest.mark.parametrize("package", LAYERS)
def test_imports_only_go_down_the_layers(package):
    layers, parts = LAYERS[package], tuple(package.split("/"))
    seen = set()
    for path in (SOURCE / package).rglob("*.py"):
        own = path.relative_to(SOURCE / package).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        assert own in layers, f"{path.name}: give {own!r} its place in LAYERS[{package!r}]"
        seen.add(own)
        for module in imports(path):
            if module[: len(parts)] == parts and len(module) > len(parts) and module[len(parts)] in layers:
                other = module[len(parts)]
                assert layers.index(other) <= layers.index(own), f"{package}/{own} imports {other}"
    assert seen == set(layers), "LAYERS names modules that do not exist"


def test_the_package_knows_nothing_of_what_stands_outside():
    for _, path in files():
        text = path.read_text()
        assert "experiments" not in text and "benchmarks" not in text, path.relative_to(SOURCE)

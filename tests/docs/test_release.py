"""The files of a release can be installed and used without the rest of the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

import baoc

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "baoc"
HAS_COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))
LARGEST = 1 << 20  # bytes of an sdist, which has no pictures
COMPILED = {".c", ".h", ".so"}

pytestmark = pytest.mark.xdist_group("release")

USE = """
import sys, torch, baoc
from baoc.tools.cli import main
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64))
optimizer = baoc.BAOC(model, memory=0.5, verbose=False)
for _ in range(2):
    model(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()
assert baoc.state_bytes(optimizer) <= 0.5 * optimizer.plan.reference_bytes
optimizer.plan.save("plan.json")
for command in ("fit vit --states", "explain plan.json", "report plan.json -o report.html"):
    assert main(command.split()) == 0, command
print(baoc.__file__)
print(optimizer.kernel)
"""


def run(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in an environment without this folder."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(list(map(str, command)), cwd=cwd, env=inherited | variables, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, copied = tmp_path_factory.mktemp("sdist"), tmp_path_factory.mktemp("source") / "baoc"
    # A build leaves files beside the sources, where another process may be building too.
    shutil.copytree(ROOT, copied, ignore=shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "results"))
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, folder, cwd=copied)
    [found] = folder.iterdir()
    return found


OFFLINE = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")


def wheel_of(sdist: Path, folder: Path, **variables: str) -> Path:
    """Build a wheel from the sdist alone."""
    pip = (sys.executable, "-m", "pip", "wheel", *OFFLINE, "--no-build-isolation")
    run(*pip, "--wheel-dir", folder, sdist, cwd=folder, **variables)
    [found] = folder.glob("*.whl")
    return found


def installed(wheel: Path, folder: Path) -> Path:
    """Return the ``bin`` of a new environment with this wheel and the packages of the current environment."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", *OFFLINE, wheel, cwd=folder)
    [site] = folder.glob("lib/python*/site-packages")
    # A folder that a .pth file names is searched, but its own .pth files, an editable install among them, are not read.
    (site / "others.pth").write_text("\n".join({sysconfig.get_path(kind) for kind in ("purelib", "platlib")}))
    return python.parent


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_a_build_succeeds_without_a_compiler(tmp_path, compiler):
    folders = ("--build-lib", tmp_path, "--build-temp", tmp_path)
    run(sys.executable, "setup.py", "-q", "build_ext", *folders, cwd=ROOT, CC=compiler)
    assert not list(tmp_path.rglob("*.so"))


def test_an_sdist_is_what_a_build_needs_and_little_else(sdist):
    with tarfile.open(sdist) as archive:
        inside = {Path(name).relative_to(Path(name).parts[0]) for name in archive.getnames()}
    needed = {
        path.relative_to(ROOT) for path in SOURCE.rglob("*") if path.is_file() and path.suffix not in (".so", ".pyc")
    }
    beside = {Path(name) for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "CHANGELOG.md")}
    assert needed | beside <= inside
    assert {path.parts[0] for path in inside if path.parts} <= {
        *("src", "MANIFEST.in", "PKG-INFO", "setup.cfg"),
        *map(str, beside),
    }
    assert sdist.stat().st_size < LARGEST


@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler")
def test_a_wheel_installs_and_runs_natively(sdist, tmp_path):
    wheel = wheel_of(sdist, tmp_path)
    assert re.fullmatch(r"baoc-[\w.]+-cp310-abi3-\w+\.whl", wheel.name), "one wheel for every Python"
    programs = installed(wheel, tmp_path / "env")
    [package] = (tmp_path / "env").glob("lib/python*/site-packages/baoc")
    found = {path.relative_to(package) for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    ours = {path.relative_to(SOURCE) for path in SOURCE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {path for path in found if path.suffix not in COMPILED} == {p for p in ours if p.suffix not in COMPILED}
    assert [path.name for path in found if path.suffix in COMPILED] == ["_native.abi3.so"]
    assert run(programs / "baoc", "--version", cwd=tmp_path).stdout == f"baoc {baoc.__version__}\n"
    used = run(programs / "python", "-c", USE, cwd=tmp_path)
    where, kernel = used.stdout.splitlines()[-2:]
    assert Path(where).is_relative_to(package) and kernel.startswith("native on cpu")
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_without_a_compiler_it_installs_runs_eagerly_and_says_so(sdist, tmp_path):
    programs = installed(wheel_of(sdist, tmp_path, CC="false"), tmp_path / "env")
    used = run(programs / "python", "-c", USE, cwd=tmp_path)
    assert used.stdout.splitlines()[-1].startswith("eager on cpu: the native kernels were not built")
    assert used.stderr.count("several times slower on cpu: the native kernels were not built") == 1, used.stderr


def test_the_index_shows_no_link_that_leads_nowhere(sdist):
    with tarfile.open(sdist) as archive:
        [name] = [name for name in archive.getnames() if name.count("/") == 1 and name.endswith("PKG-INFO")]
        text = archive.extractfile(name).read().decode()
    body = text.partition("\n\n")[2]
    assert "optimizer memory as a budget you set" in body
    code = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
    targets = re.findall(r"\]\(([^)]*)\)", code.sub("", body))
    assert [target for target in targets if not target.startswith(("https:", "http:", "#"))] == []


# ---- version and changelog ----


def headings() -> list[tuple[str, str]]:
    """Return the versions of the changelog, newest first, with the rest of each heading."""
    return re.findall(r"^## \[([^\]]+)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_the_changelog_begins_with_this_version():
    """Between releases, the version ends with .dev0, and the changelog has it as unreleased."""
    (newest, date), *older = headings()
    released = [version for version, _ in older]
    if baoc.__version__.endswith(".dev0"):
        assert (newest, date) == ("Unreleased", "")
        assert baoc.__version__.removesuffix(".dev0") not in released
    else:
        assert newest == baoc.__version__ and re.fullmatch(r" - \d{4}-\d\d-\d\d", date)
        assert "Unreleased" not in released
    assert len(set(released)) == len(released)


@pytest.mark.parametrize(
    ("file", "pattern"), [("CITATION.cff", r"^version: (\S+)$"), ("README.md", r"badge/version-(\S+)-")]
)
def test_other_files_have_this_version(file, pattern):
    found = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    assert found and found[1] == baoc.__version__.removesuffix(".dev0")


def test_the_changelog_has_the_usual_sections():
    kinds = set(re.findall(r"^### (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE))
    assert kinds and kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}

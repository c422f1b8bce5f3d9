"""What pyproject.toml cannot say: how the native kernels are compiled, that they may be missing, and what of the README
can be read where the rest of the repository is not.
"""

import re
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError

FOLDER = Path("src/baoc/optim/kernels/native")
# Results must not depend on the instruction set, so no contraction and no fast math; what sqrt and comparisons do to
# errno and traps is of no use here and would keep loops from being vectorised, and so would indices that wrap around,
# which the flags that Python was built with ask for.
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-wrapv"]
OPENMP = ["-fopenmp"]


class BuildNative(build_ext):
    """Compiles with OpenMP where there is one, else for a single thread."""

    def build_extension(self, ext: Extension) -> None:
        compile_args, link_args = ext.extra_compile_args, ext.extra_link_args
        try:
            ext.extra_compile_args, ext.extra_link_args = compile_args + OPENMP, link_args + OPENMP
            super().build_extension(ext)
        except (CCompilerError, ExecError, PlatformError):
            ext.extra_compile_args, ext.extra_link_args = compile_args, link_args
            super().build_extension(ext)


def description() -> str:
    """The README without its pictures, and without links to files that are not there beside it."""
    text = Path("README.md").read_text(encoding="utf-8")
    text = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", "", text, flags=re.MULTILINE)
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension(
            "baoc.optim.kernels.native._native",
            sources=sorted(map(str, FOLDER.glob("*.c"))),
            depends=sorted(map(str, FOLDER.glob("*.h"))),
            extra_compile_args=FLAGS,
            py_limited_api=True,
            optional=True,  # without a compiler the package still installs, and its optimizers run on torch alone
        )
    ],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)

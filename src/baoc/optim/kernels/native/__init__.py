"""The update in C: one pass over memory in tiles that stay in the L1 cache, and all tensors of a step in one call.

The C code is given addresses and knows nothing of torch, so one build serves every version of it. It serves exactly
the mechanisms and formats that are named here, by their very class, in plain contiguous fp32 and bf16 tensors. Whatever
else there is (a class derived from one of these, other dtypes, views, tensor subclasses) the eager kernel runs.
"""

from __future__ import annotations

import functools
import importlib
import math
from array import array
from collections.abc import Iterable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from baoc.core.codecs.base import Format, joined
from baoc.core.codecs.dense import BF16Format, FP32Format
from baoc.core.codecs.factored import FactoredFormat
from baoc.core.codecs.int8 import Int8Format
from baoc.core.configuration import Layout
from baoc.core.mechanisms import Mechanism
from baoc.core.mechanisms.adafactor import Adafactor
from baoc.core.mechanisms.adam import Adam, AdamW
from baoc.core.mechanisms.sgd import SGD, SGDM, SGDW, SGDWM
from baoc.core.spec import Shape
from baoc.optim.kernels.eager import EagerKernel
from baoc.optim.kernels.job import Job
from baoc.optim.place import WHOLE

# What is what in C: see job.h, which has these names.
_MECHANISMS: dict[type[Mechanism], str] = {
    SGD: "SGD",
    SGDW: "SGD",
    SGDM: "MOMENTUM",
    SGDWM: "MOMENTUM",
    Adam: "ADAM",
    AdamW: "ADAM",
    Adafactor: "ADAFACTOR",
}
_FORMATS: dict[type[Format], str] = {
    FP32Format: "FP32",
    BF16Format: "BF16",
    Int8Format: "INT8",
    FactoredFormat: "FACTORED",
}
_DTYPES = {torch.float32: "FP32", torch.bfloat16: "BF16"}
_PLAIN = (Tensor, nn.Parameter)  # a subclass may have its numbers anywhere


@functools.cache
def _library() -> ModuleType | str:
    """The compiled module, or why there is none."""
    try:
        return importlib.import_module("baoc.optim.kernels.native._native")
    except ImportError as error:
        return (
            f"the native kernels were not built when baoc was installed ({error}). Install a C compiler and reinstall"
        )


def obstacle() -> str | None:
    """Why the native kernel cannot run here, or ``None`` if it can."""
    library = _library()
    return library if isinstance(library, str) else None


class NativeKernel:
    """Runs on a CPU, in as many threads as torch would use; the result does not depend on their number.

    Args:
        isa: one of :meth:`isas`; the best one by default.
    """

    name = "native"

    def __init__(self, isa: str | None = None) -> None:
        library = _library()
        if isinstance(library, str):
            raise RuntimeError(f"kernel='native' cannot run: {library}.")
        self._run = library.run
        # C spells "m.keep" as m_keep
        self._scalars = [(name, name.replace("_", ".", 1)) for name in library.JOB_SCALARS]
        self.isa = isa or self.isas()[0]
        self._eager = EagerKernel()

    @staticmethod
    def isas() -> tuple[str, ...]:
        """The instruction sets that this processor and this build have, best first."""
        library = _library()
        return () if isinstance(library, str) else library.isas()

    def run(self, jobs: Iterable[Job]) -> None:
        words: list[int] = []
        scalars: list[float] = []
        rows: dict[int, tuple[int, object]] = {}  # jobs of one group share their scalars, held so that ids stay theirs
        served: list[Tensor] = []
        left: list[Job] = []
        for job in jobs:
            form = _form(job.layout, job.param.shape, job.param.dtype, job.grad.dtype)
            job_words = None if form is None else _words(job, form)
            if form is None or job_words is None:
                left.append(job)
                continue
            key = id(job.scalars)
            if key not in rows:
                rows[key] = len(rows), job.scalars
                scalars += self._row(job)
            job_words[form.scalars] = rows[key][0]
            words += job_words
            served.append(job.param)
        if served:
            packed = array("q", words), array("d", scalars)
            self._run(*(each.buffer_info()[0] for each in packed), len(served), torch.get_num_threads(), self.isa)
            torch.autograd.graph.increment_version(served)  # autograd cannot see what C writes
        if left:
            self._eager.run(left)

    def _row(self, job: Job) -> list[float]:
        return [float(job.scalars.get(dotted, job.scalars.get(name, 0.0))) for name, dotted in self._scalars]


@functools.cache
def _places() -> dict[str, int]:
    """Where each field of the C struct ``job_words`` stands: its numbers, then its arrays with their parts."""
    library = _library()
    assert not isinstance(library, str)
    arrays = [f"{name}.{part}" for name in library.JOB_ARRAYS for part in library.ARRAY_PARTS]
    return {name: index for index, name in enumerate((*library.JOB_NUMBERS, *arrays))}


class _Form(NamedTuple):
    """What all jobs with the same layout and dtypes have in common."""

    template: list[int]  # the struct ``job_words``, with zeros for what changes
    buffers: tuple[tuple[int, str], ...]  # where a buffer's address goes, and its key in the state
    param: int  # where each of these goes
    grad: int
    scalars: int
    negate: int
    m_phase: int
    v_phase: int


def _words(job: Job, form: _Form) -> list[int] | None:
    """A job as ``job_words``, or ``None`` if one of its tensors is not what C code would take it for."""
    _, param, grad, state, _, phases, _, maximize, place, _ = job
    template, buffers, param_at, grad_at, _, negate_at, m_phase_at, v_phase_at = form
    if place is not WHOLE or type(param) not in _PLAIN or type(grad) not in _PLAIN:
        return None  # C code adds up what is here, and reads it at its address as it is
    if not (param.is_contiguous() and grad.is_contiguous()) or grad.is_neg():
        return None
    words = template.copy()
    address = words[param_at] = param.data_ptr()
    grad_address = words[grad_at] = grad.data_ptr()
    found = address and grad_address
    words[negate_at] = maximize
    words[m_phase_at], words[v_phase_at] = phases.get("m", 0), phases.get("v", 0)  # type: ignore[assignment]
    for at, key in buffers:
        buffer = state[key]
        if type(buffer) is not Tensor or not buffer.is_contiguous():
            return None
        address = words[at] = buffer.data_ptr()
        found = found and address
    if not found:
        job.refuse_freed()
    return words


@functools.lru_cache(maxsize=1 << 16)
def _form(layout: Layout, shape: torch.Size, param_dtype: torch.dtype, grad_dtype: torch.dtype) -> _Form | None:
    library, mechanism = _library(), _MECHANISMS.get(type(layout.mechanism))
    arrays = [part for stored in layout.formats for part in _arrays(stored)]
    if mechanism is None or {param_dtype, grad_dtype} - set(_DTYPES) or not math.prod(shape):
        return None
    if any(name is None for _, name, _ in arrays):
        return None
    assert not isinstance(library, str)
    places, types = _places(), {name: index + 1 for index, name in enumerate(library.TYPES)}
    words = [0] * len(places)
    matrix = next((stored.matrix for stored in layout.formats if isinstance(stored, FactoredFormat)), shape)
    for name, value in _geometry(matrix).items():
        words[places[name]] = value
    words[places["mechanism"]] = library.MECHANISMS.index(mechanism)
    words[places["param.type"]], words[places["grad.type"]] = types[_DTYPES[param_dtype]], types[_DTYPES[grad_dtype]]
    buffers: list[tuple[int, str]] = []
    for array_name, type_name, keys in arrays:
        assert type_name is not None
        words[places[f"{array_name}.type"]] = types[type_name]
        buffers += [(places[f"{array_name}.{part}"], key) for part, key in keys.items()]
    changing = ("param.data", "grad.data", "scalars", "negate", "m_phase", "v_phase")
    return _Form(words, tuple(buffers), *(places[name] for name in changing))


def _arrays(stored: Format) -> list[tuple[str, str | None, dict[str, str]]]:
    """A slot's arrays: name in C, type there (``None``: it has none), and the state's keys of their parts."""
    name, known = stored.slot.name, _FORMATS.get(type(stored))
    if known is None:
        return [(name, None, {})]
    if not isinstance(stored, FactoredFormat):
        return [(name, known, _parts(stored, ""))]
    factors = [(f"{name}_{each}", _FORMATS.get(type(factor)), _parts(stored, each)) for each, factor in stored.factors]
    return [(name, known, {}), *factors]


def _parts(stored: Format, factor: str) -> dict[str, str]:
    """The state's keys of an array's data and exponents. Dense numbers have the array's own name."""
    keys = dict(stored.keys)
    if factor in keys:
        return {"data": keys[factor]}
    named = {"data": "codes", "exponents": "exponents"}
    return {part: keys[joined(factor, buffer)] for part, buffer in named.items()}


def _geometry(shape: Shape | torch.Size) -> dict[str, int]:
    """numel, elements of a dim-0 row, and what factors are kept for: stacks, matrices in one, rows, columns.

    >>> _geometry((768, 3072))
    {'numel': 2359296, 'row': 3072, 'outer': 1, 'matrices': 1, 'rows': 768, 'cols': 3072}
    >>> tuple(_geometry((768,)).values()), tuple(_geometry((64, 32, 3, 3)).values())
    ((768, 768, 1, 1, 1, 768), (18432, 288, 64, 32, 3, 3))
    """
    numel = math.prod(shape)
    if len(shape) == 1:  # its rows would be single elements, but nothing is kept by rows
        sizes: tuple[int, ...] = (numel, numel, 1, 1, 1, numel)
    elif len(shape) == 2:
        sizes = (numel, shape[1], 1, 1, *shape)
    else:
        sizes = (numel, math.prod(shape[1:]), shape[0], math.prod(shape[1:-2]), *shape[-2:])
    return dict(zip(("numel", "row", "outer", "matrices", "rows", "cols"), sizes))

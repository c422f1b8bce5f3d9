"""The update in C: one pass over memory in tiles that stay in the L1 cache, and all tensors of a step in one call.

The C code is given addresses and knows nothing of torch, so one build serves every version of it. It serves exactly
the mechanisms and formats that are named here, by their very class, in plain fp32 and bf16 tensors that are contiguous
in their own order or with channels last. Whatever else there is (a class derived from one of these, other dtypes,
views, tensor subclasses) the eager kernel runs.
"""

from __future__ import annotations

import functools
import importlib
import math
from array import array
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from baoc.core.codecs.base import Format, joined
from baoc.core.codecs.dense import BF16Format, FP32Format
from baoc.core.codecs.factored import FactoredFormat
from baoc.core.codecs.int4 import Int4Format
from baoc.core.codecs.int8 import Int8Format
from baoc.core.codecs.mean import ColMeanFormat, MeanFormat, RowMeanFormat
from baoc.core.configuration import Layout
from baoc.core.mechanisms import Mechanism
from baoc.core.mechanisms.adafactor import Adafactor
from baoc.core.mechanisms.adam import Adam, AdamW
from baoc.core.mechanisms.balanced import ColNorm, RowNorm, Sinkhorn
from baoc.core.mechanisms.lion import Lion
from baoc.core.mechanisms.muon import Muon, NorMuon, Spectral
from baoc.core.mechanisms.sgd import SGD, SGDM, SGDW, SGDWM
from baoc.core.roles import matrix_shape
from baoc.core.rounding import phase_at
from baoc.core.spec import Reach, Shape
from baoc.optim.kernels.eager import TILE_NUMEL, EagerKernel
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.matrices import EagerRows, run_matrices
from baoc.optim.place import Negated, Place

# What is what in C: see job.h, which has these names.
_MECHANISMS: dict[type[Mechanism], str] = {
    SGD: "SGD",
    SGDW: "SGD",
    SGDM: "MOMENTUM",
    SGDWM: "MOMENTUM",
    Adam: "ADAM",
    AdamW: "ADAM",
    Adafactor: "ADAFACTOR",
    Lion: "LION",
    ColNorm: "BALANCED",
    RowNorm: "BALANCED",
    Sinkhorn: "BALANCED",
}
_AHEAD: frozenset[type[Mechanism]] = frozenset({Muon, NorMuon, Spectral})
"""What C code does the rows of: see :class:`_NativeRows`."""
_FORMATS: dict[type[Format], str] = {
    FP32Format: "FP32",
    BF16Format: "BF16",
    Int8Format: "INT8",
    Int4Format: "INT4",
    RowMeanFormat: "FACTORED",
    ColMeanFormat: "FACTORED",
    FactoredFormat: "FACTORED",
}
_DTYPES = {torch.float32: "FP32", torch.bfloat16: "BF16"}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
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

    def run(self, jobs: Iterable[Job]) -> bool:
        left: list[Job] = []
        matrices: list[Job] = []
        spiked: list[bool] = []
        for job in self.serve(jobs, spiked=spiked):
            by_rows = type(job.layout.mechanism) in _AHEAD and job.place.numel(job.param)
            (matrices if by_rows else left).append(job)
        for job in matrices:
            job.refuse_freed()
        run_matrices(matrices, self.rows(matrices, spiked))
        return (self._eager.run(left) if left else False) or any(spiked)

    def rows(self, jobs: Sequence[Job], spiked: list[bool] | None = None) -> _NativeRows:
        """What goes row by row of jobs with matrices; ``spiked`` is told as it runs."""
        return _NativeRows(self, [] if spiked is None else spiked)

    def serve(self, jobs: Iterable[Job], as_mechanism: str = "", spiked: list[bool] | None = None) -> list[Job]:
        """Run what C code can run, under another mechanism's name if one is given; the jobs that are left.

        ``spiked`` is told whether one that was run has a gradient that is beyond all bounds.
        """
        words: list[int] = []
        scalars: list[float] = []
        rows: dict[int, tuple[int, object]] = {}  # jobs of one group share their scalars, held so that ids stay theirs
        served: list[Tensor] = []
        left: list[Job] = []
        for job in jobs:
            form = _form(job.layout, job.param.shape, job.param.dtype, job.grad.dtype, as_mechanism)
            # of the jobs with matrices it does what goes by rows: only sums over ranks are not its business
            is_alone = job.place.ranks is None or as_mechanism or job.layout.reach is Reach.ROWS
            job_words = _words(job, form) if form is not None and is_alone else None
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
            addresses = (each.buffer_info()[0] for each in packed)
            found = self._run(*addresses, len(served), torch.get_num_threads(), self.isa)
            if spiked is not None:
                spiked.append(found)
            torch.autograd.graph.increment_version(served)  # autograd cannot see what C writes
        return left

    def _row(self, job: Job) -> list[float]:
        return [float(job.scalars.get(dotted, job.scalars.get(name, 0.0))) for name, dotted in self._scalars]


class _NativeRows(EagerRows):
    """The rows of matrices, in C where it can: momentum before they are finished, and the parameter's move after."""

    def __init__(self, kernel: NativeKernel, spiked: list[bool]) -> None:
        super().__init__(TILE_NUMEL)
        self._kernel, self._spiked = kernel, spiked

    def directions(self, jobs: Sequence[Job], out: Sequence[Tensor]) -> None:
        # the direction is what a parameter of zeros becomes, by a step of -1
        scalars = {**jobs[0].scalars, "step": -1.0, "shrink": 0.0}
        with_out = [job._replace(param=each, scalars=scalars) for job, each in zip(jobs, out)]
        left = {id(job.param) for job in self._kernel.serve(with_out, "AHEAD", self._spiked)}
        self._spiked.append(bool(left))  # nobody looks at those
        rest = [(job, each) for job, each in zip(jobs, out) if id(each) in left]
        super().directions([job for job, _ in rest], [each for _, each in rest])

    def move(self, jobs: Sequence[Job], directions: Sequence[Tensor]) -> None:
        moving: list[tuple[Job, Tensor]] = []
        rest: list[tuple[Job, Tensor]] = []
        for job, direction in zip(jobs, directions):
            # a gradient that is no number has to show in its element, which C code would not know of
            whole = math.isfinite(job.grad.sum().item())
            (moving if whole else rest).append((job, direction))
        by_direction = [job._replace(grad=each, maximize=False) for job, each in moving]
        left = {id(job.grad) for job in self._kernel.serve(by_direction, "SGD")}
        rest += [(job, direction) for job, direction in moving if id(direction) in left]
        super().move([job for job, _ in rest], [each for _, each in rest])


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
    param_planes: int  # channels come next
    grad: int
    grad_planes: int
    scalars: int
    negate: int
    m_phase: int
    v_phase: int


def _words(job: Job, form: _Form) -> list[int] | None:
    """A job as ``job_words``, or ``None`` if one of its tensors is not what C code would take it for."""
    _, param, grad, _, held, _, phases, _, maximize, place, _, _ = job
    template, buffers, param_at, param_planes_at, grad_at, grad_planes_at, _, negate_at, m_phase_at, v_phase_at = form
    if type(place) is Negated or type(param) not in _PLAIN or type(grad) not in _PLAIN:
        return None  # C code reads what is here at its address as it is
    if grad.is_neg():
        return None
    words = template.copy()
    for tensor, at in ((param, param_planes_at), (grad, grad_planes_at)):
        if not tensor.is_contiguous():
            planes_and_channels = _planes_and_channels(tensor)
            if planes_and_channels is None:
                return None
            words[at : at + 2] = planes_and_channels
    address = words[param_at] = param.data_ptr()
    grad_address = words[grad_at] = grad.data_ptr()
    found = address and grad_address
    words[negate_at] = maximize
    m_phase, v_phase = cast(int, phases.get("m", 0)), cast(int, phases.get("v", 0))
    if place.first_row:
        first = place.first_row * math.prod(param.shape[1:])
        m_phase, v_phase = phase_at(m_phase, first), phase_at(v_phase, first)
    words[m_phase_at], words[v_phase_at] = m_phase, v_phase
    for at, key in buffers:
        buffer = held[key]
        if type(buffer) is not Tensor or not buffer.is_contiguous():
            return None
        address = words[at] = buffer.data_ptr()
        found = found and address
    if not found:
        job.refuse_freed()
    return words


def _planes_and_channels(tensor: Tensor) -> tuple[int, int] | None:
    """How a row of a tensor lies in memory that is in one of the formats with channels last; ``None``: it is in none.

    >>> _planes_and_channels(torch.zeros(8, 4, 3, 3).to(memory_format=torch.channels_last))
    (9, 4)
    """
    memory_format = _CHANNELS_LAST.get(tensor.dim())
    if memory_format is None or not tensor.is_contiguous(memory_format=memory_format):
        return None
    return math.prod(tensor.shape[2:]), tensor.shape[1]


@functools.lru_cache(maxsize=1 << 16)
def _form(
    layout: Layout, shape: torch.Size, param_dtype: torch.dtype, grad_dtype: torch.dtype, as_mechanism: str
) -> _Form | None:
    library, mechanism = _library(), _MECHANISMS.get(type(layout.mechanism))
    if type(layout.mechanism) in _AHEAD:
        mechanism = as_mechanism or None
    formats = [each for each in layout.formats if not each.slot.of_direction and as_mechanism != "SGD"]
    arrays = [part for stored in formats for part in _arrays(stored)]
    if mechanism is None or {param_dtype, grad_dtype} - set(_DTYPES) or not math.prod(shape):
        return None
    if any(name is None for _, name, _ in arrays) or _is_beyond(layout.shape, formats, mechanism):
        return None
    assert not isinstance(library, str)
    places, types = _places(), {name: index + 1 for index, name in enumerate(library.TYPES)}
    words = [0] * len(places)
    for name, value in (_geometry(_matrix(layout, formats, shape)) | _turns(layout.mechanism.norms)).items():
        words[places[name]] = value
    if layout.mechanism.norms:
        words[places["v.type"]] = types["FACTORED"]
    words[places["mechanism"]] = library.MECHANISMS.index(mechanism)
    words[places["param.type"]], words[places["grad.type"]] = types[_DTYPES[param_dtype]], types[_DTYPES[grad_dtype]]
    buffers: list[tuple[int, str]] = []
    for array_name, type_name, keys in arrays:
        assert type_name is not None
        words[places[f"{array_name}.type"]] = types[type_name]
        buffers += [(places[f"{array_name}.{part}"], key) for part, key in keys.items()]
    changing = (
        *("param.data", "param.planes", "grad.data", "grad.planes"),
        *("scalars", "negate", "m_phase", "v_phase"),
    )
    return _Form(words, tuple(buffers), *(places[name] for name in changing))


def shortfall(layout: Layout, param: Tensor, grad: Tensor, place: Place) -> str | None:
    """Why C code leaves a parameter to torch operations, or ``None`` if it does not. Tensors are as the place shows
    them.

    >>> from baoc.core.configuration import parse
    >>> from baoc.optim.place import WHOLE
    >>> weight = torch.zeros(64, 64, dtype=torch.float16)
    >>> shortfall(parse("adamw-8").layout((64, 64)), weight, weight, WHOLE)
    'numbers are torch.float16, neither fp32 nor bf16'
    """
    mechanism = type(layout.mechanism)
    formats = [each for each in layout.formats if not each.slot.of_direction]
    if not param.numel():
        return None
    if mechanism not in _MECHANISMS and mechanism not in _AHEAD:
        return f"there is no C code for {layout.mechanism.name}"
    unknown = [f"{type(stored).__name__} of {stored.slot.name!r}" for stored in formats if type(stored) not in _FORMATS]
    if unknown:
        return f"there is no C code for the {unknown[0]}"
    for tensor in (param, grad):
        if tensor.dtype not in _DTYPES:
            return f"numbers are {tensor.dtype}, neither fp32 nor bf16"
        if type(tensor) not in _PLAIN or tensor.is_neg() or type(place) is Negated:
            return f"a tensor is a {type(tensor).__name__} or a view that only torch can read"
        if not tensor.is_contiguous() and _planes_and_channels(tensor) is None:
            return "a tensor is not contiguous"
    if place.ranks is not None and mechanism in _MECHANISMS and layout.reach is not Reach.ROWS:
        return f"{layout.configuration} sums over ranks"
    as_mechanism = "AHEAD" if mechanism in _AHEAD else ""
    if _form(layout, param.shape, param.dtype, grad.dtype, as_mechanism) is None:
        return f"there is no C code for {layout.configuration} on this shape"
    return None


def _arrays(stored: Format) -> list[tuple[str, str | None, dict[str, str]]]:
    """A slot's arrays: name in C, type there (``None``: it has none), and the state's keys of their parts."""
    name, known = stored.slot.name, _FORMATS.get(type(stored))
    if known is None:
        return [(name, None, {})]
    if isinstance(stored, MeanFormat):
        axis = "row" if isinstance(stored, RowMeanFormat) else "col"
        return [(name, known, {}), (f"{name}_{axis}", "FP32", {"data": stored.key("")})]
    if not isinstance(stored, FactoredFormat):
        return [(name, known, _parts(stored, ""))]
    factors = [(f"{name}_{each}", _FORMATS.get(type(factor)), _parts(stored, each)) for each, factor in stored.factors]
    return [(name, known, {}), *factors]


def _parts(stored: Format, factor: str) -> dict[str, str]:
    """The state's keys of an array's data, and of its exponents or scales. Dense numbers have the array's own name."""
    keys = dict(stored.keys)
    if factor in keys:
        return {"data": keys[factor]}
    named = {"data": "codes"} | {part: part for part in ("exponents", "scales") if joined(factor, part) in keys}
    return {part: keys[joined(factor, buffer)] for part, buffer in named.items()}


def _is_beyond(shape: Shape, formats: Sequence[Format], mechanism: str) -> bool:
    """What C code has every part of, but not all of it together."""
    if any(isinstance(stored, MeanFormat) for stored in formats):
        return mechanism != "ADAM"
    is_stack = mechanism == "BALANCED" and len(matrix_shape(shape)) > 2
    return is_stack and any(stored.shares for stored in formats)  # groups do not end with the rows of its matrices


def _matrix(layout: Layout, formats: Sequence[Format], shape: torch.Size) -> Shape:
    """The shape that factors are of. They are of whole parameters: of a shard, C code sees none."""
    if layout.mechanism.norms:
        return matrix_shape(layout.shape)
    kept = (stored.matrix for stored in formats if isinstance(stored, (FactoredFormat, MeanFormat)))
    return next(kept, tuple(shape))


def _turns(norms: Sequence[str]) -> dict[str, int]:
    return {"turns": len(norms), "row_turns": sum(1 << turn for turn, norm in enumerate(norms) if norm == "row")}


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

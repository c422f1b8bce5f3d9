"""Jobs as C code reads them: the structs of ``job.h``, and which rules, formats and tensors C code serves."""

from __future__ import annotations

import functools
import importlib
import math
from array import array
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, cast

import torch
from torch import Tensor

from baoc.core.codecs import (
    BF16Format,
    ColMeanFormat,
    FactoredFormat,
    Format,
    FP32Format,
    Int4Format,
    Int8Format,
    MeanFormat,
    RowMeanFormat,
)
from baoc.core.codecs.base import joined
from baoc.core.codecs.weights import NearestFormat, Rest8Format, Rest16Format, StochasticFormat
from baoc.core.configuration import Layout
from baoc.core.mechanisms import (
    SGD,
    SGDM,
    SGDW,
    SGDWM,
    Adafactor,
    Adam,
    AdamW,
    ColNorm,
    Lion,
    Mechanism,
    Muon,
    NorMuon,
    RowNorm,
    Sinkhorn,
    Spectral,
)
from baoc.core.roles import matrix_shape
from baoc.core.rounding import phase_at
from baoc.core.sharding import Negated
from baoc.core.spec import Reach, Shape
from baoc.optim.kernels.job import Job
from baoc.optim.state import PLAIN

# What is what in C: see job.h, which has these names.
MECHANISMS: dict[type[Mechanism], str] = {
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
AHEAD: frozenset[type[Mechanism]] = frozenset({Muon, NorMuon, Spectral})
"""What C code does the rows of."""
FORMATS: dict[type[Format], str] = {
    FP32Format: "FP32",
    BF16Format: "BF16",
    Int8Format: "INT8",
    Int4Format: "INT4",
    RowMeanFormat: "FACTORED",
    ColMeanFormat: "FACTORED",
    FactoredFormat: "FACTORED",
    Rest16Format: "REST16",
    Rest8Format: "REST8",
    StochasticFormat: "DITHERED",
}
DTYPES = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@functools.cache
def load_library() -> ModuleType | str:
    """The compiled module, or why there is none."""
    try:
        return importlib.import_module("baoc.optim.kernels.native._native")
    except ImportError as error:
        return (
            f"the native kernels were not built when baoc was installed ({error}). Install a C compiler and reinstall"
        )


def obstacle() -> str | None:
    """Why the native kernel cannot run here, or ``None`` if it can."""
    library = load_library()
    return library if isinstance(library, str) else None


@functools.cache
def field_places() -> dict[str, int]:
    """Where each field of the C struct ``job_words`` stands: its numbers, then its arrays with their parts."""
    library = load_library()
    assert not isinstance(library, str)
    arrays = [f"{name}.{part}" for name in library.JOB_ARRAYS for part in library.ARRAY_PARTS]
    return {name: index for index, name in enumerate((*library.JOB_NUMBERS, *arrays))}


class _Form(NamedTuple):
    """What all jobs with the same layout and dtypes have in common."""

    words: array[int]  # the struct ``job_words``, without addresses and what changes between steps
    keys: tuple[str, ...]  # of the buffers in the state
    addresses: tuple[int, ...]  # where those of the parameter and the buffers go


class Words(NamedTuple):
    """One job as the struct ``job_words``, without what changes between steps."""

    words: array[int]
    grad_dtype: torch.dtype


def shortfall(job: Job) -> str | None:
    """Return why C code leaves a job to torch operations, or ``None`` if C code runs it.

    >>> from baoc.core.configuration import parse
    >>> from baoc.core.spec import Hyper
    >>> from baoc.optim.state import new_state
    >>> weight, layout = torch.zeros(64, 64, dtype=torch.float64), parse("adamw-8").layout((64, 64))
    >>> shortfall(Job.of(layout, weight, weight, new_state(layout, weight.device), Hyper(1e-3)))
    'numbers are torch.float64, not fp32, bf16 or fp16'
    """
    if not job.param.numel():
        return None
    words = words_of(job, "AHEAD" if type(job.layout.mechanism) in AHEAD else "")
    return words if isinstance(words, str) else append(array("q"), job, words, 0)


def words_of(job: Job, as_mechanism: str) -> Words | str:
    """Return what stays the same of a job while its tensors do, or why C code cannot run it.

    C code takes what is at an address as it is. Of the jobs with matrices it does what goes by rows; other sums over
    ranks are left to torch operations.
    """
    layout, param, place, at = job.layout, job.param, job.place, field_places()
    form = _form(layout, param.shape, param.dtype, job.grad.dtype, as_mechanism)
    if isinstance(form, str):
        return form
    if type(param) not in PLAIN or type(place) is Negated:
        return f"a tensor is a {type(param).__name__} or a view that only torch can read"
    if place.ranks is not None and not as_mechanism and layout.reach is not Reach.ROWS:
        return f"{layout.configuration} sums over ranks"
    words = form.words[:]
    if not param.is_contiguous():
        found = _planes_and_channels(param)
        if found is None:
            return "a tensor is not contiguous"
        words[at["param.planes"]], words[at["param.channels"]] = found
    for place_of, tensor in zip(form.addresses, (param, *(job.held[key] for key in form.keys))):
        if tensor is not param and (type(tensor) is not Tensor or not tensor.is_contiguous()):
            return f"a state tensor is a {type(tensor).__name__} or not contiguous"
        words[place_of] = tensor.data_ptr()
        if not words[place_of]:
            job.refuse_freed()
    return Words(words, job.grad.dtype)


def append(words: array[int], job: Job, own: Words, row: int) -> str | None:
    """Append a job as the struct ``job_words``, or return why C code cannot read its gradient.

    Args:
        words: where to append.
        job: what to append.
        own: what :func:`words_of` says of it.
        row: the number of its scalars.
    """
    grad, phases = job.grad, job.phases
    if type(grad) not in PLAIN or grad.is_neg():
        return f"a tensor is a {type(grad).__name__} or a view that only torch can read"
    channels_last = None
    if not grad.is_contiguous():
        channels_last = _planes_and_channels(grad)
        if channels_last is None:
            return "a tensor is not contiguous"
    grad_at, planes_at, scalars_at, negate_at, *phases_at = _changing()
    first = len(words)
    words.extend(own.words)
    if channels_last is not None:
        words[first + planes_at], words[first + planes_at + 1] = channels_last
    address = words[first + grad_at] = grad.data_ptr()
    if not address:
        job.refuse_freed()
    words[first + scalars_at] = row
    words[first + negate_at] = job.maximize
    element = job.place.first_row * math.prod(job.param.shape[1:])
    for name, phase_field in zip("mvw", phases_at):
        phase = cast(int, phases.get(name, 0))
        words[first + phase_field] = phase_at(phase, element) if element else phase
    return None


@functools.cache
def _changing() -> tuple[int, ...]:
    """Where the fields stand that change between steps."""
    names = ("grad.data", "grad.planes", "scalars", "negate", "m_phase", "v_phase", "w_phase")
    return tuple(field_places()[name] for name in names)


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
) -> _Form | str:
    """Return what C code needs to know of a layout, or why it cannot run it. The one table of what it can run."""
    library, rule = load_library(), type(layout.mechanism)
    mechanism = (as_mechanism or None) if rule in AHEAD else MECHANISMS.get(rule)
    formats = _formats(layout, as_mechanism)
    if mechanism is None:
        return f"there is no C code for {layout.mechanism.name}"
    unknown = [f"{type(stored).__name__} of {stored.slot.name!r}" for stored in formats if type(stored) not in FORMATS]
    if unknown:
        return f"there is no C code for the {unknown[0]}"
    for dtype in (param_dtype, grad_dtype):
        if dtype not in DTYPES:
            return f"numbers are {dtype}, not fp32, bf16 or fp16"
    arrays = [part for stored in formats for part in _arrays(stored)]
    if any(name is None for _, name, _ in arrays) or _is_beyond(layout.shape, formats, mechanism):
        return f"there is no C code for {layout.configuration} on this shape"
    if not math.prod(shape):
        return "there are no elements"
    assert not isinstance(library, str)
    places, types = field_places(), {name: index + 1 for index, name in enumerate(library.TYPES)}
    words = [0] * len(places)
    for name, value in (_geometry(_matrix(layout, formats, shape)) | _turns(layout.mechanism.norms)).items():
        words[places[name]] = value
    if layout.mechanism.norms:
        words[places["v.type"]] = types["FACTORED"]
    words[places["mechanism"]] = library.MECHANISMS.index(mechanism)
    words[places["param.type"]], words[places["grad.type"]] = types[DTYPES[param_dtype]], types[DTYPES[grad_dtype]]
    buffers: list[tuple[int, str]] = []
    for array_name, type_name, keys in arrays:
        assert type_name is not None
        words[places[f"{array_name}.type"]] = types[type_name]
        buffers += [(places[f"{array_name}.{part}"], key) for part, key in keys.items()]
    addresses = (places["param.data"], *(at for at, _ in buffers))
    return _Form(array("q", words), tuple(key for _, key in buffers), addresses)


def _formats(layout: Layout, as_mechanism: str) -> list[Format]:
    """The slots that C code advances: averages before matrices are finished, and the low bits of weights after it."""
    averages = [each for each in layout.formats if each.slot.is_average]
    low_bits = [each for each in layout.formats if each.slot.of_weight and type(each) is not NearestFormat]
    return [*(averages if as_mechanism != "SGD" else ()), *(low_bits if as_mechanism != "AHEAD" else ())]


def _arrays(stored: Format) -> list[tuple[str, str | None, dict[str, str]]]:
    """A slot's arrays: name in C, type there (``None``: it has none), and the state's keys of their parts."""
    name, known = stored.slot.name, FORMATS.get(type(stored))
    if known is None:
        return [(name, None, {})]
    if isinstance(stored, MeanFormat):
        axis = "row" if isinstance(stored, RowMeanFormat) else "col"
        return [(name, known, {}), (f"{name}_{axis}", "FP32", {"data": stored.key("")})]
    if not isinstance(stored, FactoredFormat):
        return [(name, known, _parts(stored, "") if stored.keys else {})]
    factors = [(f"{name}_{each}", FORMATS.get(type(factor)), _parts(stored, each)) for each, factor in stored.factors]
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

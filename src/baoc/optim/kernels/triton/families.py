"""Which updates have Triton code, and the layout of the tables that the host writes for the device.

One launch updates all tensors of a *family*: they share the update rule, the state formats and the dtypes, and differ
in addresses, sizes and scalars only. A launch reads those from two tables on the device: a row of :class:`Word` per
tensor, and a row of :class:`Number` per group of tensors that share a rule, hyper-parameters and age.
"""

from __future__ import annotations

import functools
import math
from enum import IntEnum, auto
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from baoc.core.codecs import (
    BF16Format,
    ColMeanFormat,
    FactoredFormat,
    Format,
    FP32Format,
    Int4Format,
    Int8Format,
    RowMeanFormat,
)
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
from baoc.core.sharding import Negated
from baoc.optim.kernels.job import Job

Use = Literal["step", "direction", "move"]
"""``"step"`` is the whole update. Rules that need whole matrices take two launches instead: ``"direction"`` advances
the state and writes the direction, and ``"move"`` applies the direction that the matrix products return."""

ALIGNMENT = 16
"""Vector loads need addresses that are multiples of this many bytes, and rows of a multiple of this many elements."""

# The exact classes: a subclass may compute something else.
_MECHANISMS: dict[type[Mechanism], str] = {
    SGD: "sgd",
    SGDW: "sgd",
    SGDM: "momentum",
    SGDWM: "momentum",
    Adam: "adam",
    AdamW: "adam",
    Adafactor: "adafactor",
    Lion: "lion",
    ColNorm: "ahead",
    RowNorm: "ahead",
    Sinkhorn: "ahead",
    Muon: "ahead",
    NorMuon: "ahead",
    Spectral: "ahead",
}
_FORMATS: dict[type[Format], str] = {
    FP32Format: "fp32",
    BF16Format: "bf16",
    Int8Format: "int8",
    Int4Format: "int4",
    FactoredFormat: "factored",
    RowMeanFormat: "row-mean",
    ColMeanFormat: "col-mean",
}
_LOW_BITS: dict[type[Format], str] = {
    Rest16Format: "16",
    Rest8Format: "8",
    StochasticFormat: "sr",
    NearestFormat: "none",
}
_REDUCTIONS = {"factored": "both", "factored-bf16": "both", "row-mean": "row", "col-mean": "col"}
_DENSE = frozenset({"none", "fp32", "bf16"})
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_PLAIN = (Tensor, nn.Parameter)  # a subclass may keep its data elsewhere


class _FromZero(IntEnum):
    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return count


class Word(_FromZero):
    """The int64 columns of the table of tensors. Columns up to ``LENGTH_TICKET`` are addresses, or 0 if unused."""

    PARAM = auto()  # the parameter; for use "direction" the tensor that receives the direction
    GRAD = auto()
    M = auto()  # codes or dense values; for use "move" the direction
    M_SHARED = auto()  # exponents or scales
    V = auto()
    V_SHARED = auto()
    W = auto()  # the low bits of a parameter of 16 bits
    ROW = auto()  # one value per row: a factor of v, or of a balanced direction
    COL = auto()  # one value per column
    ROW_PARTS = auto()  # partial sums over rows: (parts, rows)
    COL_PARTS = auto()  # partial sums over columns: (blocks of rows, columns)
    COL_BLOCKS = auto()  # sums over parts of the column factor, for its mean
    LENGTH_PARTS = auto()  # partial sums of squares of the direction and of the parameter: (2, programs)
    STEP_FACTOR = auto()  # Adafactor's factor of the step, computed from those sums
    ROW_TICKETS = auto()  # int32, zero between launches: how many programs have finished a block of rows,
    COL_TICKETS = auto()  # the columns of a segment,
    LENGTH_TICKET = auto()  # the whole tensor
    ROW_LEN = auto()  # in elements; a tensor without row structure is one row
    ROWS = auto()
    FIRST_PROGRAM = auto()  # the first program that updates this tensor
    FIRST_BLOCK = auto()  # the first program that reduces this tensor
    NUMBERS = auto()  # row in the table of numbers
    FIRST_ELEMENT = auto()  # index within the whole parameter: a shard rounds as the whole does


class Number(_FromZero):
    """The fp32 columns of the table of numbers. Rounding phases have 23 bits, so fp32 holds them exactly."""

    SIGN = auto()  # -1 to maximize
    STEP = auto()
    SHRINK = auto()
    COUPLED_DECAY = auto()
    M_KEEP = auto()
    M_ADD = auto()
    M_MASS = auto()
    M_PHASE = auto()
    V_KEEP = auto()
    V_ADD = auto()
    V_MASS_SQRT = auto()
    V_MEAN_FLOOR = auto()
    V_PHASE = auto()
    W_PHASE = auto()
    EPS = auto()
    OF_M = auto()
    OF_GRAD = auto()
    V_FLOOR = auto()
    MIN_PARAM_RMS = auto()
    CLIP = auto()
    S_KEEP = auto()
    S_ADD = auto()
    LENGTH = auto()
    MAX_LENGTH = auto()


class Family(NamedTuple):
    """The compile-time constants of a launch: see :func:`baoc.optim.kernels.triton.device.update.update`.

    >>> print(Family("adam", "fp32", "bf16", "int8", "factored", reductions=("both",)))
    adam(param=fp32, grad=bf16, m=int8, v=factored, reductions=both, aligned)
    """

    mechanism: str
    param: str
    grad: str
    m: str = "none"
    v: str = "none"
    w: str = "none"
    """The low bits of the parameter: "16", "8", "sr" or "none"."""
    reductions: tuple[str, ...] = ()
    """Means over each "row", each "col" or "both" that are computed before the update, in this order."""
    coupled: bool = False
    shares: bool = False
    moves: bool = True
    aligned: bool = True

    @property
    def uses_rms(self) -> bool:
        """Whether the step length depends on the RMS of the direction and of the parameter."""
        return self.mechanism == "adafactor"

    @property
    def sums(self) -> bool:
        """Whether the update needs sums over a tensor."""
        return bool(self.reductions) or self.uses_rms

    @property
    def norms(self) -> str:
        """The factors of a balanced direction: "row", "col", "both" or "none"."""
        if self.v in _REDUCTIONS:
            return "none"
        return "both" if len(set(self.reductions)) > 1 else next(iter(self.reductions), "none")

    def __str__(self) -> str:
        named = [("param", self.param), ("grad", self.grad), ("m", self.m), ("v", self.v), ("w", self.w)]
        parts = [f"{name}={value}" for name, value in named if value != "none"]
        parts += [f"reductions={'+'.join(self.reductions)}"] if self.reductions else []
        parts += [name for name in ("coupled", "shares", "aligned") if getattr(self, name)]
        parts += [] if self.moves else ["direction only"]
        return f"{self.mechanism}({', '.join(parts)})"


class Form(NamedTuple):
    """How jobs with the same layout, shape and dtypes are launched."""

    family: Family
    buffers: tuple[tuple[Word, str], ...]  # the column of a buffer's address, and its key in the state
    rows: int
    row_len: int


def form_of(job: Job, use: Use) -> Form | str:
    """Return how a job is launched, or the reason why there is no Triton code for it."""
    for tensor in (job.param, job.grad):
        if type(tensor) not in _PLAIN:
            return f"a tensor of type {type(tensor).__name__}"
        if not tensor.is_contiguous():
            return "memory that is not contiguous"
        if tensor.is_neg():
            return "a negated view"
    if isinstance(job.place, Negated):
        return "a negated view"
    found = form(job.layout, job.param.shape, job.param.dtype, job.grad.dtype, use)
    if isinstance(found, Form):
        if found.family.sums and job.place.rows is not None:
            return "sums over the rows of a shard"
        if not all(type(held) is Tensor and held.is_contiguous() for held in (job.held[k] for _, k in found.buffers)):
            return "state that is not contiguous"
    return found


@functools.lru_cache(maxsize=1 << 16)
def form(layout: Layout, shape: torch.Size, param_dtype: torch.dtype, grad_dtype: torch.dtype, use: Use) -> Form | str:
    """Return how plain contiguous tensors are launched, or the reason why there is no Triton code for them.

    Args:
        layout: The layout of the whole parameter.
        shape: The shape on this rank.
        param_dtype: The dtype of the parameter.
        grad_dtype: The dtype of the gradient.
        use: Which part of the update is launched.
    """
    mechanism = _MECHANISMS.get(type(layout.mechanism))
    if mechanism is None:
        return f"the mechanism {layout.mechanism.name}"
    for dtype in (param_dtype, grad_dtype):
        if dtype not in _DTYPES:
            return f"numbers of type {dtype}"
    low_bits = None if use == "direction" else next((each for each in layout.formats if each.slot.of_weight), None)
    w = "none" if low_bits is None else _LOW_BITS.get(type(low_bits))
    if w is None:
        return f"the format {type(low_bits).__name__} of 'w'"
    formats = [stored for stored in layout.formats if stored.slot.is_average and use != "move"]
    names = {stored.slot.name: _format_name(stored) for stored in formats}
    unknown = next((stored for stored in formats if names[stored.slot.name] is None), None)
    if unknown is not None:
        return f"the format {type(unknown).__name__} of {unknown.slot.name!r}"
    m, v = names.get("m") or "none", names.get("v") or "none"
    reductions = (_REDUCTIONS[v],) if v in _REDUCTIONS else tuple(layout.mechanism.norms)
    kept = next((each.matrix for each in formats if isinstance(each, FactoredFormat)), matrix_shape(layout.shape))
    if reductions and len(kept) > 2:
        return "means over the matrices of a stack"
    if use == "move":
        mechanism, m = "move", "fp32"
    elif mechanism == "ahead" and m == "none":
        mechanism = "sgd"
    param = "fp32" if use == "direction" else _DTYPES[param_dtype]
    family = Family(
        mechanism, param, _DTYPES[grad_dtype], m, v, w, reductions,
        coupled=not layout.mechanism.decoupled, shares=layout.shares, moves=use != "direction",
    )  # fmt: skip
    numel, by_rows = math.prod(shape), {m, v} - _DENSE or reductions
    row_len = numel // shape[0] if by_rows and numel else numel
    buffers = [pair for stored in formats for pair in _buffers(stored, str(names[stored.slot.name]))]
    buffers += [] if low_bits is None else [(Word.W, key) for _, key in low_bits.keys]
    aligned = row_len % ALIGNMENT == 0
    return Form(family._replace(aligned=aligned), tuple(buffers), numel // max(1, row_len), row_len)


def _format_name(stored: Format) -> str | None:
    name = _FORMATS.get(type(stored))
    if isinstance(stored, FactoredFormat) and name is not None:
        known: dict[type[Format], str] = {FP32Format: name, BF16Format: f"{name}-bf16"}
        kinds = {known.get(type(factor)) for _, factor in stored.factors}
        is_stack = stored.slot.torch_dims and len(stored.shape) > 2
        return None if is_stack or len(kinds) > 1 else kinds.pop()
    return name


def _buffers(stored: Format, name: str) -> list[tuple[Word, str]]:
    keys = dict(stored.keys)
    data, shared = (Word.M, Word.M_SHARED) if stored.slot.name == "m" else (Word.V, Word.V_SHARED)
    named = {
        "fp32": {data: ""},
        "bf16": {data: ""},
        "int8": {data: "codes", shared: "exponents"},
        "int4": {data: "codes", shared: "scales"},
        "row-mean": {Word.ROW: ""},
        "col-mean": {Word.COL: ""},
        "factored": {Word.ROW: "row", Word.COL: "col"},
        "factored-bf16": {Word.ROW: "row", Word.COL: "col"},
    }[name]
    return [(word, keys[buffer]) for word, buffer in named.items()]

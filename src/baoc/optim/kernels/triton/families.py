"""What Triton code there is, by the very classes of mechanisms and formats, and the name of what there is none for.

Jobs that one launch can run together are a family: they differ in addresses, sizes and numbers only.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from baoc.core.codecs.base import Format
from baoc.core.codecs.dense import BF16Format, FP32Format
from baoc.core.codecs.factored import FactoredFormat
from baoc.core.codecs.int4 import Int4Format
from baoc.core.codecs.int8 import Int8Format
from baoc.core.codecs.mean import ColMeanFormat, RowMeanFormat
from baoc.core.configuration import Layout
from baoc.core.mechanisms import Mechanism
from baoc.core.mechanisms.adafactor import Adafactor
from baoc.core.mechanisms.adam import Adam, AdamW
from baoc.core.mechanisms.balanced import ColNorm, RowNorm, Sinkhorn
from baoc.core.mechanisms.lion import Lion
from baoc.core.mechanisms.muon import Muon, NorMuon, Spectral
from baoc.core.mechanisms.sgd import SGD, SGDM, SGDW, SGDWM
from baoc.core.roles import matrix_shape
from baoc.optim.kernels.job import Job
from baoc.optim.kernels.triton.words import Word
from baoc.optim.place import Negated

Use = Literal["step", "direction", "move"]
"""A whole step; the first half of one that needs whole matrices; its second half, by a direction that is given."""

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
_TURNS = {"factored": "both", "factored-bf16": "both", "row-mean": "row", "col-mean": "col"}
_DENSE = frozenset({"none", "fp32", "bf16"})
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_PLAIN = (Tensor, nn.Parameter)  # a subclass may have its numbers anywhere
ALIGNMENT = 16  # bytes, and elements of a row: what vector loads need


class Family(NamedTuple):
    """What a launch is compiled for; the constants of :func:`baoc.optim.kernels.triton.device.update.update`."""

    mechanism: str
    param: str
    grad: str
    m: str = "none"
    v: str = "none"
    turns: tuple[str, ...] = ()  # "row", "col", "both": which means there are before the update, one after the other
    coupled: bool = False
    shares: bool = False
    moves: bool = True
    aligned: bool = True

    @property
    def relative(self) -> bool:
        """Whether steps depend on the lengths of directions and parameters."""
        return self.mechanism == "adafactor"

    @property
    def sums(self) -> bool:
        """Whether there are sums over tensors, of any kind."""
        return bool(self.turns) or self.relative

    @property
    def norms(self) -> str:
        """Which factors a balanced direction has: "row", "col", "both" or "none"."""
        return _lines(self.turns) if self.v not in _TURNS else "none"


class Form(NamedTuple):
    """What all jobs with the same layout, shape and dtypes have in common."""

    family: Family
    buffers: tuple[tuple[Word, str], ...]  # where a buffer's address goes, and its key in the state
    rows: int
    row_len: int


def form_of(job: Job, use: Use) -> Form | str:
    """How a job is run, or in words why it is not."""
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
    """How plain tensors of a shape, here, are run, or in words why they are not."""
    mechanism = _MECHANISMS.get(type(layout.mechanism))
    if mechanism is None:
        return f"the mechanism {layout.mechanism.name}"
    for dtype in (param_dtype, grad_dtype):
        if dtype not in _DTYPES:
            return f"numbers of type {dtype}"
    formats = [stored for stored in layout.formats if not stored.slot.of_direction and use != "move"]
    names = {stored.slot.name: _format_name(stored) for stored in formats}
    unknown = next((stored for stored in formats if names[stored.slot.name] is None), None)
    if unknown is not None:
        return f"the format {type(unknown).__name__} of {unknown.slot.name!r}"
    m, v = names.get("m") or "none", names.get("v") or "none"
    turns = (_TURNS[v],) if v in _TURNS else tuple(layout.mechanism.norms)
    if turns and len(matrix_shape(layout.shape)) > 2:
        return "means over the matrices of a stack"
    if use == "move":
        mechanism, m = "move", "fp32"
    elif mechanism == "ahead" and m == "none":
        mechanism = "sgd"
    param = "fp32" if use == "direction" else _DTYPES[param_dtype]
    family = Family(
        mechanism, param, _DTYPES[grad_dtype], m, v, turns,
        coupled=not layout.mechanism.decoupled, shares=layout.shares, moves=use != "direction",
    )  # fmt: skip
    numel, by_rows = math.prod(shape), {m, v} - _DENSE or turns
    row_len = numel // shape[0] if by_rows and numel else numel
    buffers = [pair for stored in formats for pair in _buffers(stored, str(names[stored.slot.name]))]
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


def _lines(turns: tuple[str, ...]) -> str:
    kinds = set(turns)
    return "both" if len(kinds) > 1 else next(iter(kinds), "none")


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

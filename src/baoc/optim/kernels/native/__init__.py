"""The update in C: one pass over memory in tiles that stay in the L1 cache, and all tensors of a step in one call.

The C code is given addresses and knows nothing of torch, so one build serves every version of it. What it does not
serve (other dtypes, parameters that are not contiguous, mechanisms it has no code for) the eager kernel runs.
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
from torch import Tensor

from baoc.core.configuration import StoredSlot
from baoc.core.spec import Shape
from baoc.optim.kernels.eager import EagerKernel
from baoc.optim.kernels.update import Job

_MECHANISMS = {"sgd": 0, "sgdw": 0, "sgdm": 1, "sgdwm": 1, "adam": 2, "adamw": 2, "adafactor": 3}
_PARAM_TYPES = {torch.float32: 1, torch.bfloat16: 2}
_TYPES = _PARAM_TYPES | {torch.int8: 3, torch.uint8: 3}
_FACTORED = 4
_SCALARS = (
    *("step", "shrink", "coupled_decay"),
    *("m.keep", "m.add", "v.keep", "v.add"),
    *("m.mass", "v.mass_sqrt", "eps"),
    *("v.floor", "v.mean_floor", "min_param_rms", "clip"),
)


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
            job_words = _words(job)
            if job_words is None:
                left.append(job)
                continue
            key = id(job.scalars)
            if key not in rows:
                rows[key] = len(rows), job.scalars
                scalars += [job.scalars.get(name, 0.0) for name in _SCALARS]
            job_words[_NUMBERS] = rows[key][0]
            words += job_words
            served.append(job.param)
        if served:
            packed = array("q", words), array("d", scalars)
            addresses = [each.buffer_info()[0] for each in packed]
            self._run(*addresses, len(served), torch.get_num_threads(), self.isa)
            torch.autograd.graph.increment_version(served)  # autograd cannot see what C writes
        if left:
            self._eager.run(left)


class _Form(NamedTuple):
    """What all jobs with the same shape and the same storage have in common."""

    template: list[int]  # the struct ``job_words``, with zeros for what changes
    addresses: tuple[tuple[int, str], ...]  # where a buffer's address goes, and its key in the state


# Where things stand in ``job_words``. An array takes three words: type, address, address of its scales.
_NUMBERS, _NEGATE, _M_PHASE, _V_PHASE, _PARAM, _GRAD, _M, _V, _V_ROW, _V_COL = 7, 8, 9, 10, 11, 14, 17, 20, 23, 26
_WORDS = 29


def _words(job: Job) -> list[int] | None:
    """A job as ``job_words``, or ``None`` if it is not for the native kernel."""
    param, grad, state = job.param, job.grad, job.state
    form = _form(job.mechanism.name, job.slots, param.shape, param.dtype, grad.dtype)
    if form is None or not (param.is_contiguous() and grad.is_contiguous()):
        return None
    words = form.template.copy()
    words[_NEGATE] = job.maximize
    words[_M_PHASE], words[_V_PHASE] = job.phases.get("m", 0), job.phases.get("v", 0)
    words[_PARAM + 1], words[_GRAD + 1] = param.data_ptr(), grad.data_ptr()
    for place, key in form.addresses:
        buffer = state[key]
        if not buffer.is_contiguous():
            return None
        words[place] = buffer.data_ptr()
    return words


@functools.lru_cache(maxsize=1 << 16)
def _form(
    mechanism: str,
    slots: tuple[StoredSlot, ...],
    shape: torch.Size,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> _Form | None:
    if mechanism not in _MECHANISMS or {param_dtype, grad_dtype} - set(_PARAM_TYPES) or not math.prod(shape):
        return None
    words = [0] * _WORDS
    words[:_NUMBERS] = (_MECHANISMS[mechanism], *_geometry(shape))
    words[_PARAM], words[_GRAD] = _PARAM_TYPES[param_dtype], _PARAM_TYPES[grad_dtype]
    addresses: list[tuple[int, str]] = []
    for stored in slots:
        buffers = {buffer.name: buffer.dtype for buffer in stored.codec.layout(tuple(shape), stored.slot)}
        place = _M if stored.slot.name == "m" else _V
        if stored.codec.pointwise:
            arrays = {"": place}
        else:
            words[place] = _FACTORED
            arrays = {"row": _V_ROW, "col": _V_COL}
        for name, start in arrays.items():
            codes, scales = (f"{name}.{part}" if name else part for part in ("codes", "scales"))
            if name in buffers:
                words[start] = _TYPES[buffers[name]]
                addresses.append((start + 1, stored.key(name)))
            else:
                words[start] = _TYPES[buffers[codes]]
                addresses += [(start + 1, stored.key(codes)), (start + 2, stored.key(scales))]
    return _Form(words, tuple(addresses))


def _geometry(shape: Shape | torch.Size) -> tuple[int, ...]:
    """numel, elements of a dim-0 row, and what factors are kept for: stacks, matrices in one, rows, columns.

    >>> _geometry((768,)), _geometry((768, 3072)), _geometry((64, 32, 3, 3))
    ((768, 768, 1, 1, 1, 768), (2359296, 3072, 1, 1, 768, 3072), (18432, 288, 64, 32, 3, 3))
    """
    numel = math.prod(shape)
    if len(shape) == 1:  # its rows would be single elements, but nothing is kept by rows
        return numel, numel, 1, 1, 1, numel
    if len(shape) == 2:
        return numel, shape[1], 1, 1, *shape
    return numel, math.prod(shape[1:]), shape[0], math.prod(shape[1:-2]), *shape[-2:]

"""What each parameter is for, which optimizers that treat matrices in a special way need to know.

Heads, embeddings and layers are found by structure. Only queries and keys are found by name: nothing else tells them
from the other matrices of an attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from baoc.core.roles import canonical_name
from baoc.planners.paper.units import structural_units

Role = Literal["embedding", "head", "matrix", "kernel", "vector"]

_QUERY_OR_KEY = {"q", "k", "q_proj", "k_proj", "to_q", "to_k", "query", "key", "wq", "wk"}
_FUSED = {"qkv", "qkv_proj", "c_attn", "in_proj", "in_proj_weight", "query_key_value", "wqkv"}
_HEAD_SIZES = ("head_dim", "key_value_proj_dim", "dim_head", "attention_head_size")
_HEAD_COUNTS = ("num_heads", "n_heads", "heads", "n_head", "num_attention_heads")


@dataclass(frozen=True)
class Part:
    """A trainable parameter and its place in the model."""

    name: str
    param: nn.Parameter
    role: Role
    is_query_or_key: bool = False  # or a matrix that has these and the values
    head_rows: int | None = None  # rows of one head, where rows are a query's or key's outputs


def parts(model: nn.Module) -> list[Part]:
    """Every trainable parameter once, in the order of ``model.parameters()``.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 9))
    >>> [(part.name, part.role) for part in parts(model)][:3]
    [('0.weight', 'embedding'), ('1.weight', 'matrix'), ('1.bias', 'vector')]
    >>> [part.name for part in parts(model) if part.role == "head"]
    ['3.weight']
    """
    layer_of = {name: unit.layer for unit in structural_units(model) for name in unit.parameters}
    found = list(_scan(model))
    last = next((part for part in reversed(found) if part.role == "matrix"), None)
    if last is not None and not layer_of[last.name]:  # the last matrix gives the output, unless layers end with it
        found[found.index(last)] = Part(last.name, last.param, "head")
    return found


def _scan(model: nn.Module) -> Iterator[Part]:
    modules = dict(model.named_modules())
    seen: set[nn.Parameter] = set()
    for path, module in modules.items():
        for name, param in module.named_parameters(prefix=path, recurse=False):
            if param.requires_grad and param not in seen:
                seen.add(param)
                yield _part(canonical_name(name), param, module, modules[path.rpartition(".")[0]] if path else module)


def _part(name: str, param: nn.Parameter, owner: nn.Module, parent: nn.Module) -> Part:
    if sum(size > 1 for size in param.shape) < 2:
        return Part(name, param, "vector")
    if param.ndim > 2:
        return Part(name, param, "kernel")
    if isinstance(owner, nn.Embedding):
        return Part(name, param, "embedding")
    words = set(name.split(".")[-2:])
    if not words & (_QUERY_OR_KEY | _FUSED):
        return Part(name, param, "matrix")
    attention = owner if isinstance(owner, nn.MultiheadAttention) else parent
    rows = param.shape[0] // (3 if words & _FUSED else 1)
    size = _head_rows(attention, rows)
    # A Conv1D of transformers keeps (in, out): its rows are inputs, and no head's.
    has_head_rows = isinstance(owner, (nn.Linear, nn.MultiheadAttention)) and size and param.shape[0] % size == 0
    return Part(name, param, "matrix", is_query_or_key=True, head_rows=size if has_head_rows else None)


def _head_rows(attention: nn.Module, rows: int) -> int | None:
    for attribute in _HEAD_SIZES:
        if isinstance(size := getattr(attention, attribute, None), int) and size > 0:
            return size
    for attribute in _HEAD_COUNTS:
        if isinstance(heads := getattr(attention, attribute, None), int) and heads > 0 and rows % heads == 0:
            return rows // heads
    return None

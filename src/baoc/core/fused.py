"""Detection of fused matrices: which parameters of a module are several matrices, and how they lie in them.

Names say where to look. The sizes are from the module that owns the parameter: numbers of heads, head dims, ranks, and
the layer that reads a gated projection. A parameter is split only if its sizes add up.

Example:
    >>> attention = nn.MultiheadAttention(64, num_heads=4)
    >>> splits_of(attention)
    {'in_proj_weight': Split(sizes=(64, 64, 64), dim=0, repeat=1)}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import nn

from baoc.core.roles import canonical_name
from baoc.core.spec import Shape
from baoc.core.splits import HEADS, Request, Split, Splits, read_request

_SIDE_BY_SIDE = re.compile(r"(to_|w)?qkv(_proj|_linear)?|c_attn|in_proj_weight", re.IGNORECASE)
"""Queries, keys and values, one after the other."""
_EITHER_WAY = re.compile(r"query_key_value|linear_qkv")
"""Queries, keys and values in an order that depends on the module."""
_BY_GROUP = re.compile(r"GPTNeoX|Bloom|Persimmon|Falcon|InternLM2|Megatron")
"""Modules that order rows by head, or by group of heads that share keys and values: its queries, its key, its value."""
_GATED = re.compile(
    r"gate_up(_proj)?|up_gate_proj|w12|w13(_weight)?|wi|fc1|weights_in|input_linear|dense_h_to_4h", re.IGNORECASE
)
_DOWN = re.compile(r"down_proj|w2(_weight)?|w3|wo|fc2|weights_out|output_linear|dense_4h_to_h", re.IGNORECASE)
"""A gated projection and the layer that reads it, which is half as wide."""
_SEPARATE = re.compile(r"(q|k|v|query|key|value)(_proj)?")
_BLOCKS_OF_CODEGEN = 4


class _Fused(NamedTuple):
    """A parameter that may be several matrices."""

    owner: nn.Module  # the attention, MLP or experts module
    label: str  # the name of the layer in it, or of the parameter if that is its own
    shape: Shape
    dim: int  # of the outputs

    @property
    def outputs(self) -> int:
        return self.shape[self.dim - 2]

    @property
    def inputs(self) -> int:
        return self.shape[-1 - self.dim]

    def number(self, *names: str) -> int | None:
        """Return the first of some attributes of the owner, or of its config, that is a positive whole number."""
        for holder in (self.owner, getattr(self.owner, "config", None)):
            for name in names:
                value = getattr(holder, name, None)
                if type(value) is int and value > 0:
                    return value
        return None


def splits_of(model: nn.Module, *, heads: bool = False) -> dict[str, Split]:
    """Return how fused parameters of a model are split.

    Args:
        model: the model.
        heads: split queries, keys and values into one matrix for each head.

    Returns:
        Split by canonical parameter name, as the argument ``split=`` of optimizers takes it.

    Example:
        >>> attention = nn.MultiheadAttention(64, num_heads=4)
        >>> splits_of(attention, heads=True)["in_proj_weight"].sizes
        (16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16)
    """
    found: dict[str, Split] = {}
    for path, owner in model.named_modules():
        prefix = f"{path}." if path else ""
        for name, fused in _candidates(owner):
            split = next((split for rule in _RULES if (split := rule(fused, heads)) is not None), None)
            if split is not None and len(split.sizes) > 1 and split.problem(fused.shape) is None:
                found[canonical_name(prefix + name)] = split
    return found


def requested(request: Request, params: object) -> Splits:
    """Return splits by name or pattern for the argument ``split=`` of an optimizer.

    Args:
        request: the argument.
        params: what is optimized. Fused matrices are detected in modules only.

    Raises:
        ValueError: the argument is not one that :func:`~baoc.core.splits.read_request` accepts.
    """
    given = read_request(request)
    if given is not None:
        return given
    return splits_of(params, heads=request == HEADS) if isinstance(params, nn.Module) else {}


def _candidates(owner: nn.Module) -> Iterator[tuple[str, _Fused]]:
    """Return the parameters of a module and of the layers in it that have two or three dims."""
    for name, param in owner.named_parameters(recurse=False):
        if name != "weight" and param.dim() in (2, 3):
            yield name, _Fused(owner, name, tuple(param.shape), _dim_of_outputs(owner, name, tuple(param.shape)))
    for label, layer in owner.named_children():
        weight = dict(layer.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.dim() > 1 and all(size == 1 for size in weight.shape[2:]):
            shape = tuple(weight.shape[:2])  # a convolution of one pixel is a matrix
            is_transposed = type(layer).__name__ == "Conv1D" and getattr(layer, "nf", None) == shape[1]
            yield f"{label}.weight", _Fused(owner, label, shape, int(is_transposed))


def _dim_of_outputs(owner: nn.Module, name: str, shape: Shape) -> int:
    """Of stacked experts: the dim that is twice as long as what the layer after it reads."""
    down = _down_shape(owner)
    is_columns = len(shape) == 3 and down is not None and len(down) == 3 and shape[2] == 2 * down[1]
    return int(is_columns and shape[1] == down[2])  # type: ignore[index]


def _down_shape(owner: nn.Module) -> Shape | None:
    """Return the shape of the weight that reads a gated projection."""
    for name, param in owner.named_parameters(recurse=False):
        if _DOWN.fullmatch(name):
            return tuple(param.shape)
    for label, layer in owner.named_children():
        weight = dict(layer.named_parameters(recurse=False)).get("weight")
        if _DOWN.fullmatch(label) and weight is not None:
            return tuple(weight.shape)
    return None


# ---- rules: each returns a split, or None if it does not apply ----


def _attention(fused: _Fused, heads: bool) -> Split | None:
    by_group = _EITHER_WAY.fullmatch(fused.label) is not None
    kind = type(fused.owner).__name__
    if by_group and not _BY_GROUP.search(kind):  # its order is unknown
        return None
    if not by_group and not _SIDE_BY_SIDE.fullmatch(fused.label):
        return None
    queries = fused.number("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
    if queries is None:  # then only three matrices as wide as their input
        is_thirds = fused.outputs == 3 * fused.inputs and not heads and not by_group
        return Split((fused.inputs,) * 3, fused.dim) if is_thirds else None
    found = _key_heads(fused, queries)
    if found is None:
        return None
    keys, dim = found
    if heads:
        return Split((dim,) * (queries + 2 * keys), fused.dim)
    if kind.startswith("CodeGen"):  # the first quarter of all queries, of all values, of all keys, and so on
        size = queries * dim // _BLOCKS_OF_CODEGEN
        return Split((size,) * 3, fused.dim, _BLOCKS_OF_CODEGEN)
    if by_group or kind.startswith(("GPTBigCode", "InternLM2")):
        return Split((queries // keys * dim, dim, dim), fused.dim, keys)
    return Split((queries * dim, keys * dim, keys * dim), fused.dim)


def _key_heads(fused: _Fused, queries: int) -> tuple[int, int] | None:
    """Return the number of heads of keys and the dim of a head, if they make up the outputs."""
    keys = fused.number(
        "num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "n_head_kv", "num_query_groups"
    )
    if keys is None:
        keys = 1 if getattr(fused.owner, "multi_query", False) is True else queries
    given = fused.number("head_dim", "head_size", "attention_head_size", "d_kv", "dim_head")
    for count in dict.fromkeys((keys, queries)):  # a config may be of another module
        dim = given or fused.outputs // (queries + 2 * count)
        if (queries + 2 * count) * dim == fused.outputs and dim and queries % count == 0:
            return count, dim
    return None


def _latent_attention(fused: _Fused, heads: bool) -> Split | None:
    """DeepSeek's: latents beside the keys that all heads share, and keys beside values for each head."""
    q_rank, rank, rope = (fused.number(name) for name in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"))
    if fused.label == "kv_a_proj_with_mqa" and rank and rope:
        return Split((rank, rope), fused.dim)
    if fused.label == "fused_qkv_a_proj_with_mqa" and q_rank and rank and rope:
        return Split((q_rank, rank, rope), fused.dim)
    nope, value, count = (
        fused.number(*names) for names in (("qk_nope_head_dim",), ("v_head_dim",), ("num_heads", "num_attention_heads"))
    )
    if fused.label == "kv_b_proj" and nope and value and count:
        return Split((nope, value) * count, fused.dim) if heads else Split((nope, value), fused.dim, count)
    return None


def _gated(fused: _Fused, heads: bool) -> Split | None:
    """Gate and up projection, if the next layer reads half as many features."""
    down = _down_shape(fused.owner) if _GATED.fullmatch(fused.label) else None
    if down is None or len(down) != len(fused.shape) or fused.outputs % 2:
        return None
    half = fused.outputs // 2
    if half != down[-1 - fused.dim]:
        return None
    if getattr(fused.owner, "is_concatenated", True) is False:  # gate and up in turn, as in GPT-OSS
        return Split((1, 1), fused.dim, half)
    return Split((half, half), fused.dim)


def _separate(fused: _Fused, heads: bool) -> Split | None:
    """Queries, keys or values alone: with one matrix for each head only."""
    dim = fused.number("head_dim", "head_size", "attention_head_size", "d_kv") if heads else None
    if not dim or not _SEPARATE.fullmatch(fused.label) or len(fused.shape) != 2 or fused.outputs % dim:
        return None
    return Split((dim,) * (fused.outputs // dim), fused.dim)


_RULES: tuple[Callable[[_Fused, bool], Split | None], ...] = (_attention, _latent_attention, _gated, _separate)

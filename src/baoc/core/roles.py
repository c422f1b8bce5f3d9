"""The role of a parameter in its model. Update rules that work on whole matrices suit some roles only.

Example:
    >>> from torch import Tensor, nn
    >>> model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 100))
    >>> {name: role.value for name, role in roles_of(model).items() if name.endswith("weight")}
    {'0.weight': 'embedding', '1.weight': 'matrix', '2.weight': 'vector', '3.weight': 'head'}
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from enum import Enum

from torch import nn

from baoc.core.spec import Shape, real_shape

_KERNEL_SIDE = 16  # a 3-d tensor with a shorter last dim is a convolution, otherwise a stack of matrices
_EMBEDDING_NAME = re.compile(r"(^|[._])(w[tp]e|emb|embed\w*|[a-z]+_emb\w*|cls_token)(?=[._]|$)", re.IGNORECASE)
# Apart from lm_head, only outside of numbered layers: attention layers have a proj_out too.
_HEAD_NAME = re.compile(
    r"(^|\.)lm_head(?=\.|$)|^([a-z_]+\.)*(head|classifier|proj_out|conv_out)(?=\.|$)", re.IGNORECASE
)
_LAYER = re.compile(r"^(.*?\.?\d+)(\.|$)")
_NUMBERED = re.compile(r"(^|\.)\d+(\.|$)")  # a module in a list of modules
_LAYER_TYPES = (nn.Linear, nn.modules.conv._ConvNd)
_LETTER = re.compile(r"[^\W\d]")
_LONG = 8  # height over width: more than an MLP's matrix has, and less than most vocabularies
_WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Role(Enum):
    """What a parameter is in its model."""

    VECTOR = "vector"  # a bias, a norm's gain, a scalar
    MATRIX = "matrix"  # between hidden features
    STACK = "stack"  # of such matrices, for example experts
    CONVOLUTION = "convolution"
    EMBEDDING = "embedding"  # of tokens or positions: rows are looked up
    HEAD = "head"  # from features to classes or tokens


HIDDEN = (Role.MATRIX, Role.STACK, Role.CONVOLUTION)
"""Roles of weights between hidden features."""


def canonical_name(name: str) -> str:
    """Remove what ``torch.compile``, FSDP and activation checkpointing add to a parameter's name.

    Args:
        name: the parameter's name.

    Returns:
        The name in the model without wrappers.

    Example:
        >>> canonical_name("_orig_mod.h.0._checkpoint_wrapped_module.attn.weight")
        'h.0.attn.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def layer_of(name: str) -> str:
    """Return the layer that a parameter is in: its name up to the first number, or its module.

    Example:
        >>> [layer_of(name) for name in ("transformer.h.11.attn.weight", "transformer.wte.weight", "scale")]
        ['transformer.h.11', 'transformer.wte', 'scale']
    """
    numbered = _LAYER.match(name)
    return numbered[1] if numbered else name.rpartition(".")[0] or name


def role_of(shape: Shape, name: str = "") -> Role:
    """Return the role that a shape, and a name if there is one, suggest.

    Args:
        shape: the parameter's global shape.
        name: its name. Embeddings and heads cannot be told from other matrices without it.

    Returns:
        The role.

    Example:
        >>> [role_of(shape).value for shape in ((64,), (64, 64), (8, 64, 64), (64, 32, 3, 3), (64, 32, 5))]
        ['vector', 'matrix', 'stack', 'convolution', 'convolution']
        >>> role_of((50257, 768), "transformer.wte.weight").value, role_of((50257, 768), "lm_head.weight").value
        ('embedding', 'head')
    """
    if len(shape) < 2:
        return Role.VECTOR
    if _EMBEDDING_NAME.search(name):
        return Role.EMBEDDING
    if _HEAD_NAME.search(name):
        return Role.HEAD
    if len(shape) == 2:
        return Role.MATRIX
    return Role.STACK if len(shape) == 3 and shape[-1] >= _KERNEL_SIDE else Role.CONVOLUTION


def roles_of(model: nn.Module) -> dict[str, Role]:
    """Return the role of every parameter of a model, by module type where it is known and else by name and shape.

    A head is what ``model.get_output_embeddings()`` returns, or a layer with a name such as ``lm_head`` or
    ``classifier``. Without these, it is the last linear or convolution layer, unless its outputs are inputs of another
    layer and an earlier layer has outputs that nothing else reads. A head that is tied to an embedding is an embedding.

    Args:
        model: the model.

    Returns:
        Role by canonical parameter name.

    Example:
        >>> unet = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Linear(8, 8), nn.Conv2d(8, 3, 3))
        >>> {name: role.value for name, role in roles_of(unet).items() if name.endswith("weight")}
        {'0.weight': 'convolution', '1.weight': 'matrix', '2.weight': 'head'}
    """
    modules = {canonical_name(name): module for name, module in model.named_modules()}
    layers = {name: module for name, module in modules.items() if isinstance(module, _LAYER_TYPES)}
    by_weight = {id(module.weight): Role.MATRIX for module in layers.values() if isinstance(module, nn.Linear)}
    by_weight |= {id(layers[name].weight): Role.HEAD for name in _heads(model, modules, layers)}
    embeddings = [module for module in modules.values() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    by_weight |= {id(module.weight): Role.EMBEDDING for module in embeddings}
    return {
        canonical_name(name): by_weight.get(id(param)) or role_of(real_shape(param), canonical_name(name))
        for name, param in model.named_parameters()
    }


def _heads(model: nn.Module, modules: Mapping[str, nn.Module], layers: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the layers that are heads."""
    heads = {}  # by the name up to "head" or "classifier": that of VGG has three layers, and only the last is a head
    for name in layers:
        if found := _HEAD_NAME.search(name):
            heads[name[: found.end()]] = name
    output = _output_layer(model)
    heads |= {name: name for name, module in layers.items() if module is output}
    return list(heads.values()) or [name for name in [_head_by_shape(modules, layers)] if name is not None]


def _output_layer(model: nn.Module) -> object:
    """Return what a model of transformers says its head is."""
    get = getattr(model, "get_output_embeddings", None)
    try:
        return get() if callable(get) else None
    except (AttributeError, NotImplementedError):  # some models of transformers declare it without having one
        return None


def _head_by_shape(modules: Mapping[str, nn.Module], layers: Mapping[str, nn.Module]) -> str | None:
    """Return the layer whose outputs nothing reads: the last one, or an earlier one if a layer reads those of the last.

    Layers in a stack of blocks do not count as earlier ones, because attention layers may concatenate their outputs.
    Nor do layers with more outputs than inputs that are no vocabulary: their outputs may be split.
    """
    last = next(reversed(list(layers)), None)
    if last is None:
        return None
    read = {_features(module, 1) for module in layers.values()}
    if _features(layers[last], 0) not in read and _NUMBERED.search(last) is None:
        return last
    vocabularies = {module.num_embeddings for module in modules.values() if isinstance(module, nn.Embedding)}
    earlier = [
        name
        for name, module in layers.items()
        if _NUMBERED.search(name) is None
        and (outputs := _features(module, 0)) not in read
        and (outputs in vocabularies or outputs < _features(module, 1))
    ]
    return earlier[-1] if earlier else last


def _features(layer: nn.Module, dim: int) -> int:
    """Return the number of outputs (dim 0) or inputs (dim 1) of a layer."""
    if isinstance(layer, nn.Linear):
        return (layer.out_features, layer.in_features)[dim]
    assert isinstance(layer, nn.modules.conv._ConvNd)
    return (layer.out_channels, layer.in_channels)[dim]


def roles_by_name(shapes: Mapping[str, Shape]) -> dict[str, Role]:
    """Return the role of every parameter from names and shapes alone.

    Args:
        shapes: global shape by parameter name.

    Returns:
        Role by parameter name.
    """
    return {name: role_of(shape, name) for name, shape in shapes.items()}


def has_letters(name: str) -> bool:
    """Return whether a parameter has a name, not only numbers: ``"0.3"`` is the fourth of the first param group."""
    return _LETTER.search(name) is not None


def roles_by_place(shapes: Mapping[str, Shape]) -> dict[str, Role]:
    """Return the role of every parameter of a whole model whose parameters may have numbers for names.

    If names have letters, they decide. Otherwise this is a guess by order: the first matrix is an embedding, the last
    one a head, and one that is far longer than wide an embedding.

    Args:
        shapes: global shape by parameter name, in the model's order.

    Returns:
        Role by parameter name.

    Example:
        >>> roles = roles_by_place({"0.0": (512, 64), "0.1": (64, 64), "0.2": (64,), "0.3": (64, 64)})
        >>> [role.value for role in roles.values()]
        ['embedding', 'matrix', 'vector', 'head']
    """
    roles = roles_by_name(shapes)
    matrices = [name for name, role in roles.items() if role is Role.MATRIX]
    if any(map(has_letters, shapes)) or len(matrices) < 3:
        return roles
    long = {name: Role.EMBEDDING for name in matrices if max(shapes[name]) >= _LONG * max(1, min(shapes[name]))}
    return {**roles, **long, matrices[0]: Role.EMBEDDING, matrices[-1]: Role.HEAD}


def matrix_shape(shape: Shape) -> Shape:
    """Return a tensor's shape as a matrix or as a stack of matrices, with its own dim 0.

    Args:
        shape: the tensor's shape.

    Returns:
        ``(rows, cols)``, or ``(matrices, rows, cols)`` for a stack.

    Example:
        >>> matrix_shape((768, 3072)), matrix_shape((8, 64, 32)), matrix_shape((64, 32, 3, 3))
        ((768, 3072), (8, 64, 32), (64, 288))
    """
    return shape if role_of(shape) is Role.STACK else as_matrices(shape)[1:]


def as_matrices(shape: Shape) -> tuple[int, int, int]:
    """Return a tensor's shape as a batch of matrices. The rows of a convolution are its outputs.

    Args:
        shape: the tensor's shape.

    Returns:
        ``(matrices, rows, cols)``.

    Example:
        >>> as_matrices((768, 3072)), as_matrices((8, 64, 32)), as_matrices((64, 32, 3, 3))
        ((1, 768, 3072), (8, 64, 32), (1, 64, 288))
    """
    if role_of(shape) is Role.STACK:
        return shape[0], shape[1], shape[2]
    rows = shape[0] if shape else 1
    return 1, rows, math.prod(shape[1:])

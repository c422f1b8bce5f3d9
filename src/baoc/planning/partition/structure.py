"""The structural scan of Alg. 2: candidate units from the module tree, or from parameter names where there is none.

No name of a model family is looked for. What is looked for is

- a *wrapper*: a module that only passes on to its one child. It is looked through;
- a *simple* module: a leaf (linear map, norm, embedding), or more with one matrix at most (a convolution and its norm);
- a *list*: a ``ModuleList``, ``Sequential`` or ``ModuleDict``, or children with numbers for names;
- a *stack*: a list that has more than simple modules in it;
- a *layer*: an element of a list that resembles its neighbour there.

A module is a unit if it holds no stack and either belongs to a layer (an attention, however it is built inside) or has
only simple children (an MLP, a residual block of convolutions, an expert, the embeddings of BERT). Any other module is
opened: its children are looked at one by one, and what it holds itself stands alone. The root is always opened; so is a
list of simple modules that is not in a layer, for there it is the list of layers (``VGG.features``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby, pairwise
from typing import Literal, get_args

from torch import nn

from baoc.core.spec import Shape
from baoc.planning.partition.tree import Node, TensorInfo, module_tree, name_tree
from baoc.planning.partition.units import Unit, blocks, unique

Granularity = Literal["tensor", "module", "layer", "coarse"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)


def structural_units(
    model_or_shapes: nn.Module | Mapping[str, Shape], granularity: Granularity = "module"
) -> tuple[Unit, ...]:
    """The structural units of a model, in forward order, which is the order of registration.

    Of a module, the trainable parameters (tied ones once, under their first name); frozen ones still show where the
    boundaries are. Of a mapping from names to shapes, all; there the tree of the names takes the place of the module
    tree, and nameless parameters (``"0.3"``) are one unit each. Names are spelt as in plans.

    - ``"tensor"``: every parameter for itself.
    - ``"module"``: attention, MLP, norm, embedding, head ...: the paper's candidate units.
    - ``"layer"``: each repeated layer; what stands outside of layers as before.
    - ``"coarse"``: each run of layers, and each run of what stands before, between and after them.

    >>> def layer():
    ...     attention = nn.ModuleDict({"qkv": nn.Linear(8, 24), "out": nn.Linear(8, 8)})
    ...     return nn.ModuleDict({"norm": nn.LayerNorm(8), "attn": attention})
    >>> layers = nn.ModuleList(layer() for _ in range(2))
    >>> model = nn.ModuleDict({"embed": nn.Embedding(10, 8), "layers": layers, "head": nn.Linear(8, 10)})
    >>> [unit.name for unit in structural_units(model)]
    ['embed', 'layers.0.norm', 'layers.0.attn', 'layers.1.norm', 'layers.1.attn', 'head']
    >>> [unit.name for unit in structural_units(model, "layer")]
    ['embed', 'layers.0', 'layers.1', 'head']
    >>> [unit.name for unit in structural_units(model, "coarse")]
    ['embed', 'layers', 'head']
    >>> [(unit.name, unit.numel) for unit in structural_units({"0.0": (8, 8), "0.1": (8,)})]
    [('0.0', 64), ('0.1', 8)]
    """
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity {granularity!r} is not one of {', '.join(GRANULARITIES)}.")
    root = module_tree(model_or_shapes) if isinstance(model_or_shapes, nn.Module) else name_tree(model_or_shapes)
    pieces = list(_scan(root))
    if granularity == "tensor":
        pieces = [_Piece(tensor.name, [tensor], piece.layer) for piece in pieces for tensor in piece.tensors]
    units = _units(pieces)
    if granularity == "layer":
        return _merged(units, lambda index: units[index].layer or index)
    if granularity == "coarse":
        return _merged(units, lambda index: _stack(units[index].layer))
    return units


class _Place(Enum):
    """Where in the model a module stands."""

    OUTSIDE = "outside of all layers"
    ELEMENT = "a layer, or an element of a stack within one"
    PART = "any other part of a layer"


@dataclass(frozen=True)
class _Piece:
    """A unit that may still hold frozen parameters."""

    name: str
    tensors: list[TensorInfo]
    layer: str


def _scan(root: Node) -> Iterator[_Piece]:
    top = root
    while not top.tensors and len(top.children) == 1:
        top = top.only_child
    if top.children or top is root:
        yield from _open(top, _Place.OUTSIDE, layer="")
    else:
        yield _Piece(top.path, top.tensors, layer="")


def _open(node: Node, place: _Place, layer: str) -> Iterator[_Piece]:
    for tensor in node.tensors:
        yield _Piece(tensor.name, [tensor], layer)
    children = list(node.children.values())
    layers = _layers(children) if node.is_list else [False] * len(children)
    for child, is_layer in zip(children, layers):
        if place is _Place.OUTSIDE:
            child_place = _Place.ELEMENT if node.is_stack and is_layer else _Place.OUTSIDE
            child_layer = child.path if is_layer else ""
        else:
            child_place = _Place.ELEMENT if node.is_stack else _Place.PART
            child_layer = layer
        if _is_unit(child.unwrapped, child_place):
            yield _Piece(child.path, child.all_tensors, child_layer)
        else:
            yield from _open(child.unwrapped, child_place, child_layer)


def _is_unit(node: Node, place: _Place) -> bool:
    if node.is_simple:
        return True
    if node.holds_stack or (node.is_list and place is _Place.OUTSIDE):
        return False
    return place is _Place.PART or node.has_simple_children


def _layers(elements: list[Node]) -> list[bool]:
    """Which elements of a list are layers: those like a neighbour, those between two such ones (a hybrid model has one
    attention among many state-space layers), and an only one.
    """
    alike = [False, *(a.resembles(b) for a, b in pairwise(elements)), False]  # each with the one before it
    near = [before or after for before, after in pairwise(alike)]
    between = [before and after for before, after in zip([False, *near], [*near[1:], False])]
    return [len(elements) == 1 or either or both for either, both in zip(near, between)]


def _units(pieces: Iterable[_Piece]) -> tuple[Unit, ...]:
    found = []
    for piece in pieces:
        trainable = [tensor for tensor in piece.tensors if tensor.trainable]
        if trainable:
            names = tuple(tensor.name for tensor in trainable)
            found.append(Unit(piece.name, names, sum(tensor.numel for tensor in trainable), piece.layer))
    # Names made by hand can give a parameter the name of a module.
    return tuple(replace(unit, name=name) for unit, name in zip(found, unique(unit.name for unit in found)))


def _stack(layer: str) -> str | None:
    return layer.rpartition(".")[0] if layer else None


def _merged(units: tuple[Unit, ...], key: Callable[[int], Hashable]) -> tuple[Unit, ...]:
    """Neighbours with the same key become one unit."""
    groups = [tuple(run) for _, run in groupby(range(len(units)), key)]
    merged = []
    for group, (name, parameters) in zip(groups, blocks(units, groups)):
        layers = {units[index].layer for index in group}
        numel = sum(units[index].numel for index in group)
        merged.append(Unit(name, parameters, numel, layers.pop() if len(layers) == 1 else ""))
    return tuple(merged)

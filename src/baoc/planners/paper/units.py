"""Structural units: which parameters a model's structure keeps together (App. C, the input of Alg. 2).

The scan reads candidate *units* (attention, MLP, norm, embedding, head ...) off the module tree. :mod:`refine` merges
neighbours that behave alike into *blocks*. A tensor is never split, and every parameter is in exactly one unit.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import groupby, pairwise
from typing import Literal, get_args

from torch import nn

from baoc.core.roles import canonical_name
from baoc.core.spec import Shape

Granularity = Literal["tensor", "module", "layer", "coarse"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)


WHOLE_MODEL = "all"


@dataclass(frozen=True)
class Unit:
    """Parameters that belong together by the model's structure: a candidate for a block.

    >>> Unit("transformer.wte", ("transformer.wte.weight",), 38597376)
    Unit(name='transformer.wte', parameters=('transformer.wte.weight',), numel=38597376, layer='')
    """

    name: str
    parameters: tuple[str, ...]
    numel: int
    layer: str = ""
    """Path of the repeated layer that it belongs to; empty outside of layers."""


def blocks(units: Sequence[Unit], groups: Iterable[Sequence[int]]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the name and the parameters of each group of neighboring units.

    A group that holds everything under a path has the name of that path, others the names of their two ends. Names are
    unique.

    >>> units = [Unit(f"h.{i}.{part}", (f"h.{i}.{part}.w",), 1) for i in range(3) for part in ("norm", "attn", "mlp")]
    >>> [name for name, _ in blocks(units, [(0,), (1, 2), (3, 4, 5), (6, 7, 8)])]
    ['h.0.norm', 'h.0.attn..mlp', 'h.1', 'h.2']
    >>> [name for name, _ in blocks(units, [(0, 1, 2, 3, 4, 5), (6, 7), (8,)])]
    ['h.0..1', 'h.2.norm..attn', 'h.2.mlp']
    """
    groups = [tuple(group) for group in groups]
    if sorted(index for group in groups for index in group) != list(range(len(units))) or () in groups:
        raise ValueError(f"the groups must hold each of the {len(units)} units exactly once, and none may be empty.")
    under = _units_under(units)
    names = unique(_name([units[index] for index in group], under) for group in groups)
    parameters = (tuple(name for index in group for name in units[index].parameters) for group in groups)
    return list(zip(names, parameters))


def unique(names: Iterable[str]) -> list[str]:
    """Return names with numbers appended to repeated ones.

    >>> unique(["a", "b", "a"])
    ['a', 'b', 'a#2']
    """
    taken: set[str] = set()
    result = []
    for name in names:
        chosen, number = name, 1
        while chosen in taken:
            number += 1
            chosen = f"{name}#{number}"
        taken.add(chosen)
        result.append(chosen)
    return result


def _name(group: Sequence[Unit], under: Counter[str]) -> str:
    if len(group) == 1:
        return group[0].name
    held = _units_under(group)

    def widest(name: str) -> str:
        """Return the highest path above a unit whose units are all in the group."""
        return next((path for path in _paths(name) if held[path] == under[path]), name)

    first, last = widest(group[0].name), widest(group[-1].name)
    if first == last:
        return first or WHOLE_MODEL
    shared = _shared_path(first, last)
    return f"{first}..{last[len(shared) :]}"


def _units_under(units: Sequence[Unit]) -> Counter[str]:
    return Counter(path for unit in units for path in _paths(unit.name))


def _paths(name: str) -> list[str]:
    """Return all paths from the root down: 'h.0.attn' -> '', 'h', 'h.0', 'h.0.attn'."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts) + 1)]


def _shared_path(first: str, last: str) -> str:
    """Return the path that both are under, with its dot: 'h.0.attn', 'h.0.mlp' -> 'h.0.'."""
    shared = [path for path, other in zip(_paths(first)[:-1], _paths(last)[:-1]) if path == other]
    return f"{shared[-1]}." if shared[-1] else ""


def structural_units(
    model_or_shapes: nn.Module | Mapping[str, Shape], granularity: Granularity = "module"
) -> tuple[Unit, ...]:
    """Return the structural units of a model, in the order of registration.

    Units of a module hold its trainable parameters, tied ones once under their first name. Frozen parameters still show
    where boundaries are. For a mapping from names to shapes, the names take the place of the module tree, and
    parameters without a name (``"0.3"``) are units of their own. Names are spelled as in plans.

    Granularities:

    - ``"tensor"``: every parameter.
    - ``"module"``: attention, MLP, norm, embedding, head and so on: the paper's candidate units.
    - ``"layer"``: every repeated layer; modules outside of layers.
    - ``"coarse"``: every run of layers; every run of modules before, between and after them.

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
    """Where a module is in the model."""

    OUTSIDE = "outside of all layers"
    ELEMENT = "a layer, or an element of a stack within one"
    PART = "another part of a layer"


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
    """Return which elements of a list are layers: those that resemble a neighbor, and those between two such elements.

    A hybrid model has one attention among many state-space layers. The only element of a list is a layer too.
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
    # in a mapping, a parameter can have the name of a module
    return tuple(replace(unit, name=name) for unit, name in zip(found, unique(unit.name for unit in found)))


def _stack(layer: str) -> str | None:
    return layer.rpartition(".")[0] if layer else None


def _merged(units: tuple[Unit, ...], key: Callable[[int], Hashable]) -> tuple[Unit, ...]:
    """Merge neighbors with the same key."""
    groups = [tuple(run) for _, run in groupby(range(len(units)), key)]
    merged = []
    for group, (name, parameters) in zip(groups, blocks(units, groups)):
        layers = {units[index].layer for index in group}
        numel = sum(units[index].numel for index in group)
        merged.append(Unit(name, parameters, numel, layers.pop() if len(layers) == 1 else ""))
    return tuple(merged)


LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
RESEMBLANCE = 0.5  # the share of matrices that two layers must have in common
_POSITIONAL = re.compile(r"\d+\.\d+")  # a parameter that came without a name: group 0, parameter 3


@dataclass(frozen=True)
class TensorInfo:
    """Name and shape of a parameter."""

    name: str
    shape: Shape
    trainable: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1


@dataclass
class Node:
    """A module with parameters of its own or below. Its properties are valid once the tree is complete."""

    path: str
    kind: type | None = None  # the module's class, if there is a module
    tensors: list[TensorInfo] = field(default_factory=list)  # held by itself
    children: dict[str, Node] = field(default_factory=dict)

    @cached_property
    def unwrapped(self) -> Node:
        """The module without wrappers around it. A list of one layer is a stack, not a wrapper."""
        return self if self.tensors or len(self.children) != 1 or self.is_stack else self.only_child.unwrapped

    @property
    def only_child(self) -> Node:
        [child] = self.children.values()
        return child

    @cached_property
    def is_simple(self) -> bool:
        return not self.unwrapped.children or sum(tensor.is_matrix for tensor in self.all_tensors) <= 1

    @property
    def has_simple_children(self) -> bool:
        return all(child.is_simple for child in self.children.values())

    @cached_property
    def is_list(self) -> bool:
        named_as_list = all(name.isdigit() for name in self.children)
        return bool(self.children) and (named_as_list or (self.kind is not None and issubclass(self.kind, LISTS)))

    @cached_property
    def is_stack(self) -> bool:
        return self.is_list and not self.has_simple_children

    @cached_property
    def holds_stack(self) -> bool:
        return self.is_stack or any(child.holds_stack for child in self.children.values())

    @cached_property
    def all_tensors(self) -> list[TensorInfo]:
        """Its own tensors, then those of its children: the order of ``named_parameters()``."""
        return self.tensors + [tensor for child in self.children.values() for tensor in child.all_tensors]

    @cached_property
    def signature(self) -> frozenset[tuple[str, int]]:
        """Names and numbers of dims of its matrices, or of all its tensors if it has none."""
        matrices = [tensor for tensor in self.all_tensors if tensor.is_matrix] or self.all_tensors
        return frozenset((tensor.name[len(self.path) :], len(tensor.shape)) for tensor in matrices)

    def resembles(self, other: Node) -> bool:
        """Return whether two layers are alike. Widths may differ, as in a U-Net, and only some may have a shortcut."""
        if self.kind is not None and self.kind is other.kind and not self.is_list:
            return True
        common = len(self.signature & other.signature)
        return common >= RESEMBLANCE * min(len(self.signature), len(other.signature))


def module_tree(model: nn.Module) -> Node:
    """Return the tree of a module, with frozen parameters because they show where boundaries are."""
    # a wrapper of torch.compile or FSDP has the canonical name of the wrapped module, which comes later and wins
    kinds = {canonical_name(path): type(module) for path, module in model.named_modules()}
    root = Node("", kinds[""])
    for name, param in model.named_parameters():
        # the optimizer treats a complex tensor as a real one with a last dim of 2
        shape = (*param.shape, 2) if param.is_complex() else tuple(param.shape)
        tensor = TensorInfo(canonical_name(name), shape, param.requires_grad)
        _plant(root, _owner(tensor.name), tensor, kinds)
    return root


def name_tree(shapes: Mapping[str, Shape]) -> Node:
    """Return the tree that names imply. Parameters without a name belong to the root."""
    root = Node("")
    for name, shape in shapes.items():
        tensor = TensorInfo(canonical_name(name), tuple(shape))
        _plant(root, [] if _POSITIONAL.fullmatch(name) else _owner(tensor.name), tensor, {})
    return root


def _owner(name: str) -> list[str]:
    """Return the path of the module that owns a parameter, without what torch.nn.utils.parametrize adds to it."""
    *path, _ = name.split(".")
    return path[: path.index("parametrizations")] if "parametrizations" in path else path


def _plant(root: Node, path: list[str], tensor: TensorInfo, kinds: Mapping[str, type]) -> None:
    node = root
    for depth, part in enumerate(path, start=1):
        place = ".".join(path[:depth])
        node = node.children.setdefault(part, Node(place, kinds.get(place)))
    node.tensors.append(tensor)

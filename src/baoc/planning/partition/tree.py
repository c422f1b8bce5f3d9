"""The tree of modules that hold parameters, and what can be seen of a module from its place in it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from baoc.core.roles import canonical_name
from baoc.core.spec import Shape

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
RESEMBLANCE = 0.5  # the share of matrices that two layers must have in common
_POSITIONAL = re.compile(r"\d+\.\d+")  # a parameter that came without a name: group 0, parameter 3


@dataclass(frozen=True)
class TensorInfo:
    """A parameter as the scan sees it."""

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
    """A module that holds parameters, itself or below. Ready to be asked once the tree is complete."""

    path: str
    kind: type | None = None  # the module's class, if there is a module
    tensors: list[TensorInfo] = field(default_factory=list)  # held by itself
    children: dict[str, Node] = field(default_factory=dict)

    @cached_property
    def unwrapped(self) -> Node:
        """Without the wrappers around it. A list of one layer is a stack, not a wrapper."""
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
        """Own ones first, then those of the children: the order of ``named_parameters()``."""
        return self.tensors + [tensor for child in self.children.values() for tensor in child.all_tensors]

    @cached_property
    def signature(self) -> frozenset[tuple[str, int]]:
        """Names and numbers of dims of its matrices, or of all its tensors if it has none."""
        matrices = [tensor for tensor in self.all_tensors if tensor.is_matrix] or self.all_tensors
        return frozenset((tensor.name[len(self.path) :], len(tensor.shape)) for tensor in matrices)

    def resembles(self, other: Node) -> bool:
        """Layers need not be equal: widths change along a U-Net, and only some blocks have a shortcut."""
        if self.kind is not None and self.kind is other.kind and not self.is_list:
            return True
        common = len(self.signature & other.signature)
        return common >= RESEMBLANCE * min(len(self.signature), len(other.signature))


def module_tree(model: nn.Module) -> Node:
    """With frozen parameters: they show where the boundaries are."""
    # A wrapper of torch.compile or FSDP has the canonical name of what it wraps, which comes after it and wins.
    kinds = {canonical_name(path): type(module) for path, module in model.named_modules()}
    root = Node("", kinds[""])
    for name, param in model.named_parameters():
        # The optimizer sees a complex tensor as a real one with a last dim of 2.
        shape = (*param.shape, 2) if param.is_complex() else tuple(param.shape)
        tensor = TensorInfo(canonical_name(name), shape, param.requires_grad)
        _plant(root, _owner(tensor.name), tensor, kinds)
    return root


def name_tree(shapes: Mapping[str, Shape]) -> Node:
    """From names alone. A parameter without a name belongs to the root."""
    root = Node("")
    for name, shape in shapes.items():
        tensor = TensorInfo(canonical_name(name), tuple(shape))
        _plant(root, [] if _POSITIONAL.fullmatch(name) else _owner(tensor.name), tensor, {})
    return root


def _owner(name: str) -> list[str]:
    """The path of the module that a person would say has the parameter: torch.nn.utils.parametrize adds to it."""
    *path, _ = name.split(".")
    return path[: path.index("parametrizations")] if "parametrizations" in path else path


def _plant(root: Node, path: list[str], tensor: TensorInfo, kinds: Mapping[str, type]) -> None:
    node = root
    for depth, part in enumerate(path, start=1):
        place = ".".join(path[:depth])
        node = node.children.setdefault(part, Node(place, kinds.get(place)))
    node.tensors.append(tensor)

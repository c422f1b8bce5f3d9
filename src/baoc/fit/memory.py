"""What a rank holds in training besides optimizer state, part by part."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from textwrap import shorten

import torch
from torch import nn

from baoc.core.roles import canonical_name
from baoc.core.spec import Shape, real_shape
from baoc.fit.activations import Activations, layers_of, trace
from baoc.fit.inputs import LENGTH, training_step

GIB = 2**30


@dataclass(frozen=True)
class Precision:
    """How wide things are, in bytes."""

    weights: int
    gradients: int
    compute: torch.dtype
    copies: int = 0  # of the weights, in the compute dtype

    @property
    def width(self) -> int:
        return self.compute.itemsize


PRECISIONS = {
    "bf16": Precision(2, 2, torch.bfloat16),
    "mixed": Precision(4, 4, torch.bfloat16, copies=2),
    "fp32": Precision(4, 4, torch.float32),
}
"""``mixed`` is fp32 weights under autocast, which keeps a bf16 copy of them while a pass runs."""


class FitError(ValueError):
    """A question that cannot be answered as it was asked."""


@dataclass(frozen=True)
class Setup:
    """How a model is to be trained."""

    world_size: int = 1
    fsdp: bool = False
    batch: int = 1  # sequences or images of a step, on each rank
    length: int = LENGTH
    checkpointing: bool = False
    dtype: str = "bf16"
    reserve: int = GIB
    """For what no formula knows: the driver's context, communication buffers, workspaces, fragments."""

    def __post_init__(self) -> None:
        if self.dtype not in PRECISIONS:
            raise FitError(f"unknown dtype {self.dtype!r}. Choose one of {', '.join(PRECISIONS)}.")

    @property
    def precision(self) -> Precision:
        return PRECISIONS[self.dtype]

    @property
    def shards(self) -> int:
        """Into how many parts weights, gradients and state are cut."""
        return self.world_size if self.fsdp else 1


@dataclass(frozen=True)
class Weights:
    """A model's tensors, as far as their bytes go."""

    trained: dict[str, Shape]
    frozen: dict[str, Shape]
    largest_layer: int  # elements
    outside_layers: int

    @classmethod
    def of(cls, model: nn.Module) -> Weights:
        """Tied weights count once.

        >>> Weights.of(nn.Linear(3, 2)).trained
        {'weight': (2, 3), 'bias': (2,)}
        """
        shapes: tuple[dict[str, Shape], dict[str, Shape]] = ({}, {})
        for name, param in model.named_parameters():
            shapes[not param.requires_grad][canonical_name(name)] = real_shape(param)
        sizes = [sum(param.numel() for param in layer.parameters()) for layer in layers_of(model)]
        everything = sum(param.numel() for param in model.parameters())
        return cls(*shapes, max(sizes, default=0), everything - sum(sizes))

    def on_a_rank(self, shards: int) -> tuple[int, int]:
        """Elements of all tensors and of the trained ones on the fullest rank, cut on dim 0."""
        trained = sum(_shard(shape, shards) for shape in self.trained.values())
        return trained + sum(_shard(shape, shards) for shape in self.frozen.values()), trained


def _shard(shape: Shape, shards: int) -> int:
    return -(-shape[0] // shards) * math.prod(shape[1:]) if shape else 1


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at its fullest, without optimizer state."""

    weights: int
    gradients: int
    activations: int | None
    """``None`` if they cannot be counted."""
    gathered: int
    """Under FSDP2: what is whole for a while."""
    reserve: int
    tokens: int
    """Of a step, on this rank."""
    unknown: str = ""
    """Why activations cannot be counted."""
    parts: dict[str, int] = field(init=False)
    """By name, those that are not zero."""

    def __post_init__(self) -> None:
        named = {
            "weights": self.weights,
            "gradients": self.gradients,
            "activations": self.activations or 0,
            "gathered layers": self.gathered,
            "reserve": self.reserve,
        }
        object.__setattr__(self, "parts", {name: nbytes for name, nbytes in named.items() if nbytes})

    @property
    def total(self) -> int:
        return sum(self.parts.values())


class Measured:
    """A model on the meta device, measured once for each batch that is asked about.

    >>> with torch.device("meta"):
    ...     measured = Measured(nn.Linear(1000, 1000, bias=False))
    >>> memory = measured.memory(Setup(world_size=4, fsdp=True))
    >>> memory.weights, memory.gradients, memory.activations
    (500000, 500000, None)
    """

    def __init__(self, model: nn.Module, activations: int | None = None) -> None:
        """``activations`` are those that somebody measured, in bytes, at any setup that is asked about."""
        self.model, self.weights = model, Weights.of(model)
        self._given = activations
        self._traced: dict[tuple[int, int, torch.dtype], _Traced] = {}

    def memory(self, setup: Setup) -> Memory:
        precision = setup.precision
        everything, trained = self.weights.on_a_rank(setup.shards)
        gathered = 0
        if setup.shards > 1:
            # what is in no layer stays whole from the forward pass on; one layer is in use and one on its way, and
            # gradients are whole until they have been summed
            layer, outside = self.weights.largest_layer, self.weights.outside_layers
            gathered = precision.width * (outside + 2 * layer) + precision.gradients * max(layer, outside)
        copies = everything * precision.copies if setup.shards == 1 else 0
        traced = self._trace(setup)
        return Memory(
            weights=everything * precision.weights + copies,
            gradients=trained * precision.gradients,
            activations=traced.peak(setup.checkpointing) if self._given is None else self._given,
            gathered=gathered,
            reserve=setup.reserve,
            tokens=traced.tokens,
            unknown=traced.unknown if self._given is None else "",
        )

    def is_counted(self, setup: Setup) -> bool:
        """Whether activations follow from the setup, and are neither given nor unknown."""
        return self._given is None and self._trace(setup).found is not None

    def _trace(self, setup: Setup) -> _Traced:
        key = (setup.batch, setup.length, setup.precision.compute)
        if key not in self._traced:
            model = nn.Module.to(self.model, setup.precision.compute).train()  # some libraries warn in their own to()
            self._traced[key] = _Traced.of(model, setup)
        return self._traced[key]


@dataclass(frozen=True)
class _Traced:
    """What one forward pass told, or why there was none."""

    tokens: int
    found: Activations | None = None
    unknown: str = ""

    @classmethod
    def of(cls, model: nn.Module, setup: Setup) -> _Traced:
        tokens = setup.batch * setup.length
        try:
            step = training_step(model, setup.batch, setup.length)
            if step is None:
                return cls(tokens, unknown=f"nobody knows how {type(model).__name__} is called")
            return cls(step.tokens, trace(model, step.forward))
        except Exception as error:  # of other people's code, which may need data
            reason = shorten(f"{type(error).__name__}: {error}", width=120, placeholder=" ...")
            return cls(tokens, unknown=f"its forward pass failed on the meta device ({reason})")

    def peak(self, checkpointing: bool) -> int | None:
        return None if self.found is None else self.found.peak(checkpointing=checkpointing)

"""Memory of a rank during training, without optimizer state: weights, gradients, activations, buffers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from textwrap import shorten

import torch
from torch import nn

from baoc.core.roles import canonical_name
from baoc.core.spec import Shape, real_shape
from baoc.tools.fit.activations import LENGTH, Activations, layers_of, trace, training_step

GIB = 2**30


@dataclass(frozen=True)
class Precision:
    """Bytes per element of weights and gradients, and the dtype of the computation."""

    weights: int
    gradients: int
    compute: torch.dtype
    copies: int = 0  # bytes per weight of a copy in the compute dtype

    @property
    def width(self) -> int:
        """Bytes per element in the computation."""
        return self.compute.itemsize


PRECISIONS = {
    "bf16": Precision(2, 2, torch.bfloat16),
    "mixed": Precision(4, 4, torch.bfloat16, copies=2),
    "fp32": Precision(4, 4, torch.float32),
}
"""By name. ``mixed`` is fp32 weights under autocast, which keeps a bf16 copy of them during a pass."""


class FitError(ValueError):
    """A setup that `fit` does not support."""


@dataclass(frozen=True)
class Setup:
    """How a model is trained.

    Args:
        world_size: Number of GPUs.
        fsdp: Whether weights, gradients and state are sharded as in FSDP2.
        batch: Sequences or images of a step on each rank.
        length: Tokens of a sequence.
        checkpointing: Whether activations are recomputed layer by layer.
        dtype: A name of :data:`PRECISIONS`.
        release: Whether gradients are released in the backward pass, so that only the largest one exists.
        reserve: Bytes for the driver, communication buffers, workspaces and fragmentation, which no formula predicts.

    Raises:
        FitError: If ``dtype`` is unknown.
    """

    world_size: int = 1
    fsdp: bool = False
    batch: int = 1
    length: int = LENGTH
    checkpointing: bool = False
    dtype: str = "bf16"
    release: bool = False
    reserve: int = GIB

    def __post_init__(self) -> None:
        if self.dtype not in PRECISIONS:
            raise FitError(f"unknown dtype {self.dtype!r}. Choose one of {', '.join(PRECISIONS)}.")

    @property
    def precision(self) -> Precision:
        """Sizes of the elements of :attr:`dtype`."""
        return PRECISIONS[self.dtype]

    @property
    def shards(self) -> int:
        """Number of shards of weights, gradients and state."""
        return self.world_size if self.fsdp else 1


@dataclass(frozen=True)
class Weights:
    """Shapes of a model's tensors."""

    trained: dict[str, Shape]
    frozen: dict[str, Shape]
    largest_layer: int  # elements
    outside_layers: int  # elements

    @classmethod
    def of(cls, model: nn.Module) -> Weights:
        """Read the shapes of a model. Tied weights count once.

        >>> Weights.of(nn.Linear(3, 2)).trained
        {'weight': (2, 3), 'bias': (2,)}
        """
        shapes: tuple[dict[str, Shape], dict[str, Shape]] = ({}, {})
        for name, param in model.named_parameters():
            shapes[not param.requires_grad][canonical_name(name)] = real_shape(param)
        sizes = [sum(param.numel() for param in layer.parameters()) for layer in layers_of(model)]
        everything = sum(param.numel() for param in model.parameters())
        return cls(*shapes, max(sizes, default=0), everything - sum(sizes))

    def largest(self, shards: int) -> int:
        """Return the elements of the largest trained tensor on the rank that holds the most."""
        return max((_shard(shape, shards) for shape in self.trained.values()), default=0)

    def on_a_rank(self, shards: int) -> tuple[int, int]:
        """Return the elements of all tensors, and of the trained ones, on the rank that holds the most."""
        trained = sum(_shard(shape, shards) for shape in self.trained.values())
        return trained + sum(_shard(shape, shards) for shape in self.frozen.values()), trained


def _shard(shape: Shape, shards: int) -> int:
    return -(-shape[0] // shards) * math.prod(shape[1:]) if shape else 1


@dataclass(frozen=True)
class Memory:
    """Peak bytes of the rank that holds the most, without optimizer state.

    Attributes:
        weights: Weights, and their copy under autocast.
        gradients: Gradients.
        activations: Activations, or None if they cannot be counted.
        gathered: Layers and gradients that are temporarily unsharded under FSDP2.
        reserve: :attr:`Setup.reserve`.
        tokens: Tokens of a step on this rank.
        unknown: Why activations cannot be counted.
        parts: The nonzero parts by name.
    """

    weights: int
    gradients: int
    activations: int | None
    gathered: int
    reserve: int
    tokens: int
    unknown: str = ""
    parts: dict[str, int] = field(init=False)

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
        """Sum of all parts."""
        return sum(self.parts.values())


class Measured:
    """A model on the meta device. Its activations are counted once for each batch size, length and dtype.

    Args:
        model: The model.
        activations: Measured bytes of activations, to use instead of the count.

    Example:
        >>> with torch.device("meta"):
        ...     measured = Measured(nn.Linear(1000, 1000, bias=False))
        >>> memory = measured.memory(Setup(world_size=4, fsdp=True))
        >>> memory.weights, memory.gradients, memory.activations
        (500000, 500000, None)
    """

    def __init__(self, model: nn.Module, activations: int | None = None) -> None:
        self.model, self.weights = model, Weights.of(model)
        self._given = activations
        self._traced: dict[tuple[int, int, torch.dtype], _Traced] = {}

    def memory(self, setup: Setup) -> Memory:
        """Return the memory of a rank for a setup."""
        precision = setup.precision
        everything, trained = self.weights.on_a_rank(setup.shards)
        gathered = 0
        if setup.shards > 1:
            # Parameters outside of layers stay gathered after the forward pass. One layer is in use while the next is
            # prefetched. Gradients are unsharded until they are reduced.
            layer, outside = self.weights.largest_layer, self.weights.outside_layers
            gathered = precision.width * (outside + 2 * layer) + precision.gradients * max(layer, outside)
        copies = everything * precision.copies if setup.shards == 1 else 0
        traced = self._trace(setup)
        return Memory(
            weights=everything * precision.weights + copies,
            gradients=(self.weights.largest(setup.shards) if setup.release else trained) * precision.gradients,
            activations=traced.peak(setup.checkpointing) if self._given is None else self._given,
            gathered=gathered,
            reserve=setup.reserve,
            tokens=traced.tokens,
            unknown=traced.unknown if self._given is None else "",
        )

    def is_counted(self, setup: Setup) -> bool:
        """Return whether activations are counted, neither given nor unknown."""
        return self._given is None and self._trace(setup).found is not None

    def _trace(self, setup: Setup) -> _Traced:
        key = (setup.batch, setup.length, setup.precision.compute)
        if key not in self._traced:
            model = nn.Module.to(self.model, setup.precision.compute).train()  # the to() of some libraries warns
            self._traced[key] = _Traced.of(model, setup)
        return self._traced[key]


@dataclass(frozen=True)
class _Traced:
    """The activations of one forward pass, or why they are unknown."""

    tokens: int
    found: Activations | None = None
    unknown: str = ""

    @classmethod
    def of(cls, model: nn.Module, setup: Setup) -> _Traced:
        tokens = setup.batch * setup.length
        try:
            step = training_step(model, setup.batch, setup.length)
            if step is None:
                return cls(tokens, unknown=f"the inputs of {type(model).__name__} are not known")
            return cls(step.tokens, trace(model, step.forward))
        except Exception as error:  # model code may need real data
            reason = shorten(f"{type(error).__name__}: {error}", width=120, placeholder=" ...")
            return cls(tokens, unknown=f"its forward pass failed on the meta device ({reason})")

    def peak(self, checkpointing: bool) -> int | None:
        return None if self.found is None else self.found.peak(checkpointing=checkpointing)

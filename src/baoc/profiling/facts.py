"""What is known of a model besides its shapes and gradients: roles, whether it was trained before, how large steps are.

None of it is timed or drawn at random, so every process and every rank finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from baoc.core.roles import Role, canonical_name, role_of, roles_by_place, roles_of
from baoc.core.sharding import first_rows
from baoc.core.spec import Shape, real_shape

SCRATCH, FINETUNE = "scratch", "finetune"
_LOOKED_AT = 512  # rows and columns of a matrix at most
_MATRICES = 8
_OUTLIER = 1.15  # of the largest singular value that random numbers of the same size would have
OPERATIONS_PER_BYTE = {"cpu": 4.0, "cuda": 100.0}
"""What a device computes while it moves one byte. An update moves bytes, a training step computes."""


@dataclass(frozen=True)
class Facts:
    """About a model."""

    roles: Mapping[str, Role] = field(default_factory=dict)
    """By names as plans spell them."""
    regime: str = SCRATCH
    tokens: int | None = None
    """That pass through a hidden weight in one step, on average: the batch times the length, or times the pixels."""
    device: str = "cpu"
    operations_per_byte: float = OPERATIONS_PER_BYTE["cpu"]
    """Of that device. A run that goes on elsewhere keeps it: its plan must not change with the machine."""

    @classmethod
    def of(cls, params: nn.Module | Mapping[str, Tensor]) -> Facts:
        """All that can be seen before the first step.

        >>> Facts.of(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))).regime
        'scratch'
        """
        is_module = isinstance(params, nn.Module)
        named = dict(params.named_parameters()) if isinstance(params, nn.Module) else dict(params)
        named = {canonical_name(name): param for name, param in named.items()}
        shapes = {name: real_shape(param) for name, param in named.items()}
        roles = roles_of(params) if is_module else roles_by_place(shapes)  # type: ignore[arg-type]
        device = next((param.device.type for param in named.values()), "cpu")
        intensity = OPERATIONS_PER_BYTE.get(device, OPERATIONS_PER_BYTE["cuda"])
        return cls(roles, regime_of(named, roles), device=device, operations_per_byte=intensity)

    def with_tokens(self, tokens: int | None) -> Facts:
        return replace(self, tokens=tokens or self.tokens)

    def role(self, name: str, shape: Shape) -> Role:
        return self.roles.get(name) or role_of(shape, name)


@torch.no_grad()
def regime_of(params: Mapping[str, Tensor], roles: Mapping[str, Role]) -> str:
    """``"finetune"`` if the weights were trained before: norms that are no longer all alike, or, where a model has no
    norms, matrices whose spectra are not those of random numbers.

    >>> weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    >>> regime_of({"w": weight}, {"w": Role.MATRIX})
    'scratch'
    >>> regime_of({"w": weight + torch.ones(64, 64)}, {"w": Role.MATRIX})
    'finetune'
    """
    real = {name: param.detach() for name, param in params.items() if param.numel() and param.device.type != "meta"}
    gains = [param for name, param in real.items() if _is_gain(name, param, roles)]
    if gains:
        whole = (first_rows(gain, gain.numel(), 1) for gain in gains)
        changed = sum(bool((gain != gain[0]).any()) for gain in whole)
        return FINETUNE if 2 * changed > len(gains) else SCRATCH
    matrices = [param for name, param in real.items() if roles.get(name) in (Role.MATRIX, Role.CONVOLUTION)]
    if not matrices:
        return SCRATCH
    spread = matrices[:: max(1, len(matrices) // _MATRICES)][:_MATRICES]
    trained = sum(_has_outlier(param) for param in spread)
    return FINETUNE if 2 * trained > len(spread) else SCRATCH


def _is_gain(name: str, param: Tensor, roles: Mapping[str, Role]) -> bool:
    """A norm's. Biases do not count: torch draws those of linear maps at random."""
    return param.dim() == 1 and param.numel() > 1 and roles.get(name) is Role.VECTOR and name.endswith("weight")


def _has_outlier(param: Tensor) -> bool:
    """Whether the largest singular value is beyond the edge of the Marchenko-Pastur law."""
    matrix = first_rows(param, _LOOKED_AT, _LOOKED_AT)
    if min(matrix.shape) < 16 or not bool(matrix.isfinite().all()):
        return False
    edge = float(matrix.std()) * (math.sqrt(matrix.shape[0]) + math.sqrt(matrix.shape[1]))
    return float(torch.linalg.matrix_norm(matrix, 2)) > _OUTLIER * edge


class TokenCounter:
    """Counts what passes through the hidden weights of a module until :meth:`stop`.

    Only forward passes that a gradient will follow count, so neither evaluations nor passes that are made again do.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 4))
    >>> counter = TokenCounter(model)
    >>> _ = model(torch.zeros(5, 3, 8))
    >>> counter.stop()
    15
    """

    def __init__(self, model: nn.Module) -> None:
        roles = roles_of(model)
        self._passed: list[_Passed] = []
        self._handles = []
        for path, module in model.named_modules():
            weight = getattr(module, "weight", None)
            role = roles.get(canonical_name(f"{path}.weight" if path else "weight"))
            if isinstance(weight, Tensor) and role in (Role.MATRIX, Role.CONVOLUTION):
                self._passed.append(_Passed(weight.numel()))
                self._handles.append(module.register_forward_hook(self._passed[-1]))

    def stop(self) -> int | None:
        """The mean over all hidden weights; ``None`` if nothing was seen."""
        for handle in self._handles:
            handle.remove()
        seen = [each for each in self._passed if each.tokens]
        weights = sum(each.weights for each in seen)
        return round(sum(each.weights * each.tokens for each in seen) / weights) if weights else None


class _Passed:
    """What has passed through one module. It is copied with the module, and with the counter if that is copied too."""

    def __init__(self, weights: int) -> None:
        self.weights, self.tokens = weights, 0

    def __call__(self, module: nn.Module, inputs: object, output: object) -> None:
        if torch.compiler.is_compiling() or not isinstance(output, Tensor) or not output.requires_grad:
            return
        channels = output.shape[1] if isinstance(module, nn.modules.conv._ConvNd) else output.shape[-1]
        self.tokens += output.numel() // max(1, channels)

"""Facts about a model that planners read: shapes, roles, whether it was trained before, how many tokens a step has.

Nothing here is timed or random, so every process and every rank finds the same.
"""

from __future__ import annotations

import math
import re
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from baoc.core.codecs.quantized import fits
from baoc.core.configuration import BUDGET_REFERENCE
from baoc.core.fused import splits_of
from baoc.core.roles import HIDDEN, Role, canonical_name, has_letters, role_of, roles_by_place, roles_of
from baoc.core.sharding import first_rows
from baoc.core.spec import LOW_PRECISION, SMALL_NUMEL, Hyper, Shape, real_shape
from baoc.core.splits import Split

SCRATCH, FINETUNE, GENERAL = "scratch", "finetune", "general"
REGIMES = (SCRATCH, FINETUNE, GENERAL)
"""Kinds of training that effects were measured for: networks with normalization layers, from scratch or after
pretraining, and everything else. From scratch, Muon beats AdamW in most networks with normalization layers and fails in
many without (fields, PINNs, critics, recurrent networks, directly optimized tensors): `docs/results/zoo.md`."""
OPERATIONS_PER_BYTE = {"cpu": 4.0, "cuda": 100.0}
"""Arithmetic operations that a device does while it moves one byte. An update moves bytes, a training step computes."""
_NORM = re.compile("(?<!weight)(?<!spectral)norm")  # those two normalize weights, not features
_EDGE = 512  # rows and columns of a matrix that are read
_MATRICES = 8
_OUTLIER = 1.15  # times the largest singular value of a random matrix of the same size


@dataclass(frozen=True)
class ModelFacts:
    """What planners know about a model.

    Args:
        shapes: the global shape of every parameter to plan, by name, in the model's order.
        roles: what the parameters are, by name; read off names and shapes where it has no entry.
        regime: "general" if the model has no normalization layers, else "scratch", or "finetune" if the weights were
            trained before.
        tokens: that pass through a hidden weight in one step, on average; ``None`` until they were counted.
        device: the type of the parameters' device.
        operations_per_byte: of that device. A resumed run keeps it, so that its plan does not change with the machine.
        hyper: of the first param group, with the largest weight decay of all.
        one_lr: whether all param groups have one learning rate.
        rows: of every sharded parameter, the rows that the rank with the most holds.
        low_precision: names of bf16 and fp16 parameters, which have slot ``w``.
        splits: parameters that are several matrices, by name.
        has_workspace: whether memory has room for what rules for whole matrices need during an update.

    Example:
        >>> facts = ModelFacts.of(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)))
        >>> facts.regime, facts.role("2.weight").value
        ('scratch', 'head')
        >>> ModelFacts.of(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))).regime
        'general'
    """

    shapes: Mapping[str, Shape]
    roles: Mapping[str, Role] = field(default_factory=dict)
    regime: str = SCRATCH
    tokens: int | None = None
    device: str = "cpu"
    operations_per_byte: float = OPERATIONS_PER_BYTE["cpu"]
    hyper: Hyper = field(default_factory=lambda: Hyper(lr=1e-3, weight_decay=0.01))
    one_lr: bool = True
    rows: Mapping[str, int] = field(default_factory=dict)
    low_precision: frozenset[str] = frozenset()
    splits: Mapping[str, Split] = field(default_factory=dict)
    has_workspace: bool = True

    @classmethod
    def of(cls, params: nn.Module | Mapping[str, Tensor], hyper: Hyper | None = None) -> ModelFacts:
        """Read off a model, or named parameters, all that can be known before the first step.

        Args:
            params: a module, whose trainable parameters are to be planned, or parameters by name.
            hyper: learning rate, betas and weight decay.

        Returns:
            The facts.
        """
        if isinstance(params, nn.Module):
            named: dict[str, Tensor] = {canonical_name(name): param for name, param in params.named_parameters()}
            roles, splits = roles_of(params), splits_of(params)
            planned = {name: param for name, param in named.items() if param.requires_grad}
        else:
            named = planned = {canonical_name(name): param for name, param in params.items()}
            roles, splits = roles_by_place({name: real_shape(param) for name, param in named.items()}), {}
        device = next((param.device.type for param in named.values()), "cpu")
        facts = cls(
            shapes={name: real_shape(param) for name, param in planned.items()},
            roles=roles,
            regime=regime_of(named, roles) if has_norms(params) else GENERAL,
            device=device,
            operations_per_byte=OPERATIONS_PER_BYTE.get(device, OPERATIONS_PER_BYTE["cuda"]),
            low_precision=frozenset(name for name, param in planned.items() if param.dtype in LOW_PRECISION),
            splits={name: split for name, split in splits.items() if name in planned},
        )
        return facts if hyper is None else replace(facts, hyper=hyper)

    def plain(self) -> dict[str, Any]:
        """Return what a file needs to keep, as JSON values; shapes and hyper-parameters are kept elsewhere."""
        kept = {name: getattr(self, name) for name in ("regime", "tokens", "device", "operations_per_byte")}
        return kept | {
            "roles": {name: role.value for name, role in self.roles.items() if name in self.shapes},
            "splits": {name: split.plain() for name, split in self.splits.items() if name in self.shapes},
        }

    @classmethod
    def from_plain(cls, content: Mapping[str, Any], shapes: Mapping[str, Shape]) -> ModelFacts:
        """Read what :meth:`plain` wrote.

        Args:
            content: the values.
            shapes: the global shape of every parameter, by name.

        Returns:
            The facts.

        Raises:
            ValueError: it is damaged.
        """
        tokens, intensity = content["tokens"], content["operations_per_byte"]
        if tokens is not None and (type(tokens) is not int or tokens < 1):
            raise ValueError(f"{tokens!r} tokens")
        if type(intensity) not in (int, float) or not 0 < intensity < math.inf:
            raise ValueError(f"{intensity!r} operations per byte")
        if content["regime"] not in REGIMES or not isinstance(content["device"], str):
            raise ValueError(f"regime {content['regime']!r} on device {content['device']!r}")
        roles = {str(name): Role(role) for name, role in content["roles"].items()}
        splits = {str(name): Split.from_plain(split) for name, split in content.get("splits", {}).items()}
        facts = cls(shapes, roles, content["regime"], tokens, content["device"], float(intensity))
        return replace(facts, splits=splits)

    def renamed(self, names: Mapping[str, str]) -> ModelFacts:
        """Return these facts with other parameter names, but for shapes. Parameters without a new name are left out.

        Args:
            names: the new name of each parameter.
        """
        roles = {names[name]: role for name, role in self.roles.items() if name in names}
        return replace(self, roles=roles, splits={names[n]: split for n, split in self.splits.items() if n in names})

    def with_tokens(self, tokens: int | None) -> ModelFacts:
        """Return these facts with the tokens of a step, where some were counted.

        Args:
            tokens: their number; ``None`` keeps what is known.
        """
        return replace(self, tokens=tokens or self.tokens)

    def role(self, name: str) -> Role:
        """Return what a parameter is.

        Args:
            name: the name of the parameter.
        """
        return self.roles.get(name) or role_of(self.shapes[name], name)

    def planned_role(self, name: str) -> Role:
        """Return the role a parameter is planned by: tables that always keep fp32 state are planned like vectors.

        Args:
            name: the name of the parameter.
        """
        role, shape = self.role(name), self.shapes[name]
        is_exact = math.prod(shape) < SMALL_NUMEL and not fits(shape)
        return Role.VECTOR if role in (Role.EMBEDDING, Role.HEAD) and is_exact else role

    @property
    def hidden_numel(self) -> int:
        """Elements of hidden weights: those of the model without embeddings, heads and vectors."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if self.planned_role(name) in HIDDEN)

    def reference_bytes(self, *, per_rank: bool = False) -> int:
        """Return the state that AdamW16 would hold, on all ranks or on the one that holds most.

        Args:
            per_rank: count only what the rank with the most holds.
        """
        rows = self.rows if per_rank else {}
        return sum(BUDGET_REFERENCE.state_bytes(shape, rows=rows.get(name)) for name, shape in self.shapes.items())


@torch.no_grad()
def has_norms(params: nn.Module | Mapping[str, Tensor]) -> bool:
    """Return whether a model has normalization layers.

    Args:
        params: a module, whose layers tell by their class, or parameters by name. Of those, gains tell: vectors named
            ``weight``, or vectors of positive numbers if names are numbers.

    Example:
        >>> has_norms(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))), has_norms(nn.Linear(4, 4))
        (True, False)
        >>> has_norms({"0.0": torch.zeros(4), "0.1": torch.ones(4)}), has_norms({"0.0": torch.zeros(4)})
        (True, False)
    """
    if isinstance(params, nn.Module):
        return any(_NORM.search(type(module).__name__.lower()) for module in params.modules())
    vectors = {name: param.detach() for name, param in params.items() if param.dim() == 1 and param.numel() > 1}
    if any(has_letters(name) for name in vectors):
        return any(name.rpartition(".")[2] == "weight" for name in vectors)
    real = (first_rows(each, each.numel(), 1) for each in vectors.values() if each.device.type != "meta")
    return any(bool((each > 0).all()) for each in real)


@torch.no_grad()
def regime_of(params: Mapping[str, Tensor], roles: Mapping[str, Role]) -> str:
    """Return ``"finetune"`` if a model with normalization layers was trained before, else ``"scratch"``.

    Trained are norms whose gains are no longer all equal, or, where norms have no gains, matrices whose spectra are not
    those of random numbers.

    Example:
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
    """Whether it is a norm's gain. Biases do not count: torch initializes those of linear layers at random."""
    return param.dim() == 1 and param.numel() > 1 and roles.get(name) is Role.VECTOR and name.endswith("weight")


def _has_outlier(param: Tensor) -> bool:
    """Whether the largest singular value is beyond the edge of the Marchenko-Pastur law."""
    matrix = first_rows(param, _EDGE, _EDGE)
    if min(matrix.shape) < 16 or not bool(matrix.isfinite().all()):
        return False
    edge = float(matrix.std()) * (math.sqrt(matrix.shape[0]) + math.sqrt(matrix.shape[1]))
    return float(torch.linalg.matrix_norm(matrix, 2)) > _OUTLIER * edge


class TokenCounter:
    """Counts the tokens that pass through the hidden weights of a module, until :meth:`stop`.

    Only forward passes that build a graph count, so evaluations and recomputed passes do not. A copy starts with the
    same counts. It goes on with the modules that hold the copied weights.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 4))
        >>> counter = TokenCounter(model)
        >>> _ = model(torch.zeros(5, 3, 8))
        >>> counter.stop()
        15
    """

    def __init__(self, model: nn.Module) -> None:
        roles = roles_of(model)
        self._counts = _Counts()
        for path, module in model.named_modules():
            weight = getattr(module, "weight", None)
            role = roles.get(canonical_name(f"{path}.weight" if path else "weight"))
            if isinstance(weight, Tensor) and role in (Role.MATRIX, Role.CONVOLUTION):
                self._counts.by_module[module] = _Passed(weight.numel())
        self._start()

    def _start(self) -> None:
        # One hook for all modules of the process, none on the model: copies and scripted models must not have any.
        # torch warns that such hooks also see the wrapper of a compiled model. It has no weight, so it does not count.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        self._remove = weakref.finalize(self, register_module_forward_hook(self._counts.count).remove)

    def stop(self) -> int | None:
        """Stop counting and return the mean over all hidden weights; ``None`` if nothing was counted."""
        self._remove()
        seen = [passed for _, passed in self._counts.by_weight() if passed.tokens]
        weights = sum(each.weights for each in seen)
        return round(sum(each.weights * each.tokens for each in seen) / weights) if weights else None

    def __getstate__(self) -> dict[str, Any]:
        return {"by_weight": self._counts.by_weight(), "is_counting": self._remove.alive}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._counts = _Counts(copied=state["by_weight"])
        self._start()
        if not state["is_counting"]:
            self._remove()


@dataclass
class _Passed:
    """The elements of a weight, and the tokens that passed it."""

    weights: int
    tokens: int = 0


_ByWeight = list[tuple[nn.Parameter | None, _Passed]]


@dataclass
class _Counts:
    """What passed each module. It refers to modules weakly, because the hook of a process refers to it."""

    by_module: weakref.WeakKeyDictionary[nn.Module, _Passed] = field(default_factory=weakref.WeakKeyDictionary)
    copied: _ByWeight = field(default_factory=list)
    """Of a copy: counts of modules that it has not met yet. Only their weights are copied with an optimizer."""

    def by_weight(self) -> _ByWeight:
        met = [(_own_weight(module), passed) for module, passed in self.by_module.items()]
        return [*met, *self.copied]

    def count(self, module: nn.Module, inputs: object, output: object) -> None:
        if torch.compiler.is_compiling() or not isinstance(output, Tensor) or not output.requires_grad:
            return
        if (mine := self.by_module.get(module) or self._meet(module)) is not None:
            channels = output.shape[1] if isinstance(module, nn.modules.conv._ConvNd) else output.shape[-1]
            mine.tokens += output.numel() // max(1, channels)

    def _meet(self, module: nn.Module) -> _Passed | None:
        """Return the count of a module that holds a copied weight, and keep it by that module from now on."""
        held = _own_weight(module) if self.copied else None
        for index, (weight, passed) in enumerate(self.copied):
            if weight is held is not None:
                del self.copied[index]
                self.by_module[module] = passed
                return passed
        return None


def _own_weight(module: nn.Module) -> nn.Parameter | None:
    """Return a module's parameter ``weight``. An attribute of that name may be computed, by a parametrization."""
    return dict(module.named_parameters(recurse=False)).get("weight")

"""A recipe says how a model is updated: rules by role, and changes around them. ``Recipe()`` is the default plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

EDGES = "adamw[m=int8,v=factored]"


@dataclass(frozen=True)
class Recipe:
    """All that distinguishes two runs of one sibling and seed."""

    hidden: str = "muon-8"
    """The configuration of hidden matrices, or a prototype: ``soap``, ``soap-short``, ``soap-kl``."""
    edges: str = EDGES
    """The configuration of embeddings and the head."""
    embedding_lr: float = 4.0
    head_lr: float = 1.0
    vector_lr: float = 2.0
    momentum: float = 0.95
    final_momentum: float | None = None
    """Momentum falls to this in the last 40% of the run."""
    nesterov: bool = True
    rms: float = 1.0
    """Factor on the RMS of hidden matrices' updates."""
    beta2: float = 0.999
    weight_decay: float = 0.1
    cautious_decay: bool = False
    """Decay only where the update shrinks the weight as well."""
    constant_decay: bool = False
    """The same total decay, evenly over the run instead of in proportion to the learning rate."""
    ball: float = 0.0
    """Hyperball: hidden matrices keep their initial norm and move by this times lr, relative to it. 0: off."""
    variance: float = 0.0
    """AdaMuon: divide updates by the root of their elements' running mean square with this decay. 0: off."""
    look_ahead: float = 0.0
    """EMA-Nesterov: gradients at w + this * lr / max lr * (w - the mean of past w). 0: off."""
    look_memory: float = 0.99
    raw: bool = False
    """SOAP's own update lengths instead of an RMS of 0.4 lr."""
    coefficients: str = "you-jiacheng"
    """Of Newton-Schulz iterations: also ``polar-express``, ``muon``."""
    lr: float = 1.0
    """Factor on the sibling's learning rate."""
    batch: float = 1.0
    """Factor on the sibling's batch size."""
    split: bool = False
    """Fused matrices, such as ``c_attn``, are orthogonalized as the matrices that they are made of."""

    @property
    def key(self) -> str:
        """The fields that differ from the default, in words.

        >>> Recipe(hidden="spectral", rms=1.5).key
        'hidden=spectral rms=1.5'
        """
        changed = (f"{field.name}={_word(getattr(self, field.name))}" for field in fields(self) if self._differs(field))
        return " ".join(changed) or "default"

    def _differs(self, field: Any) -> bool:
        return bool(getattr(self, field.name) != field.default)

    @property
    def content(self) -> dict[str, Any]:
        return asdict(self)


def _word(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

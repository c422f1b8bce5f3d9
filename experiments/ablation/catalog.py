"""Which runs the ablation has: workloads, the roles that are swapped in each, and what they are swapped to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from baoc.planners import lr_multipliers
from experiments.methods.by_role import REST
from experiments.runs import Cell, RunOptions
from experiments.runs.batch import Job
from experiments.runs.summary import REFERENCE

Regime = Literal["scratch", "fine-tuning"]

_EDGES = (
    *("adamw[m=int8,v=factored]", "colnorm", "adamw[m=int4,v=factored]", "rownorm", "sinkhorn"),
    *("adamw[m=int8,v=row-mean]", "adamw[m=int4,v=row-mean]", "adafactor-32", "adamw-8"),
)
CONFIGURATIONS = {
    "hidden": (
        *("muon-8", "spectral", "adamw[m=int8,v=factored]", "muon-4", "adamw-8", "normuon-8"),
        *("adamw[m=int4,v=factored]", "normuon-4", "sinkhorn", "colnorm", "adafactor-32", "lion-8"),
    ),
    "embedding": _EDGES,
    "head": _EDGES,
    "hidden=muon-8; embedding": _EDGES,
    "hidden=muon-8; head": _EDGES,
}
"""By role, the most telling first. A role may be swapped where another has been: what is lost there may differ."""
_LONG = 400
FIRST = {"hidden": 5, "embedding": 3, "head": 3, "hidden=muon-8; embedding": 3, "hidden=muon-8; head": 3}
"""How many of them all workloads get before any gets the others."""
OF_BLOCKS = ("spectral", "colnorm")
"""What single blocks are swapped to: what does most good to hidden matrices for no state, and what does most harm."""


@dataclass(frozen=True)
class Setting:
    """A workload, and what is swapped in it."""

    workload: str
    steps: int
    roles: tuple[str, ...] = ("hidden", "embedding", "hidden=muon-8; embedding")
    lr_factor: float = 1.0
    """The best for AdamW32."""
    batch_size: int | None = None
    regime: Regime = "scratch"
    is_fitted: bool = True
    """What is learned from it is used; if not, it is what that is checked with."""
    blocks: tuple[str, ...] = ()
    """Parameters that are swapped one at a time too."""

    @property
    def label(self) -> str:
        """Tells it from a longer or a shorter one of the same workload."""
        return f"{self.workload}, {self.steps} steps" if self.steps >= _LONG or not self.roles else self.workload

    def cell(self, method: str, seed: int) -> Cell:
        return Cell(self.workload, method, seed, self.lr_factor, self.steps)


def swap(setting: Setting, place: str, configuration: str) -> str:
    """The method that gives a role or a block a configuration, at the learning rate that a plan would give it.

    >>> swap(SETTINGS[0], "hidden=muon-8; embedding", "colnorm")
    'hidden=muon-8; embedding=colnorm x4'
    """
    return f"{place}={configuration}{_factor(setting, place)}"


def base_of(setting: Setting, place: str) -> str:
    """The method that a swap is compared with: AdamW32, at the same learning rate.

    >>> base_of(SETTINGS[0], "embedding"), base_of(SETTINGS[1], "hidden=muon-8; embedding")
    ('embedding=adamw-32 x4', 'hidden=muon-8')
    """
    if _factor(setting, place):
        return swap(setting, place, REST)
    return place.rpartition(";")[0] or REFERENCE


def _factor(setting: Setting, place: str) -> str:
    is_table = setting.regime == "scratch" and place.rpartition("; ")[2] == "embedding"
    return f" x{lr_multipliers.TABLE:g}" if is_table else ""


def _blocks(template: str, *chosen: tuple[int, str]) -> tuple[str, ...]:
    return tuple(template.format(layer=layer, kind=kind) for layer, kind in chosen)


SETTINGS = (
    Setting("gpt-small/alpaca", 120),
    Setting("gpt-small/alpaca-gsm8k", 100, regime="fine-tuning"),
    Setting("llama-small/gsm8k", 120),
    Setting("gpt-small-untied/alpaca", 120, roles=("head", "hidden=muon-8; head")),
    Setting("vit-small/cifar10", 150, roles=("hidden",)),
    Setting("vit-small/cifar10-classes", 100, roles=("hidden",), regime="fine-tuning", is_fitted=False),
    Setting("t5-small/gsm8k", 100, is_fitted=False),
    Setting("unet-small/cifar10", 60, roles=("hidden",), lr_factor=2.0, batch_size=4),
    # what momentum is worth shows late
    Setting("gpt-small/alpaca", 400, roles=("hidden",)),
    Setting("llama-small/gsm8k", 400, roles=("hidden",)),
    # many runs, so short ones
    Setting(
        "gpt-small/alpaca",
        60,
        roles=(),
        blocks=_blocks(
            "transformer.h.{layer}.{kind}.weight",
            *((layer, kind) for layer in (0, 3) for kind in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
            *((1, "attn.c_attn"), (1, "mlp.c_proj"), (2, "attn.c_proj"), (2, "mlp.c_fc")),
        ),
    ),
    Setting(
        "llama-small/gsm8k",
        60,
        roles=(),
        blocks=_blocks(
            "model.layers.{layer}.{kind}.weight",
            *((layer, f"self_attn.{kind}_proj") for layer in (0, 3) for kind in "qvo"),
            *((layer, f"mlp.{kind}_proj") for layer in (0, 3) for kind in ("gate", "down")),
            *((1, "self_attn.k_proj"), (2, "mlp.up_proj")),
        ),
    ),
)


def role_jobs(settings: Sequence[Setting], seed: int, options: RunOptions, *, is_first: bool) -> Iterator[Job]:
    """Swaps of whole roles, the most telling or the others, and what they are compared with."""
    for setting in settings:
        swaps = [swap(setting, role, name) for role in setting.roles for name in _part(role, is_first)]
        bases = [base_of(setting, role) for role in setting.roles]
        yield from (_job(setting, method, seed, options) for method in (REFERENCE, *bases, *swaps))


def block_jobs(settings: Sequence[Setting], seed: int, options: RunOptions) -> Iterator[Job]:
    """AdamW32 and every swap of a single block."""
    for setting in settings:
        swaps = [f"{block}={name}" for name in OF_BLOCKS for block in setting.blocks]
        yield from (_job(setting, method, seed, options) for method in ((REFERENCE, *swaps) if swaps else ()))


PARTS = ("roles", "blocks", "others")
"""The most telling swaps of roles, single blocks, and all other swaps of roles: in this order, each seed by seed."""


def jobs(settings: Sequence[Setting], seeds: int, options: RunOptions, parts: Sequence[str] = PARTS) -> Iterator[Job]:
    """Those of some parts, in order."""
    for part in (part for part in PARTS if part in parts):
        for seed in range(seeds):
            if part == "blocks":
                yield from block_jobs(settings, seed, options)
            else:
                yield from role_jobs(settings, seed, options, is_first=part == "roles")


def _part(role: str, is_first: bool) -> tuple[str, ...]:
    return CONFIGURATIONS[role][: FIRST[role]] if is_first else CONFIGURATIONS[role][FIRST[role] :]


def _job(setting: Setting, method: str, seed: int, options: RunOptions) -> Job:
    size = options.workload.batch_size or setting.batch_size
    return Job(setting.cell(method, seed), replace(options, workload=replace(options.workload, batch_size=size)))

"""The paper's experiments as tables: which workloads, methods and variants each has by default.

Each is a command, ``python -m experiments NAME``.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments import methods
from experiments.runs import variants

LANGUAGE = ("gpt-small/embedded", "t5-small/embedded")
VISION = ("vit-small/digits",)
DIFFUSION = ("unet-small/digits",)

BUDGETS = (0.1, 0.25, 0.4, 0.5, 0.75, 1.0)
STATES = (
    "adamw32",
    *(f"{name} else adamw[m=int8,v=factored]" for name in ("muon-8", "normuon-8")),
    "muon-4 else adamw[m=int4,v=factored]",
    "spectral else adamw[m=int8,v=factored]",
    "spectral else colnorm else adamw-32",
    *("adamw-8", "adamw[m=int8,v=factored]", "adamw[m=int4,v=factored]", "lion-8"),
    *(f"{name} else adamw-32" for name in ("sinkhorn", "colnorm", "sinkhorn-8", "colnorm-8")),
    *("adamw[m=int8,v=row-mean]", "adamw[m=int8,v=col-mean]"),
    *("muon-32 else adamw-32", "rownorm else adamw-32", "lion-4"),
)
"""The most telling first, for a run that is stopped early."""
PEERS = ("adamw8-torchao", "adamw8-bitsandbytes")
"""Others' builds of AdamW8: they answer whether ours is a fair baseline, and are slow on CPUs."""


@dataclass(frozen=True)
class Experiment:
    """One section of the paper."""

    name: str
    title: str
    summary: str
    """For the command line."""
    workloads: tuple[str, ...]
    methods: tuple[str, ...]
    columns: tuple[str, ...]
    """Of its table, by their names in :mod:`experiments.runs.tables`."""
    variants: tuple[str, ...] = ()
    """Besides the default; at the learning rate that is best for the default, so that one thing changes at a time."""
    one_lr: bool = False
    """All methods are also trained at the learning rate that is best for AdamW32, before any seeks its own."""
    longer: int = 1
    """Times the workload's own number of steps."""
    figure: str | None = None  # "trade-off" or "sweep"


_ALL = (
    Experiment(
        "fixed-budget",
        "Fixed-budget allocation",
        "all methods, BAOC at half of AdamW16's state",
        (*LANGUAGE, "llama-small/embedded", *VISION, *DIFFUSION),
        tuple(name for name in methods.names() if name not in PEERS),
        columns=("state", "share", "loss", "time", "train", "test", "against"),
        figure="trade-off",
    ),
    Experiment(
        "sweep",
        "Memory-budget sweep",
        "BAOC and two heuristics over many budgets",
        (*VISION, *DIFFUSION, LANGUAGE[0]),
        (
            *(f"{family}@{share:g}" for family in ("baoc", "baoc-paper", "by-type", "by-size") for share in BUDGETS),
            *("adamw32", "adamw16", "adamw8", "adafactor"),
        ),
        columns=("state", "share", "loss", "train", "test", "against", "time"),
        figure="sweep",
    ),
    Experiment(
        "long",
        "Longer schedule, with hybrid optimizers",
        "a longer schedule, with Muon, COSMOS and SPAM",
        LANGUAGE,
        ("muon", "cosmos", "spam", "adam-mini", "adamw16", "adamw32", "baoc@0.5"),
        columns=("test", "against", "time", "state"),
        longer=4,
        figure="trade-off",
    ),
    Experiment(
        "diagnostics",
        "One setting of BAOC changed at a time",
        "BAOC with one setting changed at a time",
        (*VISION, LANGUAGE[0]),
        ("baoc-paper@0.5",),
        columns=("state", "loss", "train", "test", "time", "peak", "moved"),
        variants=tuple(variants.DIAGNOSTICS),
    ),
    Experiment(
        "partition",
        "How parameters are cut into blocks",
        "BAOC with other ways to cut blocks",
        LANGUAGE,
        ("baoc-paper@0.5",),
        columns=("blocks", "state", "loss", "test", "moved"),
        variants=tuple(variants.PARTITION),
    ),
    Experiment(
        "online",
        "Planning anew during training, with and without inheriting state",
        "planning anew during training, with and without inheriting state",
        (*VISION, LANGUAGE[0]),
        ("baoc-paper@0.5",),
        columns=("state", "loss", "test", "time", "peak"),
        variants=tuple(variants.ONLINE),
    ),
    Experiment(
        "states",
        "What a byte of state is worth",
        "one configuration for all, at AdamW32's learning rate and at its own",
        (*LANGUAGE[:1], "llama-small/embedded", *VISION, *DIFFUSION),
        STATES,
        columns=("state", "share", "loss", "train", "test", "against", "step"),
        one_lr=True,
    ),
)
EXPERIMENTS = {experiment.name: experiment for experiment in _ALL}

"""The paper's experiments as tables: which workloads, methods and variants each has by default.

``python -m experiments paper NAME`` runs one of :data:`PAPER`, at one of two scales. ``states`` is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from experiments.runs import variants

SMALL, FULL = SCALES = ("small", "paper")

STAND_INS = {"alpaca": "embedded", "gsm8k": "embedded", "cifar10": "digits"}
"""What is trained at the small scale where no data folder is given."""

BUDGETS = (0.3, 0.4, 0.5, 0.55, 0.6, 0.7, 0.8, 1.0, 1.2)
"""The paper's values of rho."""
OURS = ("baoc-paper@0.5", "baoc@0.5")
BASELINES = (
    *("adamw16", "adamw8", "adafactor", "adam-mini", "galore-adamw8", "galore-adamw32", "galore-adafactor", "spam"),
    *("by-type@0.5", "by-size@0.5"),
)
"""The last two stand for the paper's Heu-1 and Heu-2, which it does not define."""
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


@dataclass(frozen=True)
class Experiment:
    """One section of the paper."""

    name: str
    title: str
    summary: str
    """For the command line."""
    workloads: Mapping[str, tuple[str, ...]]
    """By scale."""
    methods: tuple[str, ...]
    columns: tuple[str, ...]
    """Of its table, by their names in :mod:`experiments.runs.tables`."""
    variants: tuple[str, ...] = ()
    """Of the paper's planner, besides the default; at the learning rate that is best for the default, so that one thing
    changes at a time."""
    more_variants: tuple[str, ...] = ()
    """What ``--variant`` takes besides these."""
    skips_same_plan: bool = False
    """A variant whose plan is the default's is not trained again."""
    reference: str = "adamw16"
    """What everything is compared with, seed by seed."""
    one_lr: bool = False
    """All methods are also trained at the learning rate that is best for the reference, before any seeks its own."""
    longer: int = 1
    """Times the workload's own number of steps, at the small scale."""
    epochs: Mapping[str, int] = field(default_factory=dict)
    """By size, at the paper's scale."""
    figure: str | None = None  # "trade-off" or "sweep"


def _on(sizes: tuple[str, ...], *datasets: str) -> tuple[str, ...]:
    return tuple(f"{size}/{dataset}" for size in sizes for dataset in datasets)


_TEXTS = ("alpaca", "gsm8k")
_GPT_AND_T5 = {SMALL: _on(("gpt-small", "t5-small"), *_TEXTS), FULL: _on(("gpt2", "t5-base"), *_TEXTS)}
_VIT_AND_GPT = {SMALL: ("vit-small/cifar10", "gpt-small/gsm8k"), FULL: ("vit/cifar10", "gpt2/gsm8k")}

_PAPER = (
    Experiment(
        "exp1",
        "Experiment 1: fixed budget",
        "all methods, BAOC at half of AdamW16's state",
        {
            SMALL: (*_on(("llama-small", "t5-small"), *_TEXTS),),
            FULL: (*_on(("llama3.2-1b", "llama3.2-3b", "t5-base"), *_TEXTS),),
        },
        (*BASELINES, *OURS),
        columns=("state", "loss", "time", "train", "test", "peak", "against"),
        figure="trade-off",
    ),
    Experiment(
        "exp2",
        "Experiment 2: budget sweep",
        "BAOC over the paper's nine budgets, with all baselines",
        {
            SMALL: ("vit-small/cifar10", "unet-small/cifar10", *_on(("gpt-small",), *_TEXTS)),
            FULL: ("vit/cifar10", "vit/imagenet", "unet/cifar10", *_on(("gpt2",), *_TEXTS)),
        },
        (*BASELINES, *(f"{family}@{share:g}" for family in ("baoc-paper", "baoc") for share in BUDGETS)),
        columns=("state", "loss", "train", "test", "time", "peak", "against"),
        figure="sweep",
    ),
    Experiment(
        "exp3",
        "Experiment 3: longer schedule",
        "a longer schedule, with Muon and COSMOS",
        _GPT_AND_T5,
        ("muon", "cosmos", "adam-mini", "adamw16", *OURS),
        columns=("test", "minutes", "state", "peak", "against"),
        longer=4,
        epochs={"gpt2": 200, "t5-base": 100},
        figure="trade-off",
    ),
    Experiment(
        "diagnostics",
        "Sampling ratio, gamma and human constraints",
        "sampling ratios, gamma, a preference for AdamW, and no SGD",
        {
            SMALL: ("vit-small/cifar10", "unet-small/cifar10", "gpt-small/gsm8k", "t5-small/gsm8k"),
            FULL: ("vit/cifar10", "unet/cifar10", "gpt2/gsm8k", "t5-base/gsm8k"),
        },
        ("adamw16", *OURS),
        columns=("state", "loss", "train", "test", "time", "peak", "moved"),
        variants=tuple(variants.DIAGNOSTICS),
        more_variants=tuple(variants.OPEN),
        skips_same_plan=True,
    ),
    Experiment(
        "anchors",
        "Anchor perturbation",
        "anisotropy anchors moved by 10 and 20%",
        _VIT_AND_GPT,
        ("adamw16", *OURS),
        columns=("loss", "test", "peak", "moved"),
        variants=tuple(variants.ANCHORS),
        skips_same_plan=True,
    ),
    Experiment(
        "partition",
        "Block partitioning",
        "other ways to cut a model into blocks",
        _GPT_AND_T5,
        ("adamw16", *OURS),
        columns=("test", "blocks", "state", "loss", "moved"),
        variants=tuple(variants.PARTITION),
        skips_same_plan=True,
    ),
    Experiment(
        "online",
        "Online reallocation",
        "planning again during training, with and without inherited state",
        _VIT_AND_GPT,
        ("adamw16", *OURS),
        columns=("loss", "test", "peak", "state", "largest", "time"),
        variants=tuple(variants.ONLINE),
    ),
)
PAPER = {experiment.name: experiment for experiment in _PAPER}
STATES_EXPERIMENT = Experiment(
    "states",
    "What a byte of state is worth",
    "one configuration for all, at AdamW32's learning rate and at its own",
    {SMALL: ("gpt-small/embedded", "llama-small/embedded", "vit-small/digits", "unet-small/digits")},
    STATES,
    columns=("state", "share", "loss", "train", "test", "against", "step"),
    reference="adamw32",
    one_lr=True,
)
EXPERIMENTS = {**PAPER, STATES_EXPERIMENT.name: STATES_EXPERIMENT}

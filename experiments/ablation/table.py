r"""The effect table that ships with the package, from the runs of the ablation and of the zoo.

    python -m experiments.ablation.table docs/results/ablation --zoo docs/results/zoo \
        --output src/baoc/planners/effects.json

Embeddings and heads count with what they did beside hidden weights that have Muon, where such runs are there: that is
where plans put them, and there they matter more. Of runs of different lengths the longest count. Workloads that are
kept for checks do not.

The zoo has what the ablation does not: models without normalization layers (the regime "general") and real pretrained
weights. Of formats of AdamW, a factor of 1.5 counts as 2% where scores span decades, as in the zoo's own rule of what
is a loss, and no task as more than 20%: one that goes to rounding errors must not decide. Of rules without state, where
large ratios are the rule, a ratio counts as its logarithm, and as a factor of e at most.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from baoc import Configuration, parse
from baoc.core.roles import Role
from baoc.planners.effect_table import OF_SMALL_MODELS, Difference, EffectTable, table_of
from baoc.planners.model_facts import GENERAL
from experiments.ablation.catalog import CONFIGURATIONS, SETTINGS, Setting
from experiments.ablation.effects import Effect, Effects
from experiments.runs import Row, Store
from experiments.zoo.catalog import TASKS
from experiments.zoo.results import PERCENT, RATIO
from experiments.zoo.training import BUDGETED, FLOOR, REFERENCE

ROLES = {"embedding": Role.EMBEDDING, "head": Role.HEAD}
_REGIMES = {"scratch": "scratch", "fine-tuning": "finetune"}
_BESIDE_MUON = "hidden=muon-8; "
_ADAFACTOR = "adafactor"
_ANY_MATRIX = (64, 64)
_MOST_ADAMW, _MOST = 20.0, 100.0  # percent


def table(
    rows: Iterable[Row], zoo: Iterable[Row] = (), settings: Sequence[Setting] = SETTINGS, provenance: str = ""
) -> EffectTable:
    """What the runs of the settings that are fitted, and of the zoo, say."""
    return table_of([*differences(rows, settings), *zoo_differences(zoo)], provenance)


def differences(rows: Iterable[Row], settings: Sequence[Setting] = SETTINGS) -> Iterator[Difference]:
    """One for each run and its twin, under roles as plans have them."""
    effects = Effects(rows)
    best: dict[tuple[str, str, str], tuple[tuple[bool, int], Setting, Effect]] = {}
    for setting in (each for each in settings if each.is_fitted):
        for place in setting.roles:
            for name in CONFIGURATIONS[place]:
                effect = effects.of(setting, place, name)
                if effect is None or name.startswith(_ADAFACTOR):  # its length is not AdamW's
                    continue
                key, rank = (setting.workload, place.removeprefix(_BESIDE_MUON), name), (";" in place, setting.steps)
                if key not in best or rank > best[key][0]:
                    best[key] = rank, setting, effect
    for (workload, place, name), (_, setting, effect) in best.items():
        if is_left_out(_REGIMES[setting.regime], parse(name)):
            continue
        for percent in effect.differences.values():
            yield Difference(_REGIMES[setting.regime], _role(setting, place), parse(name), workload, percent)


def is_left_out(regime: str, configuration: Configuration) -> bool:
    """Whether plans must not use a configuration, whatever the runs here say.

    Muon is not used on pretrained weights. Others report that it ends behind AdamW in full fine-tuning of models of
    seven billion parameters that AdamW pretrained: GSM8K 57.4 against 61.7 (https://arxiv.org/abs/2605.10468), 85.8
    against 89.8 (https://github.com/MoonshotAI/Moonlight). Models that we can train are too small to say otherwise.
    """
    return regime == "finetune" and configuration.mechanism_name == "muon"


def zoo_differences(rows: Iterable[Row]) -> Iterator[Difference]:
    """One for each task and configuration, filed under the role with the most elements, and hidden weights."""
    rows = list(rows)
    reference = {row["key"]: row["score"] for row in rows if row["method"] == REFERENCE}
    for row in rows:
        if row["method"] == REFERENCE or row["method"].startswith(BUDGETED) or row["error"]:
            continue
        if is_left_out(row["regime"], parse(row["method"])) or row["method"] in OF_SMALL_MODELS:
            continue
        configuration, base = parse(row["method"]), reference[row["key"].replace(row["method"], REFERENCE)]
        role = Role(row["role"])
        if configuration.otherwise and configuration.suited(_ANY_MATRIX, role).mechanism_name == "adamw":
            role = Role.MATRIX  # the rule of hidden weights makes the difference
        ratio = math.inf if row["score"] is None else max(row["score"], FLOOR) / max(base, FLOOR)
        found = configuration.suited(_ANY_MATRIX, role)
        most = _MOST_ADAMW if found.slots else _MOST
        unit = PERCENT / math.log(RATIO) if TASKS[row["task"]].decades and found.slots else 100.0
        percent = max(-most, min(most, unit * math.log(ratio)))
        # a configuration for all weights changes hidden weights too: all models but those of "general" have some
        roles = {role} if configuration.otherwise or row["regime"] == GENERAL else {role, Role.MATRIX}
        for each in sorted(roles, key=lambda one: one.value):
            yield Difference(row["regime"], each, found, row["task"], percent)


def _role(setting: Setting, place: str) -> Role:
    """Hidden weights are convolutions where most of them are."""
    if place == "hidden":
        return Role.CONVOLUTION if setting.workload.startswith("unet") else Role.MATRIX
    return ROLES[place]


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="DIR", type=Path, help="OUTPUT of `python -m experiments ablation`")
    parser.add_argument("--zoo", metavar="DIR", type=Path, required=True, help="OUTPUT of `python -m experiments zoo`")
    parser.add_argument("--output", metavar="FILE", type=Path, required=True, help="where the table goes")
    args = parser.parse_args(argv)
    rows = Store(args.runs, must_exist=True).rows
    zoo = [row for row in Store(args.zoo, must_exist=True).rows if not row["method"].startswith(BUDGETED)]
    command = f"python -m experiments.ablation.table {args.runs} --zoo {args.zoo} --output {args.output}"
    count = f"{len(rows)} runs of the ablation, {sum(row['method'] != REFERENCE for row in zoo)} of the zoo"
    made = table(rows, zoo, provenance=f"{command}; {count}")
    made.save(args.output)
    print(f"saved {args.output}, from {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

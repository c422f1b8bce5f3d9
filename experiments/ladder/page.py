"""The page of the ladder: how AdamW32 was tuned, and every recipe beside it on every rung."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean

import numpy as np

from experiments.ladder.catalog import BETA2, DECAY, FIRST, LADDER, MOST_SEEDS, Recipe, Rung
from experiments.ladder.running import BASELINE, FACTOR, Found, Ladder, climbed
from experiments.runs import markdown

ABOUT = """\
Llamas of four layers on the bytes of enwik8 (90, 5 and 5 MB; sequences of 128), trained from scratch. N is the number
of parameters without embeddings and head, D/N the tokens per parameter, and 2k or 8k the tokens of a step. Warm-up of
at most 30 steps, cosine to a tenth, clipping at 1. A learning rate is a factor on 4e-3. On the first rung, searches
for AdamW32 go on in factors of {factor:g} until the best one by validation loss is inside. Other searches start there,
or from the best of a rung with as many steps, and try up to two more values, on large rungs none. Weight decay is
independent of the learning rate: 0.1 means 0.1 x 4e-3 of a weight per step, times the schedule.

AdamW32 is tuned on {first}, one setting after another: learning rate, beta2 ({beta2}), decay
({decay}), learning-rate multipliers. The others have its betas, decay and multipliers, and their own learning rate;
formats of one rule share it. *Plain* AdamW32 has beta2 0.999, decay 0.1 and no multipliers, at its own best learning
rate. Changes are means over the seeds that both have."""
RATIO = """\
*Steps* is the number of steps to the loss of the tuned AdamW32, as a share of AdamW32's steps: from the losses of the
tuned AdamW32 of that size and batch at several D/N, interpolated in log(loss) over log(steps). It needs two lengths."""


def text(ladder: Ladder, command: str) -> str:
    """Return the page of the runs that are there."""
    found = climbed(ladder, LADDER)
    about = ABOUT.format(
        factor=FACTOR,
        first=FIRST.label,
        beta2=", ".join(f"{value:g}" for value in BETA2),
        decay=", ".join(f"{value:g}" for value in DECAY),
    )
    parts = ["# A ladder of sizes and lengths", "", about, "", f"Made by `{command}`.", "", "## AdamW32's settings", ""]
    parts += [
        *_tuning(ladder),
        "",
        "## Every rung",
        "",
        RATIO,
        "",
        *_rungs(ladder, found),
        "",
        *_missing(ladder, found),
    ]
    return "\n".join([*parts, ""])


def _tuning(ladder: Ladder) -> list[str]:
    best, lr = ladder.tuned()
    rows = []
    for row in ladder.stores[FIRST.folder].rows:
        is_adamw = row["method"].startswith("hidden=adamw-32;") and row["workload"] == f"llama-{FIRST.size}/enwik8"
        if is_adamw and row["steps"] == FIRST.steps and row["seed"] == 0:
            loss = row["validation_loss"]
            settings = row["method"].removeprefix("hidden=adamw-32; ")
            rows.append([f"`{settings}`", f"x{row['lr_factor']:g}", "diverged" if loss is None else f"{loss:.4f}"])
    chosen = (
        f"beta2 {best.beta2:g}, decay {best.decay:g}, multipliers {'on' if best.multipliers else 'off'}, lr x{lr:g}"
    )
    table = markdown.table(["Embeddings, head, vectors and settings", "lr", "Validation loss"], rows, numbers=True)
    return [*table, "", f"Best so far: {chosen}."]


def _rungs(ladder: Ladder, found: Found) -> list[str]:
    header = ["Rung", "Steps of a run", "Recipe", "lr", "Seeds", "Test loss", "AdamW32 (%)", "Steps"]
    rows = []
    for rung in sorted(found, key=lambda rung: (rung.parameters, rung.ratio, rung.batch)):
        for name, made in found[rung].items():
            losses = test_losses(ladder, rung, *made)
            if losses:
                loss, change = mean(losses.values()), _change(ladder, found, rung, name)
                share = _steps(ladder, found, rung, loss)
                where = [rung.label, str(rung.steps), name, f"x{made[1]:g}", str(len(losses)), f"{loss:.4f}"]
                rows.append(
                    [*where, "" if change is None else f"{change:+.2f}", "" if share is None else f"{share:.2f}"]
                )
    return markdown.table(header, rows)


def changes(ladder: Ladder, found: Found, name: str) -> dict[Rung, float]:
    """Return the change of the test loss against the tuned AdamW32 in percent, by rung."""
    known = {rung: _change(ladder, found, rung, name) for rung in found}
    return {rung: change for rung, change in known.items() if change is not None}


def _change(ladder: Ladder, found: Found, rung: Rung, name: str) -> float | None:
    """Return a change of the test loss in percent: the mean over the seeds that both have."""
    if name not in found[rung] or BASELINE not in found[rung]:
        return None
    ours, base = (test_losses(ladder, rung, *found[rung][each]) for each in (name, BASELINE))
    both = [100 * (ours[seed] / base[seed] - 1) for seed in ours if seed in base]
    return mean(both) if both else None


def test_losses(ladder: Ladder, rung: Rung, recipe: Recipe, factor: float) -> dict[int, float]:
    """Return the test losses of finished runs by seed."""
    losses = {seed: ladder.loss(rung, recipe, factor, seed, "test") for seed in range(MOST_SEEDS)}
    return {seed: loss for seed, loss in losses.items() if math.isfinite(loss)}


def _steps(ladder: Ladder, found: Found, rung: Rung, loss: float) -> float | None:
    """Return this rung's steps as a share of those that the tuned AdamW32 needs for a loss; None if it is unknown."""
    alike = [other for other in found if (other.size, other.batch) == (rung.size, rung.batch)]
    losses = {
        other.steps: test_losses(ladder, other, *found[other][BASELINE]) for other in alike if BASELINE in found[other]
    }
    known = {steps: mean(values.values()) for steps, values in sorted(losses.items()) if values}
    return share_of_steps(rung.steps, loss, list(known), list(known.values()))


def share_of_steps(steps: int, loss: float, lengths: Sequence[int], losses: Sequence[float]) -> float | None:
    """Return steps as a share of those that another needs for a loss, given its losses at several lengths.

    Example:
        >>> round(share_of_steps(100, 1.0, [100, 400], [2.0, 1.0]), 2)
        0.25
    """
    if len(lengths) < 2:
        return None
    slope, offset = np.polyfit(np.log(lengths), np.log(losses), 1)
    return None if slope >= 0 else steps / math.exp((math.log(loss) - offset) / slope)


def _missing(ladder: Ladder, found: Found) -> list[str]:
    lacking = [
        rung.label
        for rung, made in found.items()
        if not all(test_losses(ladder, rung, *each) for each in made.values())
    ]
    return [f"Not trained, or only in part: {'; '.join(lacking)}."] if lacking else []

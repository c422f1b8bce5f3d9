"""The demo's command line: train, then say in a table, a plan and a picture what came out."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import baoc
from baoc.core.text import human_bytes, human_count, table
from baoc.tools.cli.common import at_least
from baoc.tools.cli.parser import Parser
from baoc.tools.report.frontier import FORMATS
from experiments import corpus as corpora
from experiments import demo
from experiments.demo.display import Display
from experiments.demo.picture import draw
from experiments.demo.training import METHODS, Run, adamw16, train_once
from experiments.runs.figures import can_draw

_SHOWN_PLAN = "BAOC memory=0.25"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    folder = args.output.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"cannot make the folder {str(folder)!r}: {error.strerror}")
    if not os.access(folder, os.W_OK):
        parser.error(f"cannot write to the folder {str(folder)!r}")
    try:
        _run(args.steps, args.seeds, args.output)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m experiments.demo", description=(demo.__doc__ or "").partition("\n")[0])
    number = partial(at_least, 1)
    parser.add_argument("--steps", metavar="N", type=number, default=200, help="of each run (default: %(default)s)")
    parser.add_argument(
        "--seeds", metavar="N", type=number, default=3, help="runs per optimizer (default: %(default)s)"
    )
    parser.add_argument(
        "--output", metavar="FILE", type=_picture, default="results/demo.png", help="the picture (default: %(default)s)"
    )
    return parser


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix.lower() not in FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a picture: its name must end in {', '.join(FORMATS)}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder")
    return path


def _run(steps: int, seeds: int, output: Path) -> None:
    corpus = corpora.load()
    reference = adamw16(corpus)
    print(
        f"A GPT of {human_count(reference.numel)} parameters learns Python's language reference.\n"
        f"{len(METHODS)} optimizers, {seeds} x {steps} steps each; "
        f"16-bit AdamW would hold {human_bytes(reference.state_bytes)} of state.\n",
        flush=True,
    )
    if not can_draw():
        print("There will be no picture: it needs matplotlib, pip install -e '.[plot]'.\n", file=sys.stderr)
    results: dict[str, list[Run]] = {name: [] for name in METHODS}
    with Display(METHODS, steps=steps, seeds=seeds, reference=reference.state_bytes, stream=sys.stderr) as display:
        for seed in range(seeds):
            for name, runs in results.items():
                runs.append(train_once(corpus, name, seed=seed, steps=steps, on_step=display.begin(name, seed)))
    print(f"\n{_table(results, reference)}")
    print(f"\nThe plan of {_SHOWN_PLAN}, seed 0:\n\n{results[_SHOWN_PLAN][0].plan}\n")
    if can_draw():
        draw(results, reference.state_bytes, output)
        print(f"The picture is in {output}.")
    print("Next, in your own training: optimizer = baoc.BAOC(model, lr=..., memory=0.25)")


def _table(results: dict[str, list[Run]], reference: baoc.Block) -> str:
    header = ["optimizer", "state", "of AdamW16", "test loss", "time per run"]
    rows = []
    for name, runs in results.items():
        held = max(run.state_bytes for run in runs)
        losses = [run.test_loss for run in runs]
        spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
        rows.append(
            [
                name,
                human_bytes(held),
                f"{held / reference.state_bytes:.0%}",
                f"{statistics.mean(losses):.3f}{spread}",
                f"{statistics.mean(run.seconds for run in runs):.1f} s",
            ]
        )
    return table(header, rows, right=header[1:])


if __name__ == "__main__":
    sys.exit(main())

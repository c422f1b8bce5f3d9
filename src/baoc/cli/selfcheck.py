"""``baoc selfcheck``: whether the GPU kernels are right on this machine, and how fast they are."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from baoc.cli import common, screen

SUMMARY = "whether the GPU kernels are right on this machine, and how fast"

DESCRIPTION = """\
Compare the Triton kernels on a GPU with the reference on the CPU, for every
configuration, dtype and kind of row, and time steps beside torch's fused AdamW,
torchao and bitsandbytes where they are installed. Some minutes, most of them
compiling. The JSON is what to paste into an issue. Ends with exit code 1 if a
comparison fails."""

EXAMPLES = """\
examples:
  baoc selfcheck --output selfcheck.json
  TRITON_INTERPRET=1 baoc selfcheck --device cpu --tiny   # without a GPU"""


def register(commands: common.Commands) -> None:
    """Add the command to the parser of ``baoc``."""
    parser = common.add_parser(commands, "selfcheck", SUMMARY, DESCRIPTION, EXAMPLES)
    parser.add_argument("--device", type=common.device, default="cuda", help="default: cuda")
    parser.add_argument("--tiny", action="store_true", help="few configurations, small tensors")
    parser.add_argument("--no-times", action="store_true", help="compare only")
    parser.add_argument("--output", metavar="FILE", help="write the JSON here")
    common.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the tables, or the JSON."""
    import torch

    from baoc.optim.kernels import triton

    device = torch.device(args.device)
    obstacle = triton.obstacle(device)
    if obstacle is None and device.type == "cuda" and not torch.cuda.is_available():
        obstacle = "torch finds no GPU here; TRITON_INTERPRET=1 and --device cpu would check a tiny case without one"
    if obstacle:
        raise common.UsageError(f"cannot check {device}: {obstacle}.")
    common.check_writable(args.output)
    from baoc.selfcheck import check

    with screen.Progress("selfcheck", "part") as progress:
        report = check(device, tiny=args.tiny, times=not args.no_times, on_part=progress)
    text = json.dumps(report.content(), indent=2)
    if args.json:
        print(text)
    else:
        screen.show(str(report))
    if args.output:
        Path(args.output).write_text(text + "\n")
    if not report.passed:
        sys.exit(1)

"""The few lines that a person sees without asking."""

from __future__ import annotations

import logging
import os
import sys

import torch.distributed as dist

logger = logging.getLogger("baoc")

QUIET = "BAOC_QUIET"


def notice(message: str, *, quiet: bool = False) -> None:
    """Say something once that matters to whoever started the run, on the first rank only.

    It is an INFO record of the logger ``baoc``. Where nobody has set up logging, such a record is seen by no one, so
    the line then goes to stderr; ``quiet``, or ``BAOC_QUIET=1`` in the environment, keeps it from there.
    """
    if not is_first_rank():
        return
    logger.info(message)
    if not quiet and os.environ.get(QUIET, "0") in ("", "0") and not logger.hasHandlers():
        print(f"baoc: {message}", file=sys.stderr)


def is_first_rank() -> bool:
    """Whether this process speaks for all: the first rank, or the only process there is."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") in ("", "0")  # torchrun's, before ranks have met

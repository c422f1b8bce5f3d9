"""The paper's experiments: which runs each has, one run, and the tables and figures of what came out.

    python -m experiments paper exp1                  # small workloads, no download
    python -m experiments paper exp2 --scale paper    # the paper's models, on a GPU

The protocol is the same for every method. A method tries its three learning rates on one seed, the *validation* split
chooses, and all seeds are then trained with that one; test scores are looked at last. All methods see the same batches,
schedule (a short warm-up, then a cosine to a tenth), decay and clipping. Optimizer state is counted on real tensors.

Each finished run is a line of ``runs.jsonl`` in the output folder and is never repeated. A killed run goes on from its
last checkpoint when the same command is given again. Every method's state dict resumes exactly, which
``tests/experiments/test_methods.py`` holds them to; a checkpoint that cannot be loaded starts its run anew.
"""

from experiments.runs.catalog import EXPERIMENTS, Experiment
from experiments.runs.cell import Cell, Row, RunError, RunOptions
from experiments.runs.runner import Request, run, tables_of
from experiments.runs.store import Store, StoreError
from experiments.runs.training import train_cell

__all__ = [
    "EXPERIMENTS",
    "Cell",
    "Experiment",
    "Request",
    "Row",
    "RunError",
    "RunOptions",
    "Store",
    "StoreError",
    "run",
    "tables_of",
    "train_cell",
]

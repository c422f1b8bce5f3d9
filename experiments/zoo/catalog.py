"""All tasks of the zoo."""

from __future__ import annotations

from experiments.zoo import (
    direct,
    embeddings,
    fields,
    generative,
    graphs,
    images,
    physics,
    pretrained,
    reinforcement,
    sequences,
    tabular,
)
from experiments.zoo.task import Task

KINDS = (
    *(fields, physics, direct, reinforcement, embeddings, graphs, sequences, images, generative, tabular),
    pretrained,
)
TASKS: dict[str, Task] = {task.name: task for kind in KINDS for task in vars(kind).values() if isinstance(task, Task)}
"""By name, kind by kind."""

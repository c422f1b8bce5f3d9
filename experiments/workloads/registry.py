"""Workloads by name, ``size/dataset``, or from a file of one's own."""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from baoc.core.text import human_count, table
from baoc.tools.models.resolve import explained, importable, load_file
from experiments.workloads import causal, enwik8, fine_tuning, gpt, llama, t5, unet, vit
from experiments.workloads.base import Options, Workload, WorkloadError
from experiments.workloads.sources import presence

FAMILIES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (vit.ViTWorkload, vit.SIZES),
    (gpt.GPTWorkload, gpt.SIZES),
    (t5.T5Workload, t5.SIZES),
    (llama.LlamaWorkload, llama.SIZES),
    (enwik8.LlamaOnBytes, enwik8.SIZES),
    (unet.UNetWorkload, unet.SIZES),
    (fine_tuning.GPTFineTuning, fine_tuning.GPT_SIZES),
    (fine_tuning.ViTFineTuning, fine_tuning.VIT_SIZES),
)
_ENTRIES = {
    f"{name}/{dataset}": (family, size, dataset)
    for family, sizes in FAMILIES
    for name, size in sizes.items()
    for dataset in family.tasks
}


def names() -> list[str]:
    """Every workload's name.

    >>> [name for name in names() if name.startswith("gpt-small/")]
    ['gpt-small/alpaca', 'gpt-small/gsm8k', 'gpt-small/embedded', 'gpt-small/alpaca-gsm8k']
    """
    return list(_ENTRIES)


def get(name: str, options: Options | None = None) -> Workload:
    """The workload of a name, or of a Python file.

    >>> get("vit-small/digits").description
    'a ViT of 4 layers and width 128, reading handwritten digits'
    """
    if name.endswith(".py"):
        return load(name, options)
    if name not in _ENTRIES:
        if found := causal.find(name, options):
            return found
        close = get_close_matches(name, _ENTRIES, n=3, cutoff=0.5)
        hint = f"Did you mean {' or '.join(close)}?" if close else f"There are {', '.join(_ENTRIES)}."
        raise WorkloadError(
            f"there is no workload {name!r}. {hint} A workload of your own is a path that ends "
            "in .py. A pretrained model is NAME/gsm8k with --pretrained DIR/NAME."
        )
    family, size, dataset = _ENTRIES[name]
    workload: Workload = family(name, size, dataset, options)
    return workload


def load(path: str | Path, options: Options | None = None) -> Workload:
    """The one workload in a person's own file: an instance if there is one, or else a class, made with the options.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "mine.py")
    ...     _ = path.write_text('''
    ... import torch
    ... from experiments.workloads import LOSS, Workload
    ...
    ... class Line(Workload):
    ...     name, description, metric = "line", "fit a line", LOSS
    ...     steps, batch_size, lr = 100, 16, 1e-2
    ...
    ...     def build(self, *, seed, device="cpu", pretrained=None):
    ...         torch.manual_seed(seed)
    ...         return torch.nn.Linear(1, 1).to(device)
    ...
    ...     def train_batches(self, *, seed, start=0):
    ...         generator = torch.Generator()
    ...         while True:
    ...             generator.manual_seed(seed * 1_000_003 + start)
    ...             yield {"x": torch.rand(self.batch_size, 1, generator=generator)}
    ...             start += 1
    ...
    ...     def loss(self, model, batch):
    ...         return (model(batch["x"]) - 3 * batch["x"]).square().mean()
    ...
    ...     def evaluate(self, model, split, max_batches=None):
    ...         with torch.no_grad():
    ...             return {"loss": self.loss(model, {"x": torch.linspace(0, 1, 64).unsqueeze(1)}).item()}
    ... ''')
    ...     load(path).description
    'fit a line'
    """
    path = Path(path)
    if not path.is_file() or path.suffix != ".py":
        raise WorkloadError(f"{str(path)!r} is not a Python file.")
    with importable(path.parent):
        with explained(f"{path} cannot be imported", path):
            module = load_file(path)
        found = _workload_in(module, path)
        if isinstance(found, Workload):
            return found
        with explained(f"the workload of {path} cannot be made", path):
            return found(options)


def entries(options: Options | None = None) -> list[dict[str, Any]]:
    """All workloads with what they train, and whether their data is there."""
    options = options or Options()
    return [
        {
            "name": name,
            "family": family.family,
            "parameters": size.parameters,
            "dataset": dataset,
            "data": presence(dataset, options),
            "metric": family.metric.name,
            "steps": size.steps,
            "batch_size": size.batch_size,
        }
        for name, (family, size, dataset) in _ENTRIES.items()
    ]


def describe(options: Options | None = None) -> str:
    """The same as a table."""
    header = ["name", "family", "parameters", "data", "metric", "steps", "batch"]
    rows = [
        [
            entry["name"],
            entry["family"],
            human_count(entry["parameters"]),
            f"{entry['dataset']} ({entry['data']})",
            entry["metric"],
            entry["steps"],
            entry["batch_size"],
        ]
        for entry in entries(options)
    ]
    return table(header, rows, right=["parameters", "steps", "batch"])


def _workload_in(module: ModuleType, path: Path) -> Workload | type[Workload]:
    instances = {id(value): key for key, value in vars(module).items() if isinstance(value, Workload)}
    own = [value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__]
    classes = [value for value in own if issubclass(value, Workload)]
    whole = [value.__name__ for value in classes if not inspect.isabstract(value)]
    found = list(instances.values()) or whole
    if len(found) == 1:
        only: Workload | type[Workload] = getattr(module, found[0])
        return only
    if found:
        raise WorkloadError(
            f"{str(path)!r} has several workloads: {', '.join(found)}. Leave one, or make one instance."
        )
    lacking = [f" {value.__name__} lacks {', '.join(sorted(value.__abstractmethods__))}." for value in classes]
    raise WorkloadError(f"{str(path)!r} has no workload: no class that derives from Workload.{''.join(lacking)}")

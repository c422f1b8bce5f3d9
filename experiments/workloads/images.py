"""CIFAR-10 and scikit-learn's digits as colour images of 32 x 32, and folders of images such as ImageNet's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.packages import need
from experiments.workloads.base import Options, Split, WorkloadError
from experiments.workloads.sources import folder_of, from_hub, missing, split_of

CLASSES = 10  # of CIFAR-10 and the digits
SIZE = 32
_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
_KEYS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Images:
    """One split."""

    pixels: Tensor  # (images, 3, SIZE, SIZE), uint8
    labels: Tensor  # (images,), int64

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Pixels from -1 to 1, and labels."""
        return self.pixels[indices] / 127.5 - 1, self.labels[indices]


class Loaded(Protocol):
    """One split of any dataset."""

    def __len__(self) -> int: ...

    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Pixels from -1 to 1, and labels."""


Splits = dict[Split, Images]


@dataclass(frozen=True)
class Files:
    """One split of a folder of images, which are read when they are needed."""

    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    side: int

    def __len__(self) -> int:
        return len(self.paths)

    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Pixels from -1 to 1, and labels. The middle of an image, scaled so that its shorter side fits."""
        pixels = torch.stack([_square(self.paths[index], self.side) for index in indices])
        return pixels / 127.5 - 1, torch.tensor([self.labels[index] for index in indices])


def image_folder(dataset: str, side: int, options: Options) -> tuple[dict[Split, Files], int]:
    """Read ``train/`` and ``val/``, each with a folder per class; return the splits and the number of classes.

    One image in twenty of ``train`` is for validation; ``val`` is the test split, as is usual for ImageNet.
    """
    folder = folder_of(dataset, options)
    if folder is None:
        from_hub(dataset)  # says that it is not there
        raise AssertionError
    for split in ("train", "val"):
        if not (folder / split).is_dir():
            raise missing(dataset, f"there is no folder {str(folder / split)!r}")
    names = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    found: dict[Split, list[tuple[Path, int]]] = {"train": [], "validation": [], "test": []}
    for label, name in enumerate(names):
        for path in _image_files(folder / "train" / name):
            found[split_of(f"{name}/{path.name}".encode(), one_in=20, has_test=True)].append((path, label))
        found["test"] += [(path, label) for path in _image_files(folder / "val" / name)]
    splits = {
        split: Files(tuple(path for path, _ in pairs), tuple(label for _, label in pairs), side)
        for split, pairs in found.items()
    }
    return splits, len(names)


def _image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in _SUFFIXES)


def _square(path: Path, side: int) -> Tensor:
    image = need("PIL.Image", "a folder of images").open(path).convert("RGB")
    scale = side / min(image.size)
    width, height = (max(side, round(scale * size)) for size in image.size)
    left, top = (width - side) // 2, (height - side) // 2
    pixels = np.asarray(image.resize((width, height)).crop((left, top, left + side, top + side)))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def load(dataset: str, options: Options) -> Splits:
    """A dataset's three splits, which share no image."""
    return _load(dataset, options.data_folder)


@lru_cache(maxsize=4)  # a sweep makes the same workload many times in one process
def _load(dataset: str, data: Path | None) -> Splits:
    return DATASETS[dataset](Options(data=data))


def cifar10(options: Options) -> Splits:
    """CIFAR-10 with its own test set."""
    folder = folder_of("cifar10", options)
    if folder is None:
        train, test = _from_hub()
    elif binary := sorted(folder.rglob("data_batch_*.bin")):
        train, test = _read_binary(binary), _read_binary([binary[0].with_name("test_batch.bin")])
    else:
        train, test = _read_npz(folder)
    return {**_divide(train, has_test=True), "test": test}


def digits(_: Options) -> Splits:
    """The 1,797 handwritten digits that scikit-learn comes with, 8 x 8 and grey, enlarged."""
    bunch = need("sklearn.datasets", "the digits dataset").load_digits()
    grey = torch.tensor(bunch.images).float().unsqueeze(1) * (255 / 16)  # (images, 1, 8, 8)
    large = F.interpolate(grey, size=(SIZE, SIZE), mode="bilinear").round().to(torch.uint8)
    return _divide(Images(large.expand(-1, 3, -1, -1).contiguous(), torch.tensor(bunch.target).long()))


DATASETS: dict[str, Callable[[Options], Splits]] = {"cifar10": cifar10, "digits": digits}


def _divide(images: Images, *, has_test: bool = False) -> Splits:
    homes = [split_of(pixels.tobytes(), one_in=10, has_test=has_test) for pixels in images.pixels.numpy()]
    splits: Splits = {}
    for split in ("train", "validation", "test"):
        chosen = [i for i, home in enumerate(homes) if home == split]
        splits[split] = Images(images.pixels[chosen], images.labels[chosen])
    return splits


def _images(pixels: Any, labels: Any, where: object) -> Images:
    """From (images, SIZE, SIZE, 3) bytes."""
    pixels, labels = np.asarray(pixels), np.asarray(labels)
    if pixels.dtype != np.uint8 or pixels.shape != (len(labels), SIZE, SIZE, 3):
        shape = f"{pixels.dtype} of {pixels.shape} for {len(labels)} labels"
        raise WorkloadError(f"{where} holds {shape}; expected uint8 of (images, {SIZE}, {SIZE}, 3).")
    if len(labels) and not 0 <= labels.min() <= labels.max() < CLASSES:
        raise WorkloadError(f"{where} has labels from {labels.min()} to {labels.max()}; expected 0 to {CLASSES - 1}.")
    return Images(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels).long())


def _read_npz(folder: Path) -> tuple[Images, Images]:
    found = sorted(folder.glob("*.npz"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise missing("cifar10", f"{str(folder)!r} should hold one .npz and holds {names}")
    with np.load(found[0]) as arrays:
        if lacking := [key for key in _KEYS if key not in arrays]:
            raise WorkloadError(f"{str(found[0])!r} lacks {', '.join(lacking)}.")
        x_train, y_train, x_test, y_test = (arrays[key] for key in _KEYS)
    return _images(x_train, y_train, found[0]), _images(x_test, y_test, found[0])


def _read_binary(paths: list[Path]) -> Images:
    """The published binary version: a byte for the label, then 32 x 32 of red, of green and of blue."""
    if lacking := [str(path) for path in paths if not path.is_file()]:
        raise missing("cifar10", f"there is no file {lacking[0]!r}")
    content = np.concatenate([np.fromfile(path, np.uint8) for path in paths])
    row = 1 + 3 * SIZE * SIZE
    if len(content) % row:
        raise WorkloadError(f"{str(paths[0].parent)!r}: {len(content)} bytes are not whole images of {row} bytes.")
    rows = content.reshape(-1, row)
    return _images(rows[:, 1:].reshape(-1, 3, SIZE, SIZE).transpose(0, 2, 3, 1), rows[:, 0], paths[0].parent)


def _from_hub() -> tuple[Images, Images]:
    hub = from_hub("cifar10")
    train, test = (
        _images(
            np.stack([np.asarray(image) for image in hub[split]["img"]]), list(hub[split]["label"]), "the hub's copy"
        )
        for split in ("train", "test")
    )
    return train, test

"""The ResNet for CIFAR-10 of He et al. (2016), so that published weights fit: shortcuts have no parameters."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the pixels, from 0 to 1, that the weights were trained with."""


class Block(nn.Module):
    """Two convolutions beside a shortcut, which skips pixels and pads channels where the shape changes."""

    def __init__(self, fan_in: int, width: int) -> None:
        super().__init__()
        self.stride = 1 if fan_in == width else 2
        self.padding = (width - fan_in) // 2  # channels of zeros on either side
        self.conv1 = nn.Conv2d(fan_in, width, 3, self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        skipped = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + skipped)


class ResNet(nn.Module):
    """A convolution, three stages of 16, 32 and 64 channels, and a linear layer."""

    def __init__(self, blocks: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = self._stage(16, 16, blocks)
        self.layer2 = self._stage(16, 32, blocks)
        self.layer3 = self._stage(32, 64, blocks)
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.linear(self.layer3(self.layer2(self.layer1(x))).mean(dim=(2, 3)))

    @staticmethod
    def _stage(fan_in: int, width: int, blocks: int) -> nn.Sequential:
        return nn.Sequential(Block(fan_in, width), *(Block(width, width) for _ in range(blocks - 1)))


def weights_file(folder: Path) -> Path | None:
    """Return the file of published weights in a folder; None if there is none."""
    return next(iter(sorted(folder.glob("resnet20*.th"))), None)


def pretrained(path: Path) -> ResNet:
    """Return ResNet-20 with published weights."""
    model = ResNet()
    state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
    model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    return model


def pixels(images: Tensor) -> Tensor:
    """Return what the model takes of images from -1 to 1, (n, 3, 32, 32)."""
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    return ((images + 1) / 2 - mean) / std

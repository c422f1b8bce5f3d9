"""Models by name: :data:`MODELS` contains common architectures, including the six of the paper.

>>> import torch
>>> with torch.device("meta"):
...     model = MODELS["vit"]()
>>> sum(param.numel() for param in model.parameters())
10949002
"""

from baoc.tools.models.named import ALIASES, MODELS, ModelError, ViT

__all__ = ["ALIASES", "MODELS", "ModelError", "ViT"]
